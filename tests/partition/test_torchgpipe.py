"""torchgpipe's block partition: what it promises, and what it does not."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from gems.config.constraints import check_boundaries
from gems.partition.heuristics import block_partition


@pytest.mark.parametrize(
    "draw",
    [lambda rng: rng.random() ** 3, lambda rng: rng.choice([0, 1, 2, 9]), lambda rng: 4.0],
    ids=["any", "few values", "alike"],
)
def test_mapped_sums_differ_by_one_at_most(draw: Callable[[random.Random], float]) -> None:
    for seed in range(150):
        rng = random.Random(seed)
        num_layers = rng.randint(1, 30)
        num_stages = rng.randint(1, num_layers)
        costs = [draw(rng) for _ in range(num_layers)]
        boundaries = check_boundaries(block_partition(costs, num_stages), num_layers, num_stages)
        spread = max(costs) - min(costs) or 1.0
        mapped = [(cost - min(costs)) / spread for cost in costs]
        sums = [sum(mapped[first:end]) for first, end in pairwise(boundaries)]
        assert max(sums) <= min(sums) + 1 + 1e-9


@pytest.mark.parametrize(
    ("costs", "num_stages", "expected"),
    [
        ([1, 1, 1, 1], 2, (0, 2, 4)),
        ([1, 1, 1, 1, 1], 2, (0, 2, 5)),
        ([0, 0, 0, 0, 1, 1, 1, 1], 2, (0, 6, 8)),
        ([1, 1, 1, 1, 0, 0, 0, 0], 2, (0, 2, 8)),
        ([3], 1, (0, 1)),
    ],
)
def test_cuts(costs: list[float], num_stages: int, expected: tuple[int, ...]) -> None:
    assert block_partition(costs, num_stages) == expected


def test_it_is_not_the_least_highest_sum() -> None:
    """What every layer costs alike is subtracted, and a difference of one dear layer is left."""
    costs = [10.0, 10.0, 10.0, 11.0, 10.0, 10.0]
    found = block_partition(costs, 4)
    highest = max(sum(costs[first:end]) for first, end in pairwise(found))
    assert highest > 21.0, "pairs would do with 21"


@pytest.mark.parametrize("num_stages", [0, 4])
def test_stages_that_cannot_be(num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"3 layers make no {num_stages} stages"):
        block_partition([1, 2, 3], num_stages)

"""PipeDream's optimizer beside a look at every cut."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from gems.partition.heuristics import pipedream
from tests.helpers.problems import every_cut


def slowest(
    times_s: list[float], sizes: list[int], cut: tuple[int, ...], bytes_per_s: float | None
) -> float:
    compute = [sum(times_s[first:end]) for first, end in pairwise(cut)]
    return max(
        [*compute, *(2 * sizes[place - 1] / bytes_per_s for place in cut[1:-1] if bytes_per_s)]
    )


@pytest.mark.parametrize("bytes_per_s", [None, 10.0, 1.0])
def test_the_slowest_of_compute_and_messages_is_least(bytes_per_s: float | None) -> None:
    for seed in range(60):
        rng = random.Random(seed)
        num_layers = rng.randint(1, 9)
        num_stages = rng.randint(1, num_layers)
        times_s = [rng.random() for _ in range(num_layers)]
        sizes = [rng.randint(1, 9) for _ in range(num_layers - 1)]
        found = pipedream(times_s, sizes, num_stages, bytes_per_s)
        every = [
            slowest(times_s, sizes, cut, bytes_per_s) for cut in every_cut(num_layers, num_stages)
        ]
        assert found in every_cut(num_layers, num_stages)
        assert slowest(times_s, sizes, found, bytes_per_s) == pytest.approx(min(every), rel=1e-12)


def test_a_slow_link_moves_the_cut() -> None:
    times_s = [1.0, 1.0, 1.0, 1.0]
    sizes = [1, 50, 1]
    assert pipedream(times_s, sizes, 2) == (0, 2, 4)
    assert pipedream(times_s, sizes, 2, 10.0) in ((0, 1, 4), (0, 3, 4))


@pytest.mark.parametrize("num_stages", [0, 3])
def test_stages_that_cannot_be(num_stages: int) -> None:
    with pytest.raises(ValueError, match=f"2 layers make no {num_stages} stages"):
        pipedream([1.0, 2.0], [5], num_stages)

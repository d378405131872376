"""Made-up problems of cutting, and the answer by looking at every cut."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

import numpy as np

from gems.partition.problem import Problem
from gems.profile.spans import RankCosts, Spans, Table
from tests.helpers.profiles import random_profile

Groups = list[tuple[int, ...]]
PLACEMENTS: dict[str, Callable[[int], Groups]] = {
    "chain": lambda n: [(s,) for s in range(n)],
    "bidirectional": lambda n: [
        pair
        for s in range((n + 1) // 2)
        for pair in [(s, n - 1 - s) if s != n - 1 - s else (s,)] * 2
    ],
    "v": lambda n: [(r, 2 * n - 1 - r) for r in range(n)],
    "odd": lambda n: [*[(s, 2 * n - s) for s in range(n)], (n, n)],
    "looped": lambda n: [(r, n + r) for r in range(n)],
    "wave": lambda n: [(r, 2 * n - 1 - r, 2 * n + r, 4 * n - 1 - r) for r in range(n)],
}
MOST = {"chain": 5, "bidirectional": 5, "v": 3, "odd": 2, "looped": 4, "wave": 2}


def given(table: Table) -> Callable[[], Table]:
    return lambda: table


def random_table(rng: np.random.Generator, num_layers: int) -> Table:
    """Costs that know nothing of each other: few whole numbers, so that there are ties, or any."""
    if rng.random() < 0.5:
        return rng.integers(1, 40, size=(num_layers, num_layers + 1)).astype(float)
    return rng.random((num_layers, num_layers + 1))


def random_problem(
    placement: str, seed: int, limited: bool = False, most_layers: int = 12
) -> Problem:
    """Random tables, one to three moments; with limits about half of the problems have no cut."""
    rng = np.random.default_rng([seed, limited, list(PLACEMENTS).index(placement)])
    groups = PLACEMENTS[placement](int(rng.integers(1, MOST[placement] + 1)))
    num_stages = 1 + max(max(group) for group in groups)
    num_layers = int(rng.integers(num_stages, most_layers + 1))
    num_moments = int(rng.integers(1, 4))

    def costs() -> tuple[RankCosts, ...]:
        return tuple(
            RankCosts(
                group,
                tuple(
                    tuple(given(random_table(rng, num_layers)) for _ in group)
                    for _ in range(num_moments)
                ),
            )
            for group in groups
        )

    ranks = costs()
    limits = costs() if limited else ()
    boundary_bytes = tuple(int(size) for size in rng.integers(1, 9, size=num_layers - 1))
    limit = float("inf")
    if limits:
        cuts = [every_cut(num_layers, num_stages)[0], every_cut(num_layers, num_stages)[-1]]
        limit = min(largest(limits, cut) for cut in cuts) * float(rng.uniform(0.5, 1.1))
    return Problem(num_layers, num_stages, ranks, boundary_bytes, limits, limit)


def largest(ranks: Sequence[RankCosts], boundaries: Sequence[int]) -> float:
    return max(rank.at([(boundaries[s], boundaries[s + 1]) for s in rank.stages]) for rank in ranks)


def every_cut(num_layers: int, num_stages: int) -> list[tuple[int, ...]]:
    return [
        (0, *inner, num_layers)
        for inner in itertools.combinations(range(1, num_layers), num_stages - 1)
    ]


def least(problem: Problem) -> tuple[float, int]:
    """The least cost, and the fewest bytes that cross among the cuts of that cost."""
    return min(
        (problem.cost(cut), problem.crossing_bytes(cut))
        for cut in every_cut(problem.num_layers, problem.num_stages)
    )


def memory_problem(
    placement: str,
    num_ranks: int,
    num_layers: int,
    seed: int = 0,
    decay: float = 1.0,
    inputs: bool = True,
) -> Problem:
    """Bytes as real stages have them: parameters, activations in flight, a transient; and inputs.

    Those are so large that a stage may hold more without its first layer: the costs are nearly
    monotone.
    """
    profile = random_profile(num_layers, seed, decay)
    spans = Spans(profile)
    groups = PLACEMENTS[placement](num_ranks)
    num_stages = 1 + max(max(group) for group in groups)

    def table(stage: int, active: bool) -> Table:
        in_flight = min(num_stages - stage, 8)
        kept = 4 * spans.params + in_flight * (spans.stash + 4 * inputs * spans.given)
        return kept + active * spans.weight_gradient_peak

    ranks = tuple(
        RankCosts(
            group,
            tuple(
                tuple(given(table(stage, k == active)) for k, stage in enumerate(group))
                for active in range(len(group))
            ),
        )
        for group in groups
    )
    return Problem(num_layers, num_stages, ranks, spans.boundary_bytes())

"""Tables from below: the largest monotone one, and whether one is monotone."""

from __future__ import annotations

import numpy as np
import pytest

from gems.partition.solvers.tables import is_monotone, kept, minorant, valid
from gems.profile.spans import Table
from tests.helpers.problems import memory_problem, random_problem, random_table


def runs(num_layers: int) -> list[tuple[int, int]]:
    return [(i, e) for i in range(num_layers) for e in range(i + 1, num_layers + 1)]


@pytest.mark.parametrize("num_layers", [1, 2, 5, 9])
def test_the_minorant_is_the_least_of_all_longer_runs(num_layers: int) -> None:
    table = random_table(np.random.default_rng(num_layers), num_layers) * 1e9
    low = minorant(table)
    assert low.shape == (num_layers + 1, num_layers + 1)
    for i, e in runs(num_layers):
        longer = min(table[span] for span in runs(num_layers) if span[0] <= i and span[1] >= e)
        assert low[i, e] <= longer
        assert low[i, e] == pytest.approx(longer, rel=1e-6)
    least = min(table[span] for span in runs(num_layers))
    assert np.all(np.diagonal(low) <= least)
    assert np.all(np.diagonal(low) >= least * (1 - 1e-6))
    assert np.all(low[np.tri(num_layers + 1, k=-1, dtype=bool)] == np.inf)


def test_a_minorant_is_never_above_in_single_precision() -> None:
    table = np.full((3, 4), 2.0**24 + 1)  # rounds up in single precision
    assert np.all(minorant(table)[:3][valid(3)] < 2.0**24 + 1)


def sums(weights: list[float]) -> Table:
    total = np.concatenate(([0.0], np.cumsum(weights)))
    table: Table = total[None, :] - total[:-1, None]
    return table


def test_what_is_monotone() -> None:
    table = sums([3.0, 1.0, 2.0, 5.0])
    assert is_monotone(table)
    for place, value, expected in (
        ((1, 3), 2.9, True),
        ((1, 3), 1.9, False),
        ((1, 3), 6.1, False),
        ((0, 4), 8.0, True),
        ((0, 4), 7.9, False),
        ((2, 3), -1.0, False),
        ((2, 3), 0.0, True),
    ):
        changed = table.copy()
        changed[place] = value
        assert is_monotone(changed) == expected, (place, value)


def test_what_is_no_run_says_nothing() -> None:
    table = sums([3.0, 1.0, 2.0])
    table[~valid(3)] = [-5.0, 70.0, 8.0, -9.0, 0.5, 6.0]
    assert is_monotone(table)
    assert np.array_equal(minorant(table), minorant(sums([3.0, 1.0, 2.0])))


def test_kept_tables_are_the_same_ones() -> None:
    problem = memory_problem("chain", 3, 6)
    shared = kept(random_problem("v", 1))
    first = shared.ranks[0].moments[0][0]
    assert first() is first()
    assert kept(problem).cost((0, 2, 4, 6)) == problem.cost((0, 2, 4, 6))

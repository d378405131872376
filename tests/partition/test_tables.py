"""Tables from below: the largest monotone one."""

from __future__ import annotations

import numpy as np
import pytest

from gems.partition.solvers.tables import minorant, valid
from tests.helpers.problems import random_table


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

"""Tables as the solvers read them: built once, folded over what is judged together, made monotone from below."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from gems.partition.problem import Problem
from gems.profile.spans import RankCosts, Table

Low = NDArray[np.float32]
Build = Callable[[], Table]


def kept(problem: Problem) -> Problem:
    """Return the same problem with tables that are built at the first call only; equal callables share one."""
    found: dict[Build, Build] = {}

    def keep(build: Build) -> Build:
        if build not in found:
            made: list[Table] = []

            def table() -> Table:
                if not made:
                    made.append(np.asarray(build(), dtype=np.float64))
                return made[0]

            found[build] = table
        return found[build]

    def keep_all(ranks: tuple[RankCosts, ...]) -> tuple[RankCosts, ...]:
        return tuple(
            RankCosts(rank.stages, tuple(tuple(map(keep, tables)) for tables in rank.moments)) for rank in ranks
        )

    return replace(problem, ranks=keep_all(problem.ranks), limits=keep_all(problem.limits))


def valid(num_layers: int) -> NDArray[np.bool_]:
    """Return where an array (L, L + 1) is read: [i, e] with e > i."""
    return np.arange(num_layers + 1)[None, :] > np.arange(num_layers)[:, None]


def is_monotone(table: Table) -> bool:
    """Return whether no run of layers costs more than a longer one around it, and none less than 0."""
    num_layers = len(table)
    longer = table[:, 1:] >= table[:, :-1]
    earlier = table[:-1] >= table[1:]
    read = valid(num_layers)
    return bool(
        np.all(longer | ~read[:, :-1]) and np.all(earlier | ~read[1:]) and np.all(np.diagonal(table, offset=1) >= 0)
    )


def minorant(table: Table) -> Low:
    """Return the largest monotone table (L + 1, L + 1) below another one, rounded down to single precision.

    Entry [i, e] is the least cost of a run of layers that holds i up to e; [i, i], of a stage without layers, is the
    least cost of any. Below the diagonal it is infinite.
    """
    num_layers = len(table)
    outside = ~valid(num_layers)
    low = np.full((num_layers + 1, num_layers + 1), np.inf, dtype=np.float32)
    np.nextafter(table.astype(np.float32), np.float32(-np.inf), out=low[:-1])
    low[:-1][outside] = np.inf
    floor = low.min()
    np.minimum.accumulate(low, axis=0, out=low)
    np.minimum.accumulate(low[:, ::-1], axis=1, out=low[:, ::-1])
    low[:-1][outside] = low[-1] = np.inf
    np.fill_diagonal(low, floor)
    return low

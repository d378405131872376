"""The pattern: one period of a cyclic schedule, built from the earliest free slots.

Slots are counted modulo the period.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from gems.schedule.synthesis.problem import Act, Problem


@dataclass(frozen=True, slots=True)
class Template:
    """The starts of the operations of one period's micro-batches, in grains.

    `starts[g][operation]` has operations as in `Acting` up to 3 S. Micro-batch m follows row m mod
    G, (m div G) periods later. `overflow` is the size above the cap, summed over ranks, for which a
    list scheduler must wait.
    """

    period: int
    starts: tuple[tuple[int, ...], ...]
    overflow: int

    @property
    def num_micro_batches(self) -> int:
        """The number of micro-batches of one period."""
        return len(self.starts)

    def keys(self, grain: int, num_micro_batches: int) -> list[list[int]]:
        """Return the starts for a whole step, in ticks."""
        group = self.num_micro_batches
        return [
            [(start + m // group * self.period) * grain for start in self.starts[m % group]]
            for m in range(num_micro_batches)
        ]


class _Ring:
    """Busy grains of one rank or copy engine, modulo the period, as the bits of one integer."""

    __slots__ = ("busy", "full", "period")

    def __init__(self, period: int) -> None:
        self.period, self.busy, self.full = period, 0, (1 << period) - 1

    def rooms(self, length: int, turn: int) -> int:
        """Return the starts with `length` free grains as bits, with the bit of `turn` first."""
        if length > self.period:
            return 0
        free = self.full & ~self.busy
        period = self.period
        known = 1
        while known < length:
            step = min(known, length - known)
            free &= (free >> step) | (free << (period - step))
            known += step
        free &= self.full
        turn %= period
        return ((free >> turn) | (free << (period - turn))) & self.full

    def put(self, start: int, length: int) -> int | None:
        """Use the earliest room from `start` on and return its start; None if the ring is full."""
        rooms = self.rooms(length, start)
        return self._take(start + (rooms & -rooms).bit_length() - 1, length) if rooms else None

    def put_before(self, end: int, length: int) -> int | None:
        """Use the latest room that ends by `end` and return its start; None if the ring is full."""
        rooms = self.rooms(length, end - length + 1)
        return (
            self._take(end - length + rooms.bit_length() - self.period, length) if rooms else None
        )

    def _take(self, start: int, length: int) -> int:
        bits = ((1 << length) - 1) << (start % self.period)
        self.busy |= (bits & self.full) | (bits >> self.period)
        return start


def pattern(
    problem: Problem,
    acts: Sequence[int],
    period: int,
    phases: Sequence[int],
    stalls: Sequence[Sequence[int]] | None = None,
) -> Template | None:
    """Build one period: the chains of the micro-batches in turn, then their weight gradients.

    Every operation takes the earliest free slot, modulo the period, after its predecessor
    (stall-free modulo scheduling, as soon as possible: Rau 1994). Recomputation takes the latest
    slot before its input gradient; copies take the earliest and latest slots on their engines.
    `phases[g]` starts micro-batch g, and `stalls[g][operation]` delays an operation; annealing
    varies both. Return None if an operation finds no slot. All times are in grains.
    """
    num_stages = problem.num_stages
    rings = [_Ring(period) for _ in range(problem.num_ranks)]
    delays = stalls or [[0] * (3 * num_stages)] * len(phases)
    starts: list[list[int]] = []
    again: list[dict[int, int]] = []
    for g, phase in enumerate(phases):
        chain = _chain(problem, acts, rings, g % problem.num_directions, phase, delays[g])
        if chain is None:
            return None
        starts.append(chain[0])
        again.append(chain[1])
    for g, row in enumerate(starts):
        direction = g % problem.num_directions
        weights = [0] * num_stages
        for stage in reversed(range(num_stages)):
            end = row[2 * num_stages - 1 - stage]
            end += problem.time_grains[2 * num_stages - 1 - stage]
            ring = rings[problem.rank[direction][stage]]
            now = end + delays[g][2 * num_stages + stage]
            start = ring.put(now, problem.weight_grains[stage])
            if start is None:
                return None
            weights[stage] = start
        row += weights
    peaks = _held(problem, acts, period, starts, again)
    if peaks is None:
        return None
    return Template(
        period, tuple(map(tuple, starts)), sum(max(0, top - problem.cap) for top in peaks)
    )


def _chain(
    problem: Problem,
    acts: Sequence[int],
    rings: Sequence[_Ring],
    direction: int,
    now: int,
    delays: Sequence[int],
) -> tuple[list[int], dict[int, int]] | None:
    """Return the starts of a micro-batch's chain, and of its recomputations by stage."""
    ranks = problem.rank[direction]
    lengths = problem.time_grains
    lags = problem.lag_grains[direction]
    num_stages = problem.num_stages
    row: list[int] = []
    again = {}
    for c in range(2 * num_stages):
        start = rings[ranks[c]].put(now + lags[c] + delays[c], lengths[c])
        if start is None:
            return None
        row.append(start)
        stage = 2 * num_stages - 1 - c
        if c >= num_stages and acts[stage] == Act.RECOMPUTE:
            begin = rings[ranks[c]].put_before(start, problem.recompute_grains[stage])
            if begin is None or begin < row[stage] + lengths[stage]:
                return None
            again[stage] = begin
        now = start + lengths[c]
    return row, again


def _held(
    problem: Problem,
    acts: Sequence[int],
    period: int,
    starts: Sequence[Sequence[int]],
    again: Sequence[dict[int, int]],
) -> list[int] | None:
    """Return the peak of each rank in the steady state.

    Return None if a copy finds no room on its engine.
    """
    num_stages = problem.num_stages
    ranks = range(problem.num_ranks)
    away = [_Ring(period) for _ in ranks]
    back = [_Ring(period) for _ in ranks]
    changes: list[list[tuple[int, int]]] = [[] for _ in ranks]
    base = [0] * problem.num_ranks
    for g, row in enumerate(starts):
        direction = g % problem.num_directions
        for stage in reversed(range(num_stages)):
            rank = problem.rank[direction][stage]
            size = problem.size[stage]
            act = acts[stage]
            begin = row[stage]
            end = row[2 * num_stages + stage] + problem.weight_grains[stage]
            lives = [(begin, end, size)]
            turn = row[2 * num_stages - 1 - stage]
            change = problem.held[stage] - size
            if change < 0:  # freed by the input gradient
                turn += problem.time_grains[2 * num_stages - 1 - stage]
            if act == Act.RECOMPUTE:
                boundary = problem.boundary[stage]
                lives = [(again[g][stage], end, size - boundary), (begin, end, boundary)]
            elif act == Act.OFFLOAD:
                length = problem.copy_grains[stage]
                out = away[rank].put(begin + problem.time_grains[stage], length)
                home = back[rank].put_before(row[2 * num_stages - 1 - stage], length)
                if out is None or home is None or home < out + length:
                    return None
                moved = problem.moved[stage]
                lives = [
                    (begin, end, size - moved),
                    (begin, out + length, moved),
                    (home, end, moved),
                ]
            for first, last, amount in (*lives, (turn, end, change)):
                base[rank] += (last // period - first // period) * amount
                changes[rank] += ((first % period, amount), (last % period, -amount))
    return [
        max(accumulate((change for _, change in sorted(rank_changes)), initial=level))
        for level, rank_changes in zip(base, changes, strict=True)
    ]

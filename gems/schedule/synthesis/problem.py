"""The integer form of a request on one placement, for the search's inner loops.

It includes the memory actions.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from fractions import Fraction
from itertools import accumulate
from math import ceil, floor, gcd, lcm

from gems.schedule.costs import Network, StageCosts
from gems.schedule.placement import Placement

SIZES_PER_UNIT = 10**12
CAP_SLACK = 5e-10
MAX_DENOMINATOR = 1000
MAX_TICKS_PER_UNIT = 1_000_000
MAX_GRAINS = 48
COARSE_GRAINS = 16


@dataclass(frozen=True, slots=True)
class Problem:
    """One placement with times in integer ticks and sizes in integers; `problem` builds it.

    A micro-batch in direction d is a chain of 2 S operations: forward of stages 0 to S - 1, then
    input gradients of stages S - 1 to 0. `rank[d][c]`, `time[c]` and `lag[d][c]` are the rank,
    the ticks and the flight before operation c. The other tuples of ticks and sizes are by stage. A
    `grain` is the coarser tick of patterns, in which the fields `*_grains` count.
    """

    name: str
    placement: Placement
    num_micro_batches: int
    cap: int
    ticks_per_unit: int
    grain: int
    rank: tuple[tuple[int, ...], ...]
    time: tuple[int, ...]
    lag: tuple[tuple[int, ...], ...]
    weight_grad: tuple[int, ...]
    recompute: tuple[int, ...]
    copy: tuple[int, ...]
    size: tuple[int, ...]
    moved: tuple[int, ...]
    held: tuple[int, ...]
    boundary: tuple[int, ...]
    num_ranks: int
    num_stages: int
    num_directions: int
    time_grains: tuple[int, ...]
    lag_grains: tuple[tuple[int, ...], ...]
    weight_grains: tuple[int, ...]
    recompute_grains: tuple[int, ...]
    copy_grains: tuple[int, ...]

    @property
    def grows(self) -> tuple[int, ...]:
        """By stage, the size held for the weight gradient beyond the size that forward kept."""
        return tuple(max(0, rest - size) for rest, size in zip(self.held, self.size, strict=True))

    @property
    def num_steps(self) -> int:
        """The compute actions of a whole step, without recomputation."""
        return 3 * self.num_stages * self.num_micro_batches

    def rank_stages(self, rank: int, direction: int) -> list[int]:
        """Return the stages that a rank holds in one direction, lowest first."""
        return [stage for way, stage in self.placement.stages_on(rank) if way == direction]

    def num_in(self, direction: int) -> int:
        """Return the number of micro-batches in a direction.

        Directions alternate; the first micro-batch goes down.
        """
        return (self.num_micro_batches - direction + self.num_directions - 1) // self.num_directions

    @property
    def counts(self) -> list[int]:
        """The number of micro-batches of each direction."""
        return [self.num_in(direction) for direction in range(self.num_directions)]

    def work(self) -> int:
        """Return the ticks of one micro-batch over all stages, without recomputation."""
        return sum(self.time) + sum(self.weight_grad)

    def stage_work(self, stage: int) -> int:
        """Return the ticks of one micro-batch on a stage, without recomputation."""
        return (
            self.time[stage] + self.time[2 * self.num_stages - 1 - stage] + self.weight_grad[stage]
        )

    def reached(self, direction: int) -> list[int]:
        """Return the least ticks from a micro-batch's start to the end of each operation."""
        spans = (time + lag for time, lag in zip(self.time, self.lag[direction], strict=True))
        return list(accumulate(spans))

    def lifetimes(self, direction: int) -> list[int]:
        """Return the least ticks from the start of a stage's forward to the end of its W."""
        ends = self.reached(direction)
        last = 2 * self.num_stages - 1
        return [
            ends[last - stage] - ends[stage] + self.time[stage] + self.weight_grad[stage]
            for stage in range(self.num_stages)
        ]


def problem(
    name: str,
    placement: Placement,
    num_micro_batches: int,
    costs: StageCosts,
    network: Network,
    cap: float | None,
) -> Problem:
    """Build the integer form of a request.

    It is exact if costs are fractions with small denominators, and otherwise accurate to a
    millionth of a unit. Without a cap there is room for all micro-batches.
    """
    flights = [network.hops(row, costs.boundary_bytes) for row in placement.ranks]
    input_grad = costs.split_input_grad
    values = {*costs.forward, *input_grad, *costs.weight_grad, *costs.recompute, *costs.copy}
    ticks_per_unit = _ticks_per_unit(values.union(*flights))

    def ticks(times: Iterable[float]) -> tuple[int, ...]:
        return tuple(round(time * ticks_per_unit) for time in times)

    def grains(times: Iterable[int]) -> tuple[int, ...]:
        return tuple(max(1, round(time / grain)) if time else 0 for time in times)

    chain = ticks((*costs.forward, *input_grad[::-1]))
    lags = tuple((0, *ticks(row), 0, *ticks(row[::-1])) for row in flights)
    weight_grad = ticks(costs.weight_grad)
    recompute = ticks(costs.recompute)
    copy = ticks(costs.copy)
    grain = _grain([*chain, *weight_grad, *(lag for row in lags for lag in row)])
    size = _sizes(costs.activation)
    room = sum(size) * num_micro_batches
    if cap is not None:
        room = floor((cap + CAP_SLACK) * SIZES_PER_UNIT)
    return Problem(
        name=name,
        placement=placement,
        num_micro_batches=num_micro_batches,
        cap=room,
        ticks_per_unit=ticks_per_unit,
        grain=grain,
        rank=tuple((*row, *row[::-1]) for row in placement.ranks),
        time=chain,
        lag=lags,
        weight_grad=weight_grad,
        recompute=recompute,
        copy=copy,
        size=size,
        moved=_sizes(costs.movable),
        held=_sizes(costs.held_for_weights),
        boundary=_sizes(costs.boundary),
        num_ranks=placement.num_ranks,
        num_stages=placement.num_stages,
        num_directions=placement.num_directions,
        time_grains=grains(chain),
        lag_grains=tuple(map(grains, lags)),
        weight_grains=grains(weight_grad),
        recompute_grains=grains(recompute),
        copy_grains=grains(copy),
    )


def _sizes(amounts: Iterable[float]) -> tuple[int, ...]:
    return tuple(ceil(amount * SIZES_PER_UNIT - 0.5) for amount in amounts)


def _ticks_per_unit(values: Iterable[float]) -> int:
    common = 1
    for value in values:
        fraction = Fraction(value).limit_denominator(MAX_DENOMINATOR)
        common = lcm(common, fraction.denominator)
        if abs(float(fraction) - value) > 1e-12 * max(1.0, value) or common > MAX_TICKS_PER_UNIT:
            return MAX_TICKS_PER_UNIT
    return common


def _grain(times: list[int]) -> int:
    """Return the tick of patterns.

    It is a common divisor of all times, or a part of their mean if that is too fine.
    """
    positive = [time for time in times if time]
    exact = gcd(*positive)
    if max(positive, default=0) <= MAX_GRAINS * exact:
        return exact or 1
    return max(1, sum(positive) // (len(positive) * COARSE_GRAINS))


class Act(IntEnum):
    """The treatment of activations: keep, recompute, or move to host memory and back."""

    KEEP = 0
    RECOMPUTE = 1
    OFFLOAD = 2


@dataclass(frozen=True, slots=True)
class Acting:
    """The acts of one micro-batch's stages, and their consequences.

    Operations are numbered over S stages: forward s, input gradient 2 S - 1 - s, weight gradient 2
    S + s, recomputation 3 S + s, copy out 4 S + s, copy back 5 S + s, the wait for a copy out 6 S +
    s. `takes[s]` is the size that a forward allocates, `awaited[d][c]` are the stages whose
    activations are requested when operation c of the chain starts, and `peak_after[d][operation]`
    is the most that the operation's rank holds of this micro-batch from then on.
    """

    acts: tuple[int, ...]
    takes: tuple[int, ...]
    awaited: tuple[tuple[int, ...], ...]
    peak_at_first: tuple[tuple[int, ...], ...]
    peak_after: tuple[tuple[int, ...], ...]


def acting(problem: Problem, acts: Sequence[int], ahead: int) -> Acting:
    """Derive the consequences of `acts`.

    Activations are requested `ahead` operations of the chain early.
    """
    num_stages = problem.num_stages
    awaited: list[list[int]] = [[] for _ in range(2 * num_stages)]
    for stage in reversed(range(num_stages)):
        if acts[stage]:
            awaited[max(num_stages - 1, 2 * num_stages - 1 - stage - ahead)].append(stage)
    after = [_peaks(problem, acts, direction) for direction in range(problem.num_directions)]
    return Acting(
        acts=tuple(acts),
        takes=tuple(
            problem.boundary[stage] if act == Act.RECOMPUTE else problem.size[stage]
            for stage, act in enumerate(acts)
        ),
        awaited=tuple(map(tuple, awaited)),
        peak_at_first=tuple(first for first, _ in after),
        peak_after=tuple(table for _, table in after),
    )


def _peaks(
    problem: Problem, acts: Sequence[int], direction: int
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the peak of one micro-batch on each rank, in total and after each operation."""
    num_stages = problem.num_stages
    table = [0] * (6 * num_stages)
    first = []
    for rank in range(problem.num_ranks):
        levels: list[tuple[int, int]] = []  # for each operation of the rank, in order
        level = 0
        stages = problem.rank_stages(rank, direction)
        for stage in stages:
            level += (
                problem.boundary[stage] if acts[stage] == Act.RECOMPUTE else problem.size[stage]
            )
            levels.append((stage, level))
            level -= problem.moved[stage] if acts[stage] == Act.OFFLOAD else 0
        for stage in reversed(stages):
            if acts[stage]:
                is_recomputed = acts[stage] == Act.RECOMPUTE
                level += (
                    problem.size[stage] - problem.boundary[stage]
                    if is_recomputed
                    else problem.moved[stage]
                )
                levels.append(((3 if is_recomputed else 5) * num_stages + stage, level))
            levels.append((2 * num_stages - 1 - stage, level + problem.grows[stage]))
            level -= problem.size[stage]
        most = 0
        for operation, peak_level in reversed(levels):
            table[operation] = most
            most = max(most, peak_level)
        first.append(most)
    return tuple(first), tuple(table)


def least_room(problem: Problem, acts: Sequence[int]) -> int:
    """Return the least cap, in the problem's sizes, under which every micro-batch can pass."""
    return max(
        max(_peaks(problem, acts, direction)[0]) for direction in range(problem.num_directions)
    )

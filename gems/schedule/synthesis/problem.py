"""The integer twin of a request on one placement: what the search reads in its inner loops."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from itertools import accumulate, pairwise
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

    A micro-batch in direction d is a chain of 2 S operations: forward of stages 0 to S - 1, then input gradients of
    stages S - 1 to 0. `rank[d][c]`, `time[d][c]` and `lag[d][c]` are the rank, the ticks and the flight before
    operation c. The other tuples of ticks and sizes are by stage. A `grain` is the coarser tick of
    patterns, in which the fields `*_grains` count.
    """

    name: str
    placement: Placement
    num_micro_batches: int
    cap: int
    ticks_per_unit: int
    grain: int
    rank: tuple[tuple[int, ...], ...]
    time: tuple[tuple[int, ...], ...]
    lag: tuple[tuple[int, ...], ...]
    weight_grad: tuple[int, ...]
    recompute: tuple[int, ...]
    copy: tuple[int, ...]
    size: tuple[int, ...]
    held: tuple[int, ...]
    boundary: tuple[int, ...]
    num_ranks: int = field(init=False)
    num_stages: int = field(init=False)
    num_directions: int = field(init=False)
    time_grains: tuple[tuple[int, ...], ...] = field(init=False)
    lag_grains: tuple[tuple[int, ...], ...] = field(init=False)
    weight_grains: tuple[int, ...] = field(init=False)
    recompute_grains: tuple[int, ...] = field(init=False)
    copy_grains: tuple[int, ...] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "num_ranks", self.placement.num_ranks)
        object.__setattr__(self, "num_stages", self.placement.num_stages)
        object.__setattr__(self, "num_directions", self.placement.num_directions)
        object.__setattr__(self, "time_grains", tuple(map(self._in_grains, self.time)))
        object.__setattr__(self, "lag_grains", tuple(map(self._in_grains, self.lag)))
        object.__setattr__(self, "weight_grains", self._in_grains(self.weight_grad))
        object.__setattr__(self, "recompute_grains", self._in_grains(self.recompute))
        object.__setattr__(self, "copy_grains", self._in_grains(self.copy))

    def _in_grains(self, times: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(max(1, round(time / self.grain)) if time else 0 for time in times)

    @property
    def num_steps(self) -> int:
        """Compute actions of a whole step, without recomputation."""
        return 3 * self.num_stages * self.num_micro_batches

    @property
    def chunks(self) -> int:
        """Stages that a rank holds in one direction, at least."""
        return self.num_stages // self.num_ranks

    def stages_of(self, rank: int, direction: int) -> list[int]:
        """Return the stages that a rank holds in one direction, lowest first."""
        return [stage for way, stage in self.placement.stages_on(rank) if way == direction]

    def num_in(self, direction: int) -> int:
        """Return how many micro-batches run in one direction: they take turns, the first one down."""
        return (self.num_micro_batches - direction + self.num_directions - 1) // self.num_directions

    def work(self) -> int:
        """Return the ticks of one micro-batch over all stages, without recomputation."""
        return sum(self.time[0]) + sum(self.weight_grad)

    def reached(self, direction: int) -> list[int]:
        """Return the least ticks from the start of a micro-batch to the end of each operation of its chain."""
        spans = (time + lag for time, lag in zip(self.time[direction], self.lag[direction], strict=True))
        return list(accumulate(spans))

    def lifetimes(self, direction: int) -> list[int]:
        """Return the least ticks from the start of a stage's forward to the end of its weight gradient."""
        ends, last = self.reached(direction), 2 * self.num_stages - 1
        return [
            ends[last - stage] - ends[stage] + self.time[direction][stage] + self.weight_grad[stage]
            for stage in range(self.num_stages)
        ]


def problem(
    name: str, placement: Placement, num_micro_batches: int, costs: StageCosts, network: Network, cap: float | None
) -> Problem:
    """Build the twin: exact where costs are fractions with small denominators, otherwise to a millionth of a unit.

    Without a cap there is room for all micro-batches.
    """
    flights = [_flights(row, costs, network) for row in placement.ranks]
    values = [*costs.forward, *costs.input_grad, *costs.weight_grad, *(lag for row in flights for lag in row)]
    ticks_per_unit = _ticks_per_unit([*values, *costs.recompute, *costs.copy])

    def ticks(times: Iterable[float]) -> tuple[int, ...]:
        return tuple(round(time * ticks_per_unit) for time in times)

    def sizes(amounts: Iterable[float]) -> tuple[int, ...]:
        return tuple(ceil(amount * SIZES_PER_UNIT - 0.5) for amount in amounts)

    chain = ticks((*costs.forward, *costs.input_grad[::-1]))
    lags = tuple((0, *ticks(row), 0, *ticks(row[::-1])) for row in flights)
    size = sizes(costs.activation)
    return Problem(
        name=name,
        placement=placement,
        num_micro_batches=num_micro_batches,
        cap=sum(size) * num_micro_batches if cap is None else floor((cap + CAP_SLACK) * SIZES_PER_UNIT),
        ticks_per_unit=ticks_per_unit,
        grain=_grain([*chain, *ticks(costs.weight_grad), *(lag for row in lags for lag in row)]),
        rank=tuple((*row, *row[::-1]) for row in placement.ranks),
        time=(chain,) * placement.num_directions,
        lag=lags,
        weight_grad=ticks(costs.weight_grad),
        recompute=ticks(costs.recompute),
        copy=ticks(costs.copy),
        size=size,
        held=sizes(costs.held_for_weights),
        boundary=sizes(costs.boundary),
    )


def _flights(row: tuple[int, ...], costs: StageCosts, network: Network) -> list[float]:
    """Return the time from stage s to stage s + 1, for every s but the last."""
    return [
        0.0 if here == there else network.delay(here, there, costs.boundary_bytes[stage])
        for stage, (here, there) in enumerate(pairwise(row))
    ]


def _ticks_per_unit(values: list[float]) -> int:
    common = 1
    for value in set(values):
        fraction = Fraction(value).limit_denominator(MAX_DENOMINATOR)
        if abs(float(fraction) - value) > 1e-12 * max(1.0, value):
            return MAX_TICKS_PER_UNIT
        common = lcm(common, fraction.denominator)
        if common > MAX_TICKS_PER_UNIT:
            return MAX_TICKS_PER_UNIT
    return common


def _grain(times: list[int]) -> int:
    """Return the tick of patterns: one that measures all times, or a part of the mean where that is too fine."""
    positive = [time for time in times if time]
    if not positive:
        return 1
    exact = gcd(*positive)
    if max(positive) <= MAX_GRAINS * exact:
        return exact
    return max(1, sum(positive) // (len(positive) * COARSE_GRAINS))

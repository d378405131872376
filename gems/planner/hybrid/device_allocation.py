"""How to spend devices: at each number of them the workers x ways, weighed by end-to-end time, with bands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gems.errors import ConfigError
from gems.planner.hybrid.break_even import Crossing, crossing
from gems.planner.hybrid.end_to_end_time import HybridCase
from gems.planner.hybrid.quantity import Quantity, band

NUM_DRAWS = 400
NEARLY = 1.05


@dataclass(frozen=True, slots=True)
class Choice:
    """N workers of M ways: its figures with their bands.

    Attributes:
        step_s: T, a step; None where only ratios are known.
        cost: C in units of T_1 S_1.
        speedup: over the plan's base.
        gain: over data parallelism on the same devices; None for that itself and where it cannot run.
        time_s: end to end.
        gpu_hours: devices times time.
        is_extrapolated: the epochs stand on a law far beyond what was measured.
    """

    workers: int
    ways: int
    global_batch: float
    epochs: float
    step_s: float | None
    cost: float
    speedup: Quantity
    gain: Quantity | None
    time_s: Quantity | None
    gpu_hours: Quantity | None
    is_extrapolated: bool

    @property
    def devices(self) -> int:
        """Worker times ways."""
        return self.workers * self.ways


@dataclass(frozen=True, slots=True)
class Row:
    """One number of devices: the choices, fastest first, and the ways left out with the reason."""

    devices: int
    choices: tuple[Choice, ...]
    left_out: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """The planner's answer.

    `base` is the workers and the ways of the fastest choice on the fewest devices that are known.
    """

    base: tuple[int, int]
    rows: tuple[Row, ...]
    crossings: tuple[Crossing, ...]


@dataclass(frozen=True, slots=True)
class Picks:
    """Three choices over all numbers of devices.

    The fastest, the cheapest in GPU-hours, and the cheapest of the nearly fastest.
    """

    fastest: Choice
    nearly_fastest: Choice
    cheapest: Choice


def picks(plan: HybridPlan) -> Picks | None:
    """Pick among the choices whose epochs do not stand far beyond what was measured, where there are such.

    Times are compared by what they are relative to each other, so that none need be known in seconds. Nearly fastest is
    what takes at most NEARLY times the least.
    """
    known = [choice for row in plan.rows for choice in row.choices if not choice.is_extrapolated]
    known = known or [choice for row in plan.rows for choice in row.choices]
    if not known:
        return None
    fastest = min(known, key=lambda choice: (choice.cost, choice.devices))
    near = [choice for choice in known if choice.cost <= NEARLY * fastest.cost]
    nearly, cheapest = (
        min(some, key=lambda choice: (choice.cost * choice.devices, choice.devices)) for some in (near, known)
    )
    return Picks(fastest, nearly, cheapest)


def device_counts(ways: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the numbers of devices to look at: powers of two times each of the ways, up to `most`."""
    return tuple(sorted({size << k for size in {1, *ways} for k in range(most.bit_length()) if size << k <= most}))


def plan_hybrid(case: HybridCase, devices: Sequence[int], num_draws: int = NUM_DRAWS, seed: int = 0) -> HybridPlan:
    """Weigh all workers x ways at each number of devices, with bands from the intervals of the inputs.

    Raises:
        ConfigError: nothing is known or fits at any of them; the first reason.
    """
    rng = np.random.default_rng(seed)
    draws = [] if case.is_exact else [case.drawn(rng) for _ in range(num_draws)]
    counts = sorted(devices)
    base, reason = _base(case, counts)
    if base is None:
        raise ConfigError("--hybrid", f"{len(counts)} numbers of devices", f"has nothing to weigh: {reason}")
    rows = tuple(_row(case, draws, count, base) for count in counts)
    crossings = tuple(
        crossing(case, ways, devices, draws) for ways in case.ways[1:] if not {1, ways} & set(case.misfits or {})
    )
    return HybridPlan(base, rows, crossings)


def _base(case: HybridCase, counts: Sequence[int]) -> tuple[tuple[int, int] | None, str]:
    """Return the workers and ways of the base, or why there is none.

    The base is the fastest choice on the fewest devices of which anything is known.
    """
    reason = "no number of devices is given"
    for count in counts:
        costs, left_out = _costs(case, count)
        if costs:
            ways = min(costs, key=lambda each: (costs[each], each))
            return (count // ways, ways), reason
        reason = next(iter(left_out.values()), reason)
    return None, reason


def _costs(case: HybridCase, devices: int) -> tuple[dict[int, float], dict[int, str]]:
    """Return the cost of each of the ways that divide a number of devices, and why others are left out."""
    misfits, costs, left_out = case.misfits or {}, {}, {}
    for ways in (ways for ways in case.ways if devices % ways == 0):
        if ways in misfits:
            left_out[ways] = misfits[ways]
            continue
        try:
            costs[ways] = case.cost(devices // ways, ways)
        except ConfigError as error:
            left_out[ways] = str(error)
    return costs, left_out


def _row(case: HybridCase, draws: Sequence[HybridCase], devices: int, base: tuple[int, int]) -> Row:
    costs, left_out = _costs(case, devices)
    order = sorted(costs, key=lambda ways: (costs[ways], ways))
    return Row(devices, tuple(_choice(case, draws, devices // ways, ways, base) for ways in order), left_out)


def _choice(case: HybridCase, draws: Sequence[HybridCase], workers: int, ways: int, base: tuple[int, int]) -> Choice:
    cost, drawn = case.cost(workers, ways), [draw.cost(workers, ways) for draw in draws]
    seconds, batch = case.seconds(cost), workers * case.worker_batch
    time_s = None
    if seconds is not None:
        time_s = band(seconds, [draw.seconds(each) or seconds for draw, each in zip(draws, drawn, strict=True)])
    speedups = [draw.cost(*base) / each for draw, each in zip(draws, drawn, strict=True)]
    return Choice(
        workers, ways, batch, case.epochs.epochs(batch),
        None if case.step_s is None else case.step_s.value * case.step(workers, ways), cost,
        speedup=band(case.cost(*base) / cost, speedups),
        gain=_gain(case, draws, workers, ways),
        time_s=time_s,
        gpu_hours=None if time_s is None else time_s.scaled(workers * ways / 3600.0),
        is_extrapolated=case.epochs.is_extrapolated(batch),
    )  # fmt: skip


def _gain(case: HybridCase, draws: Sequence[HybridCase], workers: int, ways: int) -> Quantity | None:
    """Return the gain over data parallelism, or None for that itself and where that does not fit or is not known."""
    if ways == 1 or 1 in (case.misfits or {}):
        return None
    try:
        return band(case.gain(workers, ways), [draw.gain(workers, ways) for draw in draws])
    except ConfigError:
        return None

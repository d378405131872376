"""The allocation of devices: workers x degree for each device count, by end-to-end time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from gems.errors import ConfigError
from gems.search.hybrid.end_to_end_time import BreakEven, HybridCase, break_even
from gems.search.hybrid.quantity import Quantity, band, drawn, is_exact

NUM_DRAWS = 400
NEARLY = 1.05


@dataclass(frozen=True, slots=True)
class WorkerChoice:
    """The figures of N workers with M devices each, with their bands.

    Attributes:
        step_s: T, the seconds of a step; None if only ratios are known.
        cost: C in units of T_1 S_1.
        speedup: over the plan's base.
        gain: over data parallelism on the same devices; None for data parallelism itself, and if it
            cannot run.
        time_s: end to end.
        gpu_hours: devices times time.
        is_extrapolated: the epochs come from a law far beyond the measurements.
    """

    workers: int
    degree: int
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
        """The number of devices: workers times degree."""
        return self.workers * self.degree


@dataclass(frozen=True, slots=True)
class Allocation:
    """The choices for one number of devices, fastest first, and why other degrees are left out."""

    devices: int
    choices: tuple[WorkerChoice, ...]
    left_out: Mapping[int, str]


@dataclass(frozen=True, slots=True)
class HybridPlan:
    """The planner's answer.

    `base` is (workers, degree) of the fastest choice on the fewest devices that are known.
    """

    base: tuple[int, int]
    allocations: tuple[Allocation, ...]
    break_evens: tuple[BreakEven, ...]


def picks(plan: HybridPlan) -> dict[str, WorkerChoice]:
    """Return the fastest choice, the cheapest of the nearly fastest, and the cheapest of all.

    The cost is in GPU-hours. Choices whose epochs are not extrapolated far beyond the measurements
    come first, if there are any. Times are compared as ratios, so no time in seconds is needed. A
    choice is nearly fastest if it takes at most NEARLY times the least time.
    """
    known = [choice for allocation in plan.allocations for choice in allocation.choices]
    known = [choice for choice in known if not choice.is_extrapolated] or known
    if not known:
        return {}
    fastest = min(known, key=lambda choice: (choice.cost, choice.devices))
    near = [choice for choice in known if choice.cost <= NEARLY * fastest.cost]
    nearly, cheapest = (
        min(choices, key=lambda choice: (choice.cost * choice.devices, choice.devices))
        for choices in (near, known)
    )
    return {"fastest": fastest, "nearly_fastest": nearly, "cheapest": cheapest}


def device_counts(degrees: Sequence[int], most: int) -> tuple[int, ...]:
    """Return the numbers of devices to consider.

    These are the powers of two times each of the degrees, up to `most`.
    """
    return tuple(
        sorted(
            {
                size << k
                for size in {1, *degrees}
                for k in range(most.bit_length())
                if size << k <= most
            }
        )
    )


def plan_hybrid(case: HybridCase, devices: Sequence[int], seed: int = 0) -> HybridPlan:
    """Weigh all workers x degrees at each number of devices, with bands from the input intervals.

    Raises:
        ConfigError: nothing is known or fits at any number of devices; the message gives the reason
            at the last of them.
    """
    rng = np.random.default_rng(seed)
    draws = [] if is_exact(case) else [drawn(case, rng) for _ in range(NUM_DRAWS)]
    weighed = {count: _costs(case, count) for count in sorted(devices)}
    base = next(
        ((count // degree, degree) for count, (costs, _) in weighed.items() for degree in costs),
        None,
    )
    if base is None:
        reason = [why for _, left_out in weighed.values() for why in list(left_out.values())[:1]][
            -1
        ]
        raise ConfigError(
            "--hybrid", f"{len(weighed)} numbers of devices", f"has nothing to weigh: {reason}"
        )
    allocations = tuple(
        Allocation(
            count,
            tuple(_choice(case, draws, count // degree, degree, base) for degree in costs),
            left_out,
        )
        for count, (costs, left_out) in weighed.items()
    )
    hybrids = [degree for degree in case.degrees[1:] if not {1, degree} & set(case.misfits)]
    return HybridPlan(
        base, allocations, tuple(break_even(case, degree, devices, draws) for degree in hybrids)
    )


def _costs(case: HybridCase, devices: int) -> tuple[dict[int, float], dict[int, str]]:
    """Return costs by degree, least first, and the reasons for degrees left out.

    Only degrees that divide the number of devices are considered.
    """
    costs = {}
    left_out = {}
    for degree in (degree for degree in case.degrees if devices % degree == 0):
        if degree in case.misfits:
            left_out[degree] = case.misfits[degree]
            continue
        try:
            costs[degree] = case.cost(devices // degree, degree)
        except ConfigError as error:
            left_out[degree] = str(error)
    return dict(sorted(costs.items(), key=lambda item: item[::-1])), left_out


def _choice(
    case: HybridCase, draws: Sequence[HybridCase], workers: int, degree: int, base: tuple[int, int]
) -> WorkerChoice:
    cost = case.cost(workers, degree)
    costs = [draw.cost(workers, degree) for draw in draws]
    seconds = case.seconds(cost)
    batch = workers * case.worker_batch
    time_s = None
    if seconds is not None:
        time_s = band(
            seconds,
            [
                draw.seconds(draw_cost) or seconds
                for draw, draw_cost in zip(draws, costs, strict=True)
            ],
        )
    speedups = [draw.cost(*base) / draw_cost for draw, draw_cost in zip(draws, costs, strict=True)]
    return WorkerChoice(
        workers,
        degree,
        batch,
        case.epochs.epochs(batch),
        None if case.step_s is None else case.step_s.value * case.step(workers, degree),
        cost,
        speedup=band(case.cost(*base) / cost, speedups),
        gain=_gain(case, draws, workers, degree),
        time_s=time_s,
        gpu_hours=None if time_s is None else time_s.scaled(workers * degree / 3600.0),
        is_extrapolated=case.epochs.is_extrapolated(batch),
    )


def _gain(
    case: HybridCase, draws: Sequence[HybridCase], workers: int, degree: int
) -> Quantity | None:
    """Return the gain over data parallelism.

    Return None for data parallelism itself, and if it does not fit or is not known.
    """
    if degree == 1 or 1 in case.misfits:
        return None
    try:
        return band(case.gain(workers, degree), [draw.gain(workers, degree) for draw in draws])
    except ConfigError:
        return None

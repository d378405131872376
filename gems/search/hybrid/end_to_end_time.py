"""Data parallelism against workers of several devices, by end-to-end time C = T x S x E.

Source: Pal et al., IEEE Micro 39(5), 2019. T is the time of a step, S the number of steps of an
epoch, and E the number of epochs to the target. N workers of M devices each (M is their
model-parallel degree) are compared with one worker on one device: C_1 / C = SU^M SE_N N E_1 / E_N.
SU^M is the speed-up of a worker's step by M-way model parallelism. SE_N is the scaling efficiency
of N workers. Workers of M devices beat M N workers of one device exactly if SU^M > M (SE_MN / SE_N)
(E_N / E_MN).
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile

import numpy as np

from gems.errors import ConfigError
from gems.search.hybrid.epochs import Epochs
from gems.search.hybrid.quantity import SHARES, Quantity

# SE_N = T_1 / T_N by N and M: the step time of one worker over the step time of N workers. The
# batch of a worker is the same in both.
Efficiency = Callable[[int, int], float]


def ideal_efficiency(workers: int, degree: int) -> float:
    """Return 1: workers do not slow each other down.

    This favours data parallelism most (Pal et al., projections).
    """
    return 1.0


@dataclass(frozen=True, slots=True)
class EfficiencyTable:
    """SE_N by the devices of a worker and the number of workers.

    Between two numbers of workers it is linear in the logarithm of N. For workers with more devices
    than in the table, the values of the nearest smaller size are used. Pal et al. use one SE_N for
    both in the same way.
    """

    by_degree: Mapping[int, Mapping[int, Quantity]]

    def __call__(self, workers: int, degree: int) -> float:
        """Return SE_N; one worker alone has 1 if the table begins with more.

        Raises:
            ConfigError: there are fewer or more workers than in the table.
        """
        sizes = sorted(self.by_degree)
        table = self.by_degree[sizes[max(0, bisect_right(sizes, degree) - 1)]]
        known = sorted(table)
        if workers == 1 and known[0] > 1:
            return 1.0
        if not known[0] <= workers <= known[-1]:
            raise ConfigError(
                "workers",
                workers,
                f"the scaling efficiency is known from {known[0]} to {known[-1]} workers",
                "measure more of them, or leave --efficiency out to model it",
            )
        return float(
            np.interp(math.log(workers), np.log(known), [table[number].value for number in known])
        )


@dataclass(frozen=True, slots=True)
class HybridCase:
    """The inputs of the planner for hybrid parallelism.

    Its methods raise ConfigError if epochs or efficiency are not known.

    Attributes:
        worker_batch: samples of one step of one worker, for any number of devices.
        epochs: epochs by samples of a global batch.
        speedups: SU^M by M; the speed-up of 1 is 1 and may be missing.
        efficiency: SE_N by workers and degree; raises ConfigError if it is not known.
        step_s: T_1, the seconds of a step of one worker on one device; None if only ratios are
            known.
        num_samples: samples of an epoch; None if only ratios are known.
        misfits: degrees that do not fit the devices, each with the reason.
    """

    worker_batch: float
    epochs: Epochs
    speedups: Mapping[int, Quantity]
    efficiency: Efficiency = ideal_efficiency
    step_s: Quantity | None = None
    num_samples: int | None = None
    misfits: Mapping[int, str] = field(default_factory=dict)

    @property
    def degrees(self) -> tuple[int, ...]:
        """The degrees to weigh: 1 (data parallelism), and all degrees with a speed-up."""
        return tuple(sorted({1, *self.speedups}))

    def speedup(self, degree: int) -> float:
        """Return SU^M."""
        return 1.0 if degree == 1 else self.speedups[degree].value

    def step(self, workers: int, degree: int) -> float:
        """Return T in units of T_1."""
        return 1.0 / (self.speedup(degree) * self.efficiency(workers, degree))

    def cost(self, workers: int, degree: int) -> float:
        """Return C in units of T_1 S_1.

        This is the number of epochs that one worker on one device would complete in the same time.
        """
        return (
            self.step(workers, degree) * self.epochs.epochs(workers * self.worker_batch) / workers
        )

    def gain(self, workers: int, degree: int) -> float:
        """Return the time of data parallelism over the time of N workers of M, on the same devices.

        Hybrid parallelism wins above 1.
        """
        return self.cost(workers * degree, 1) / self.cost(workers, degree)

    def seconds(self, cost: float) -> float | None:
        """Return a cost in seconds.

        Return None if the time of a step or the samples of an epoch are not known.
        """
        if self.step_s is None or self.num_samples is None:
            return None
        return cost * self.step_s.value * self.num_samples / self.worker_batch


@dataclass(frozen=True, slots=True)
class BreakEven:
    """The point from which workers of M devices stay faster than data parallelism.

    They stay faster up to the largest number of devices considered.

    Attributes:
        devices: the fewest devices from which they are faster, a multiple of M; None if they are
            not faster at the most devices.
        below: the most devices listed at which data parallelism is still at least as fast; None if
            it never is.
        listed: the fewest devices listed from which they are faster.
        low, high: the interval of 95 % of the draws; None if these have no break-even point.
    """

    degree: int
    devices: int | None
    below: int | None = None
    listed: int | None = None
    low: float | None = None
    high: float | None = None


def break_even(
    case: HybridCase, degree: int, devices: Sequence[int], draws: Sequence[HybridCase] = ()
) -> BreakEven:
    """Find the number of devices from which workers of `degree` devices are faster.

    The search bisects between the listed numbers of devices. It assumes that the gain passes 1 once
    between two of them. The points of the draws are interpolated linearly on logarithmic axes.
    """
    known = _gains(case, degree, devices)
    if not known:
        return BreakEven(degree, None)
    low = high = None
    if draws:
        points = sorted(_interpolated(_gains(draw, degree, devices)) for draw in draws)
        last = len(points) - 1
        ends = (points[math.floor(SHARES[0] * last)], points[math.ceil(SHARES[1] * last)])
        low, high = (end if math.isfinite(end) else None for end in ends)
    wins = list(takewhile(lambda point: point[1] > 1.0, reversed(known)))
    below = known[-len(wins) - 1][0] if len(wins) < len(known) else None
    if not wins:
        return BreakEven(degree, None, below, None, low, high)
    listed = wins[-1][0]
    if below is None:
        return BreakEven(degree, listed, None, listed, low, high)
    between = range(below // degree + 1, listed // degree)
    more = bisect_left(between, True, key=lambda workers: case.gain(workers, degree) > 1.0)
    return BreakEven(degree, (between.start + more) * degree, below, listed, low, high)


def _gains(case: HybridCase, degree: int, devices: Sequence[int]) -> list[tuple[int, float]]:
    """Return the gain, if known, at each number of devices that the degree divides."""
    gains = []
    for count in sorted(devices):
        try:
            gains += [] if count % degree else [(count, case.gain(count // degree, degree))]
        except ConfigError:
            continue
    return gains


def _interpolated(known: Sequence[tuple[int, float]]) -> float:
    """Return the number of devices at which gains pass 1 for the last time, on logarithmic axes.

    Return infinity if the last gain is not above 1.
    """
    point: float = math.inf
    above: tuple[int, float] | None = None
    for count, gain in reversed(known):
        if gain <= 1.0:
            if above is None:
                return math.inf
            share = -math.log(gain) / (math.log(above[1]) - math.log(gain))
            return math.exp(math.log(count) + share * (math.log(above[0]) - math.log(count)))
        point = float(count)
        above = (count, gain)
    return point

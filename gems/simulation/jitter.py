"""Noise: compute times vary between ranks, and every replica waits for the slowest one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gems.memory.case import PlanOutcome
from gems.schedule.action import Action, Kind
from gems.schedule.simulate import Pace, Simulation, simulate

NUM_SAMPLES = 64
NUM_DRAWS = 100
MIN_FACTOR = 0.1  # of a compute time, where a draw of strong noise would make it negative
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Arrivals:
    """The times at which one replica's ranks are ready for each of their reductions, over steps.

    The distribution is normal, in the unit of the costs.

    Attributes:
        reductions: the reductions that replicas join; the two ranks of a pair share one.
        mean: the mean of each reduction.
        root: a matrix whose product with its transpose is their covariance.
    """

    reductions: tuple[Action, ...]
    mean: np.ndarray
    root: np.ndarray

    def last(self, num_replicas: int, rng: np.random.Generator) -> Mapping[Action, float]:
        """Draw one step of `num_replicas` replicas.

        Return the time at which the last of them is ready, by reduction.
        """
        if num_replicas < 1 or not self.reductions:
            return {}
        normal = rng.standard_normal((num_replicas, len(self.reductions)))
        latest = (self.mean + normal @ self.root.T).max(axis=0)
        return dict(zip(self.reductions, latest.tolist(), strict=True))


def slowdowns(num_ranks: int, noise: float, num: int, rng: np.random.Generator) -> np.ndarray:
    """Draw the factors by which compute takes longer.

    Return an array of draws x ranks, with mean 1 and standard deviation `noise`. More than a few
    draws have these moments exactly, without correlation between ranks; quantities that are
    proportional to the factors then have no sampling error.
    """
    normal = rng.standard_normal((num, num_ranks))
    if num > 2 * num_ranks:
        normal -= normal.mean(axis=0)
        covariance = normal.T @ normal / num
        normal = np.linalg.solve(np.linalg.cholesky(covariance), normal.T).T
    factors: np.ndarray = np.maximum(MIN_FACTOR, 1.0 + noise * normal)
    return factors


def simulate_arrivals(outcome: PlanOutcome, noise: float, rng: np.random.Generator) -> Arrivals:
    """Simulate one replica under noise, often enough to know when its reductions can begin.

    Reductions take no time here, so the result is the same for any number of replicas.

    Raises:
        ScheduleError: the schedule would not run.
    """
    schedule = outcome.schedule
    places = [
        (rank, index, action)
        for rank, row in enumerate(schedule.rank_schedules)
        for index, action in enumerate(row)
        if action.kind in (Kind.START_REDUCE, Kind.REDUCE_GRAD)
    ]
    reductions = tuple(sorted({action for _, _, action in places}))
    if not reductions:
        return Arrivals((), np.zeros(0), np.zeros((0, 0)))
    num = max(NUM_SAMPLES, 3 * schedule.num_ranks)
    none = (0.0,) * schedule.num_stages
    costs = replace(outcome.costs, reduce=none, reduce_link=none)
    ready = np.zeros((num, len(reductions)))
    for sample, factors in enumerate(slowdowns(schedule.num_ranks, noise, num, rng)):
        pace = Pace(slowdowns=tuple(factors.tolist()))
        step = simulate(schedule, costs, outcome.network, outcome.cap, pace)
        for rank, index, action in places:
            column = reductions.index(action)
            ready[sample, column] = max(ready[sample, column], step.start[rank][index])
    mean = ready.mean(axis=0)
    covariance = (ready - mean).T @ (ready - mean) / num
    values, vectors = np.linalg.eigh(covariance)
    return Arrivals(reductions, mean, vectors * np.sqrt(np.maximum(values, 0.0)))


def noisy_steps(
    outcome: PlanOutcome, noise: float, seed: int, num_steps: int = NUM_DRAWS
) -> list[Simulation]:
    """Draw steps of all replicas of an outcome that differ only in their noise.

    Each step is given as replica 0 sees it. Each rank of each replica computes a step faster or
    slower by its own draw. One replica is simulated several times, which gives the distribution of
    the times at which it is ready for its reductions. A step is then a simulation of replica 0 in
    which each reduction begins when the last of all replicas is ready. That time is drawn from the
    distribution: for R replicas it is the largest of R draws. Therefore only one replica is
    simulated, whatever their number. Replica 0 also has its pace; the others have none.

    Raises:
        ScheduleError: the schedule would not run.
    """
    schedule = outcome.schedule
    num_others = len(outcome.paces) - 1
    rng = np.random.default_rng(seed)
    arrivals = simulate_arrivals(outcome, noise, rng) if num_others else None
    steps = []
    for factors in slowdowns(schedule.num_ranks, noise, num_steps, rng):
        late = {} if arrivals is None else arrivals.last(num_others, rng)
        pace = replace(outcome.paces[0], slowdowns=tuple(factors.tolist()), late=late)
        steps.append(simulate(schedule, outcome.costs, outcome.network, outcome.cap, pace))
    return steps


def median_step(steps: list[Simulation]) -> Simulation:
    """Return the drawn step of median time."""
    return sorted(steps, key=lambda step: step.span)[len(steps) // 2]


def span_interval(steps: list[Simulation]) -> tuple[float, float]:
    """Return the central interval of time that contains 95 % of the drawn steps."""
    low, high = np.quantile([step.span for step in steps], [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)

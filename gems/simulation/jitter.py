"""Noise: compute that takes longer on one rank than on another, and the slowest of the replicas, for which all wait."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from gems.schedule.action import Action, Kind
from gems.schedule.costs import Network, StageCosts
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import EVEN, Pace, Simulation, simulate

NUM_SAMPLES = 64
NUM_DRAWS = 100
MIN_FACTOR = 0.1  # of a compute time, where a draw of strong noise would make it negative
LEVEL = 0.95


@dataclass(frozen=True, slots=True)
class Arrivals:
    """When one replica's ranks are ready for each of their reductions, over steps.

    Normal, in the unit of the costs.

    Attributes:
        reductions: those that replicas join, of which two ranks of a pair have one.
        mean: of each reduction.
        root: a matrix whose product with its transpose is their covariance.
    """

    reductions: tuple[Action, ...]
    mean: np.ndarray
    root: np.ndarray

    def last(self, num_replicas: int, rng: np.random.Generator) -> Mapping[Action, float]:
        """Draw one step of `num_replicas` replicas.

        Return when the last of them is ready, by reduction.
        """
        if num_replicas < 1 or not self.reductions:
            return {}
        normal = rng.standard_normal((num_replicas, len(self.reductions)))
        latest = (self.mean + normal @ self.root.T).max(axis=0)
        return dict(zip(self.reductions, latest.tolist(), strict=True))


def slowdowns(num_ranks: int, noise: float, num: int, rng: np.random.Generator) -> np.ndarray:
    """Draw how many times as long compute takes.

    An array of draws x ranks, of mean 1 and standard deviation `noise`.
    More than a few draws have these moments exactly, and no correlation between ranks: what depends
    on them in proportion is then without sampling error.
    """
    normal = rng.standard_normal((num, num_ranks))
    if num > 2 * num_ranks:
        normal -= normal.mean(axis=0)
        covariance = normal.T @ normal / num
        normal = np.linalg.solve(np.linalg.cholesky(covariance), normal.T).T
    factors: np.ndarray = np.maximum(MIN_FACTOR, 1.0 + noise * normal)
    return factors


def arrivals_of(
    schedule: Schedule,
    costs: StageCosts,
    network: Network,
    cap: float | None,
    noise: float,
    rng: np.random.Generator,
    pace: Pace = EVEN,
) -> Arrivals:
    """Simulate one replica under noise, often enough to know when its reductions could begin.

    Reductions take no time in this, so that the answer is the same for any number of replicas.

    Raises:
        ScheduleError: the schedule would not run.
    """
    places = [
        (rank, index, action)
        for rank, row in enumerate(schedule.rows)
        for index, action in enumerate(row)
        if action.kind in (Kind.START_REDUCE, Kind.REDUCE_GRAD)
    ]
    reductions = tuple(sorted({action for _, _, action in places}))
    if not reductions:
        return Arrivals((), np.zeros(0), np.zeros((0, 0)))
    num = max(NUM_SAMPLES, 3 * schedule.num_ranks)
    none = (0.0,) * costs.num_stages
    costs = replace(costs, reduce=none, reduce_link=none)
    ready = np.zeros((num, len(reductions)))
    for sample, factors in enumerate(slowdowns(schedule.num_ranks, noise, num, rng)):
        step = simulate(
            schedule, costs, network, cap, replace(pace, slowdowns=tuple(factors.tolist()))
        )
        for rank, index, action in places:
            column = reductions.index(action)
            ready[sample, column] = max(ready[sample, column], step.start[rank][index])
    mean = ready.mean(axis=0)
    covariance = (ready - mean).T @ (ready - mean) / num
    values, vectors = np.linalg.eigh(covariance)
    return Arrivals(reductions, mean, vectors * np.sqrt(np.maximum(values, 0.0)))


def noisy_steps(
    schedule: Schedule,
    costs: StageCosts,
    network: Network,
    cap: float | None,
    noise: float,
    num_replicas: int,
    seed: int,
    num_steps: int = NUM_DRAWS,
    arrivals: Arrivals | None = None,
    pace: Pace = EVEN,
) -> list[Simulation]:
    """Draw steps of `num_replicas` replicas that differ in their noise alone.

    Each is given as replica 0 sees it.
    Each rank of each replica computes a step faster or slower by its own draw. One replica is
    simulated some times, which gives the distribution of when it is ready for its reductions. A
    step then is a simulation of replica 0 in which each reduction begins when the last of all
    replicas is ready, drawn from that distribution: of R replicas the largest of R draws, so that
    no replica but one is simulated however many there are. `arrivals` is that distribution where it
    is known (`arrivals_of`), for it does not depend on the number of replicas. `pace` is what
    disturbs replica 0 besides; the others have none of it.

    Raises:
        ScheduleError: the schedule would not run.
    """
    rng = np.random.default_rng(seed)
    if arrivals is None and num_replicas > 1:
        arrivals = arrivals_of(schedule, costs, network, cap, noise, rng)
    factors = slowdowns(schedule.num_ranks, noise, num_steps, rng)
    return [
        simulate(
            schedule,
            costs,
            network,
            cap,
            replace(
                pace,
                slowdowns=tuple(mine.tolist()),
                late={} if arrivals is None else arrivals.last(num_replicas - 1, rng),
            ),
        )
        for mine in factors
    ]


def median_of(steps: list[Simulation]) -> Simulation:
    """Return the step of median time among drawn ones."""
    return sorted(steps, key=lambda step: step.span)[len(steps) // 2]


def interval_of(steps: list[Simulation], level: float = LEVEL) -> tuple[float, float]:
    """Return the times between which a share `level` of drawn steps lies, as much above as below."""
    low, high = np.quantile([step.span for step in steps], [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)

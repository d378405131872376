"""A worker of several devices.

Its step, what it loses among others, and whether it fits, by simulation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from gems.config.schema import CostConfig, RunSpec, ScheduleConfig
from gems.errors import ConfigError, DoesNotFitError
from gems.plan.draft import PROFILE, Draft
from gems.simulation.prediction import Prediction

# On one device every schedule is the same work; this one holds least.
ALONE = "1f1b"
Predict = Callable[[RunSpec], Prediction]


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """A simulated step: its seconds, the bytes of the fullest rank (None if not known), and why it does not fit."""

    step_s: float
    peak_bytes: int | None
    misfit: str | None


@dataclass(frozen=True)
class Worker:
    """One pipeline of a resolved run, on any number of devices."""

    spec: RunSpec

    def with_degree(self, degree: int) -> RunSpec:
        """Return the run with `degree` partitions and the same mini-batch of a worker.

        On one device the layers run one after another. A real machine has the costs of its profile
        unless others are given. Those of cost=uniform are of equal parts, so that more parts are
        smaller ones.
        """
        spec = self.spec
        cost = spec.cost
        before = spec.parallel.partitions
        if spec.machine.is_real and cost == CostConfig():
            cost = CostConfig(name=PROFILE)
        if not cost.from_layers and degree != before:
            share = before / degree
            names = ("forward", "input_grad", "weight_grad", "recompute", "offload")
            times = {
                name: getattr(cost, name) * share
                for name in names
                if getattr(cost, name) is not None
            }
            sizes = {
                name: round(getattr(cost, name) * share)
                for name in ("activation_bytes", "param_bytes")
            }
            cost = replace(cost, **times, **sizes)
        boundaries = spec.parallel.boundaries if degree == before else None
        parallel = replace(spec.parallel, partitions=degree, replicas=1, boundaries=boundaries)
        schedule = spec.schedule if degree > 1 else ScheduleConfig(name=ALONE)
        return replace(spec, parallel=parallel, cost=cost, schedule=schedule)

    def _unlimited(self, degree: int) -> RunSpec:
        changed = self.with_degree(degree)
        machine = replace(changed.machine, device_bytes=None)
        return replace(changed, machine=machine, memory=replace(changed.memory, name="keep"))

    def step(self, degree: int, predict: Predict) -> WorkerStep:
        """Simulate one step on `degree` devices.

        What does not fit machine.device_bytes, without that limit.

        Raises:
            ConfigError: counts that the schedule cannot serve, or more stages than layers.
        """
        limit = self.spec.machine.device_bytes
        misfit: str | None = None
        try:
            found = predict(self.with_degree(degree))
        except DoesNotFitError as error:
            misfit = str(error)
            found = predict(self._unlimited(degree))
        peak = None if found.peak_bytes is None else round(max(found.peak_bytes))
        if misfit is None and limit is not None and peak is not None and peak > limit:
            where = f"a rank of {degree} partitions" if degree > 1 else "a worker of one device"
            advice = "use a higher degree, or a smaller image or micro-batch"
            misfit = str(DoesNotFitError(where, peak, limit, advice))
        return WorkerStep(found.step_s, peak, misfit)

    def steps(
        self, degrees: Iterable[int], predict: Predict
    ) -> tuple[dict[int, WorkerStep], dict[int, str]]:
        """Simulate each degree.

        Return the steps, and why other degrees are refused: stages, odd counts.

        Raises:
            ConfigError: one device alone cannot be simulated.
        """
        steps = {}
        refused = {}
        for degree in degrees:
            try:
                steps[degree] = self.step(degree, predict)
            except ConfigError as error:
                if degree == 1:
                    raise
                refused[degree] = str(error)
        return steps, refused

    def efficiency(self) -> Callable[[int, int], float]:
        """Return SE_N by simulation, a function of the workers and the partitions of each.

        It is the step of one worker over that of N, whose gradients are summed over the run's
        links. Activations are kept, whatever the run's policy, and devices have no limit: the sum
        is of gradients alone. It raises ConfigError for counts that the schedule cannot serve, or
        more stages than layers.
        """

        @cache
        def one_worker(degree: int) -> Draft:
            return Draft(self._unlimited(degree))

        @cache
        def span(workers: int, degree: int) -> float:
            one = one_worker(degree)
            parallel = replace(one.costs.parallel, replicas=workers)
            return replace(one.costs, parallel=parallel).kept(one.lowered).step_s

        return lambda workers, degree: span(1, degree) / span(workers, degree)

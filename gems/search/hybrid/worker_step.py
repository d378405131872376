"""A worker of several devices, by simulation: its step, scaling efficiency and memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cache

from gems.config.schema import CostConfig, RunSpec, ScheduleConfig
from gems.errors import ConfigError, DoesNotFitError
from gems.plan.draft import PROFILE, Draft
from gems.simulation.prediction import Prediction

# on one device all schedules take equally long; this one needs the least memory
ALONE = "1f1b"
Predict = Callable[[RunSpec], Prediction]


@dataclass(frozen=True, slots=True)
class WorkerStep:
    """A simulated step: seconds, bytes of the fullest rank if known, and why it does not fit."""

    step_s: float
    peak_bytes: int | None
    misfit: str | None


@dataclass(frozen=True)
class Worker:
    """One pipeline of a resolved run, on any number of devices."""

    spec: RunSpec

    def with_degree(self, degree: int) -> RunSpec:
        """Return the run with `degree` partitions and the same mini-batch per worker.

        A real machine uses the costs of its profile unless others are configured. Costs of
        cost=uniform are scaled to the size of the parts.
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
        """Simulate one step on `degree` devices, without a limit if it does not fit.

        Raises:
            ConfigError: the schedule cannot serve the counts, or there are more stages than layers.
        """
        limit = self.spec.machine.device_bytes
        misfit: str | None = None
        try:
            prediction = predict(self.with_degree(degree))
        except DoesNotFitError as error:
            misfit = str(error)
            prediction = predict(self._unlimited(degree))
        peak = None if prediction.peak_bytes is None else round(max(prediction.peak_bytes))
        if misfit is None and limit is not None and peak is not None and peak > limit:
            where = f"a rank of {degree} partitions" if degree > 1 else "a worker of one device"
            advice = "use a higher degree, or a smaller image or micro-batch"
            misfit = str(DoesNotFitError(where, peak, limit, advice))
        return WorkerStep(prediction.step_s, peak, misfit)

    def steps(
        self, degrees: Iterable[int], predict: Predict
    ) -> tuple[dict[int, WorkerStep], dict[int, str]]:
        """Simulate each degree; return the steps, and the reasons for degrees that are refused.

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
        """Return SE_N by simulation, as a function of the workers and the partitions of each.

        SE_N is the step of one worker over that of N, whose gradients are summed over the run's
        links. Memory policy and device limit are ignored. The function raises ConfigError if the
        schedule cannot serve the counts, or if there are more stages than layers.
        """

        @cache
        def one_worker(degree: int) -> Draft:
            return Draft(self._unlimited(degree))

        @cache
        def span(workers: int, degree: int) -> float:
            draft = one_worker(degree)
            parallel = replace(draft.costs.parallel, replicas=workers)
            return replace(draft.costs, parallel=parallel).kept(draft.lowered).step_s

        return lambda workers, degree: span(1, degree) / span(workers, degree)

"""A worker of several devices: its step, what it loses among others, and whether it fits, by simulation of a run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

import numpy as np

from gems.cli.simulate import in_seconds_and_bytes, predict
from gems.config.schema import CostConfig, RunSpec, ScheduleConfig
from gems.errors import ConfigError, DoesNotFitError
from gems.schedule.schedule import Schedule
from gems.simulation.build import play, schedule_of
from gems.simulation.profiled_costs import PROFILE, costed

# On one device every schedule is the same work; this one holds least.
ALONE = "1f1b"


@dataclass(frozen=True, slots=True)
class Step:
    """A simulated step: its seconds, the bytes of the fullest rank (None where they are not known), why it does not fit."""

    step_s: float
    peak_bytes: int | None
    misfit: str | None


def with_ways(spec: RunSpec, ways: int) -> RunSpec:
    """Return a resolved run with one pipeline of `ways` partitions and the same mini-batch of a worker.

    On one device the layers run one after another. A real machine has the costs of its profile where none are given. Those
    of cost=uniform are of equal parts, so that more parts are smaller ones.
    """
    cost, before = spec.cost, spec.parallel.partitions
    if spec.machine.kind == "real" and cost == CostConfig():
        cost = CostConfig(name=PROFILE)
    if cost.name != PROFILE and ways != before:
        share = before / ways
        cost = replace(
            cost,
            forward=cost.forward * share,
            input_grad=cost.input_grad * share,
            weight_grad=cost.weight_grad * share,
            recompute=None if cost.recompute is None else cost.recompute * share,
            offload=cost.offload * share,
            activation_bytes=round(cost.activation_bytes * share),
            param_bytes=round(cost.param_bytes * share),
        )
    boundaries = spec.parallel.boundaries if ways == before else None
    return replace(
        spec,
        parallel=replace(spec.parallel, partitions=ways, replicas=1, boundaries=boundaries),
        cost=cost,
        schedule=spec.schedule if ways > 1 else ScheduleConfig(name=ALONE),
    )


def step_of(spec: RunSpec, ways: int) -> Step:
    """Simulate one step of a worker of `ways` devices; what does not fit machine.device_bytes, without that limit.

    Raises:
        ConfigError: counts that the schedule cannot serve, or more stages than layers.
    """
    changed, limit = with_ways(spec, ways), spec.machine.device_bytes
    misfit: str | None = None
    try:
        step_s, peak = _simulated(changed)
    except DoesNotFitError as error:
        misfit = str(error)
        step_s, peak = _simulated(_unlimited(changed))
    if misfit is None and limit is not None and peak is not None and peak > limit:
        where = f"a rank of {ways} partitions" if ways > 1 else "a worker of one device"
        misfit = str(DoesNotFitError(where, peak, limit, "use more ways, or a smaller image or micro-batch"))
    return Step(step_s, peak, misfit)


def _simulated(spec: RunSpec) -> tuple[float, int | None]:
    """Return the seconds of a step, and the bytes of the fullest rank: of its cut, or under a policy of its plan.

    Raises:
        DoesNotFitError: a rank would hold more than machine.device_bytes.
    """
    ready = in_seconds_and_bytes(costed(spec))
    found = predict(ready)
    step_s = found.played.span * ready.cost.unit_s
    has_bytes = ready.cost.activation_bytes > 0
    return step_s, round(max(rank.peak for rank in found.memory)) if has_bytes else None


def steps_of(spec: RunSpec, wanted: Iterable[int]) -> tuple[dict[int, Step], dict[int, str]]:
    """Simulate a worker for each of the ways; gives the steps, and why others cannot be: too many stages, odd counts.

    Raises:
        ConfigError: one device alone cannot be simulated.
    """
    steps, refused = {}, {}
    for ways in wanted:
        try:
            steps[ways] = step_of(spec, ways)
        except ConfigError as error:
            if ways == 1:
                raise
            refused[ways] = str(error)
    return steps, refused


@dataclass(frozen=True, slots=True)
class ModelledEfficiency:
    """SE_N by simulation: the step of one worker over that of N, whose gradients are summed over the run's links.

    Activations are kept, whatever the run's policy, and devices have no limit: the sum is of gradients alone.
    """

    spec: RunSpec
    ready: dict[int, tuple[RunSpec, Schedule]] = field(default_factory=dict)
    known: dict[tuple[int, int], float] = field(default_factory=dict)

    def of(self, workers: int, ways: int) -> float:
        """Return SE_N of workers of `ways` partitions.

        Raises:
            ConfigError: counts that the schedule cannot serve, or more stages than layers.
        """
        return self._span(1, ways) / self._span(workers, ways)

    def _span(self, workers: int, ways: int) -> float:
        if ways not in self.ready:
            one = costed(_unlimited(with_ways(self.spec, ways)))
            self.ready[ways] = one, schedule_of(one)
        if (workers, ways) not in self.known:
            one, made = self.ready[ways]
            many = replace(one, parallel=replace(one.parallel, replicas=workers))
            self.known[workers, ways] = play(many, made)[1].span
        return self.known[workers, ways]

    @property
    def is_exact(self) -> bool:
        """Whether nothing is uncertain: a model gives no interval."""
        return True

    def drawn(self, rng: np.random.Generator) -> ModelledEfficiency:
        """Return itself."""
        return self


def _unlimited(spec: RunSpec) -> RunSpec:
    return replace(spec, machine=replace(spec.machine, device_bytes=None), memory=replace(spec.memory, name="keep"))

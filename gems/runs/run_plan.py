"""The plan of a run: the one list that its ranks run, where its model is cut, and what becomes of its activations."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gems.config.resolve import check_batch, check_gpus
from gems.config.schema import RunSpec
from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.plan import MemoryPlan
from gems.memory.registry import plan_of
from gems.models import layers_of
from gems.partition.methods import cut, optimizer_of, profile_used
from gems.profile import ModelProfile
from gems.profile.store import profile_of
from gems.schedule import CAPPED
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from gems.simulation.build import cap_of, compute_schedule_of, costs_of, network_in_seconds
from gems.simulation.step_time import in_run
from gems.utils.cache import cached

SMALLER = "use another policy (memory=plan), more partitions, or a smaller image or micro-batch"


@dataclass(frozen=True, slots=True)
class RunPlan:
    """What ranks are given: the lowered, validated list and its cut (none on paper).

    `profile` is what the cut stands on, None where it needs none; `memory` the outcome of the run's memory policy,
    None where activations are kept.
    """

    schedule: Schedule
    boundaries: tuple[int, ...]
    profile: ModelProfile | None
    memory: PlanOutcome | None

    @property
    def memory_plan(self) -> MemoryPlan | None:
        """The segments of each stage, None where stages run whole."""
        return None if self.memory is None else self.memory.plan


def planned(spec: RunSpec) -> RunPlan:
    """Return the plan of a resolved run that is about to start.

    A search of the schedule is kept to as many stages as the model has layers. Cut and memory plan are kept in the
    cache, so that all who ask get the same ones.

    Raises:
        ConfigError: counts or a cap that the schedule cannot serve, more stages than layers, a profile that cannot be
            had, other ranks than parallel.gpus, or less data than one step takes.
        DoesNotFitError: a rank would hold more than its device, or a node's ranks more than its host memory.
        ScheduleError: a schedule that would not run.
    """
    check_gpus(spec)
    spec = _within_layers(spec)
    compute = compute_schedule_of(spec)
    whole = validate(lower(compute), costs_of(spec, compute.placement), cap_of(spec))
    check_batch(spec)
    if spec.machine.kind != "real":
        return RunPlan(whole, (), None, None)
    if whole.placement.feeders is not None:
        return RunPlan(whole, (), None, None)
    boundaries = cut(spec, whole).boundaries
    if spec.memory.name == "keep":
        return RunPlan(whole, boundaries, profile_used(spec, whole), None)
    case = memory_case(spec, compute, boundaries)
    outcome = in_run(spec, case, case.outcome(_kept_plan(spec, case)))
    check_fits(spec, outcome)
    return RunPlan(validate(outcome.schedule, outcome.costs), boundaries, case.profile, outcome)


def case_of_run(spec: RunSpec) -> MemoryCase:
    """Return the case that any memory policy of a resolved run would plan for: the device does not bound its cut.

    Raises:
        ConfigError: counts that the schedule cannot serve, more stages than layers, or a profile that cannot be had.
    """
    spec = _within_layers(spec)
    compute = compute_schedule_of(spec)
    unlimited = replace(spec, machine=replace(spec.machine, device_bytes=None))
    return memory_case(spec, compute, cut(unlimited, lower(compute)).boundaries)


def memory_case(
    spec: RunSpec, schedule: Schedule, boundaries: tuple[int, ...], profile: ModelProfile | None = None
) -> MemoryCase:
    """Return what the memory policies of a resolved run plan for; `schedule` is the compute-only one.

    The profile comes from where the run says, unless it is given.

    Raises:
        ConfigError: a profile that cannot be had.
    """
    machine = spec.machine
    return MemoryCase(
        profile or profile_of(spec), schedule, boundaries, optimizer_of(spec), spec.memory.limit_bytes or machine.device_bytes,
        machine.d2h_bytes_per_s, machine.h2d_bytes_per_s, network_in_seconds(spec), spec.memory.min_offload_bytes,
        spec.parallel.replicas,
    )  # fmt: skip


def check_fits(spec: RunSpec, outcome: PlanOutcome) -> None:
    """Check what a memory plan leaves on the devices and takes of host memory.

    Raises:
        DoesNotFitError: a rank would hold more than its device, or the ranks of a node more than machine.host_bytes.
    """
    policy, peaks, worst = outcome.plan.policy, outcome.peak_bytes, outcome.fullest_rank
    limit = spec.machine.device_bytes
    if limit is not None and peaks[worst] > limit:
        raise DoesNotFitError(f"rank {worst} of {len(peaks)} under memory={policy}", peaks[worst], limit, SMALLER)
    limit, on_host = spec.machine.host_bytes, outcome.host_bytes
    if limit is not None and not has_room(spec, on_host):
        together = _on_a_node(spec, on_host)
        raise DoesNotFitError(
            f"host memory of {together} ranks on a node under memory={policy}", max(on_host) * together, limit,
            "recompute more (memory=recompute, memory=plan), use more nodes, or a smaller image or micro-batch",
            key="machine.host_bytes",
        )  # fmt: skip


def has_room(spec: RunSpec, on_host: Sequence[int]) -> bool:
    """Return whether a node's host memory holds what its ranks keep there, given in bytes for each rank of a pipeline."""
    limit = spec.machine.host_bytes
    return limit is None or max(on_host) * _on_a_node(spec, on_host) <= limit


def _on_a_node(spec: RunSpec, on_host: Sequence[int]) -> int:
    return min(spec.cluster.ranks_per_node or len(on_host), spec.world_size)


def _within_layers(spec: RunSpec) -> RunSpec:
    """Keep the search of a schedule that will run to as many stages as the model has layers."""
    if spec.machine.kind != "real" or spec.schedule.name != CAPPED:
        return spec
    most = min(len(layers_of(spec.model, spec.data)), spec.schedule.max_stages or sys.maxsize)
    return replace(spec, schedule=replace(spec.schedule, max_stages=most))


def _kept_plan(spec: RunSpec, case: MemoryCase) -> MemoryPlan:
    """Return the policy's plan, from the cache where it has been made for the same case."""
    key = repr((
        spec.memory, case.schedule.digest(), case.profile, case.network, case.boundaries, case.optimizer, case.limit_bytes,
        case.d2h_bytes_per_s, case.h2d_bytes_per_s, case.least_bytes, case.num_replicas,
    ))  # fmt: skip
    return MemoryPlan.from_json(cached(spec.cache_dir, "memory", key, lambda: plan_of(spec.memory, case).to_json()))

"""The schedule of a run: from a resolved configuration to the one list of actions."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gems.config.schema import ParallelConfig, RunSpec
from gems.errors import ConfigError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.partition.methods import partition_model
from gems.partition.operator_placement import placed_on
from gems.partition.problem import Partition
from gems.profile import ModelProfile
from gems.profile.store import profile_of
from gems.profile.subject import Subject
from gems.schedule import CAPPED, FAMILIES, FROM_FILE, PLACED
from gems.schedule.families.published_schedules import published_schedules
from gems.schedule.formats.schedule_json import from_json, to_json
from gems.schedule.formats.torch_csv import from_torch_csv
from gems.schedule.lower import compute_only, lower
from gems.schedule.registry import Request
from gems.schedule.schedule import Schedule
from gems.schedule.strips import with_strips
from gems.schedule.synthesis import capped
from gems.schedule.synthesis.solver import IS_INSTALLED
from gems.schedule.validate import validate
from gems.simulation.costs import RunCosts
from gems.simulation.model_costs import PROFILE, ModelCosts
from gems.simulation.model_search import search_under_policy, search_with_cut, search_within_bytes
from gems.utils.cache import cached

SEARCH = 8  # another number for searches that would find other schedules


def compute_schedule(spec: RunSpec) -> Schedule:
    """Return the compute-only schedule of a resolved run.

    It is generated, found by a search (or in the cache), or read from a file.

    Raises:
        ConfigError: the family cannot serve the counts or the cap, or a file has no such schedule.
        ScheduleError: the schedule of a file would not run.
    """
    name = spec.schedule.name
    if name == FROM_FILE:
        return _read(spec.schedule.path, spec.parallel)
    if name == PLACED:
        return placed_on(spec)
    if name == CAPPED:
        # the schedule is for a model with the cut that it was found with
        return from_json(search_schedule(spec)["schedule"])
    return with_strips(
        FAMILIES[name].build(schedule_request(RunCosts.of(spec), spec.seed)), spec.parallel.strips
    )


def search_schedule(spec: RunSpec, profile: ModelProfile | None = None) -> dict[str, Any]:
    """Return the result of the search of schedule=capped, from the cache if it has been done.

    Without a cap and under a memory policy, it is the schedule that is fastest under that policy.
    The dictionary has `schedule` (as JSON), `bound` (the efficiency that no schedule exceeds under
    the cap), `bound_any_strips` (the same for any number of strips, by these costs), `placement`,
    `method` and `candidates`. With cost=profile it also has `boundaries`, the cut that was found
    with the schedule, and `unit_bytes`, the bytes of a cap of 1. If `profile` is not given, it is
    the profile of the run.

    Raises:
        ConfigError: no placement can keep the cap, or the profile is not available.
    """
    model = (
        ModelCosts(spec, profile or profile_of(Subject.of(spec)))
        if spec.cost.name == PROFILE
        else None
    )
    request = (
        schedule_request(RunCosts.of(spec), spec.seed)
        if model is None
        else model_request(spec, model)
    )
    facts: tuple[object, ...] = (SEARCH, request, IS_INSTALLED)
    is_under_policy = spec.memory.name != "keep" and request.cap is None
    if is_under_policy:
        facts = (*facts, spec.memory, spec.machine, spec.cluster, spec.parallel.replicas)
    cap_bytes = (
        spec.schedule.activation_cap_bytes
        if request.num_strips > 1 and spec.memory.name == "keep"
        else None
    )
    if cap_bytes is not None:
        facts = (*facts, cap_bytes)

    def search() -> dict[str, Any]:
        more: dict[str, Any] = {}
        if model is None:
            answer = capped(request, published_schedules(request))
        else:
            if is_under_policy:
                answer, boundaries = search_under_policy(spec, request, model)
            elif cap_bytes is not None:
                answer, boundaries = search_within_bytes(spec, request, model, cap_bytes)
            else:
                answer, boundaries = search_with_cut(request, model)
            more = {"boundaries": list(boundaries), "unit_bytes": model.unit_bytes}
        names = ("bound", "bound_any_strips", "placement", "method", "candidates")
        return (
            {"schedule": to_json(answer.schedule)}
            | {name: getattr(answer, name) for name in names}
            | more
        )

    return cached(spec.cache_dir, CAPPED, repr(facts), search)


def partition_of(run: RunSpec, schedule: Schedule) -> Partition:
    """Return the partition of a resolved run.

    For a schedule that was searched with a profile, it is the cut found with the schedule.

    Raises:
        ConfigError, DoesNotFitError: as `partition_model`.
    """
    if run.schedule.name != CAPPED or run.cost.name != PROFILE:
        return partition_model(run, schedule)
    parallel = replace(run.parallel, boundaries=search_schedule(run)["boundaries"])
    return partition_model(replace(run, parallel=parallel), schedule)


def lowered_schedule(spec: RunSpec) -> Schedule:
    """Return the lowered, validated schedule of a resolved run: the one list that ranks run.

    Its receives are posted in time for the links of the run, by the run's costs.

    Raises:
        ConfigError: as `compute_schedule`, or the schedule does not keep the cap.
        ScheduleError: the schedule would not run.
    """
    made = compute_schedule(spec)
    costs = RunCosts.of(spec)
    stages = costs.stages(made.placement)
    return validate(lower(made, stages, costs.network, costs.cap), stages, costs.cap)


def kept_within(costs: RunCosts, lowered: Schedule, case: MemoryCase | None = None) -> PlanOutcome:
    """Return the outcome of a step of a lowered schedule with all activations kept.

    Its receives are posted in time for the links. If their buffers do not fit the device, they are
    posted with the fewest buffers.
    """
    kept = costs.kept(lowered, case)
    limit = costs.machine.device_bytes
    if case is None or limit is None or max(kept.peak_bytes) <= limit:
        return kept
    return costs.kept(validate(lower(compute_only(lowered))), case)


def model_request(spec: RunSpec, model: ModelCosts) -> Request:
    """Return the request for a search over the stages of a profiled model, in units of `model`."""
    unit_s = model.unit_s
    cost = replace(spec.cost, unit_s=unit_s, link=spec.cost.link / unit_s)
    if spec.schedule.activation_cap_bytes is not None:
        cost = replace(cost, activation_bytes=model.unit_bytes)  # the model is cut for it
    request = schedule_request(replace(RunCosts.of(spec), cost=cost), spec.seed)
    num_layers = model.profile.num_layers
    boundaries = spec.parallel.boundaries
    return replace(
        request,
        costs=model,
        max_stages=min(num_layers, request.max_stages or num_layers),
        num_stages=None if boundaries is None else len(boundaries) - 1,
    )


def schedule_request(costs: RunCosts, seed: int) -> Request:
    """Return the request for the generator, in units of the costs."""
    parallel = costs.parallel
    schedule = costs.schedule
    return Request(
        num_ranks=parallel.partitions,
        num_micro_batches=parallel.micro_batches or 1,
        num_parts=parallel.parts or 1,
        chunks=schedule.chunks,
        cap=costs.cap,
        costs=costs.depth,
        network=costs.network.in_units(costs.cost.unit_s),
        allow=tuple(sorted(schedule.memory_actions)),
        max_stages=schedule.max_stages,
        placements=tuple(schedule.placements),
        seed=seed,
        budget_s=schedule.budget_s,
        num_strips=parallel.strips,
        shared_latency=costs.cost.link / parallel.strips,
    )


def _read(schedule_path: str | None, parallel: ParallelConfig) -> Schedule:
    """Read the file of schedule=file.

    What `gems schedule --json` gave, or torch's CSV, valid as it stands.
    """
    path = Path(schedule_path or "")
    try:
        text = path.read_text()
        is_csv = path.suffix == ".csv"
        schedule = from_torch_csv(text, path.stem) if is_csv else from_json(json.loads(text))
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(
            "schedule.path",
            path,
            f"holds no schedule ({error})",
            "give a file of `gems schedule --json`, or a .csv of `gems schedule format=torch`",
        ) from error
    if schedule.num_ranks != parallel.partitions:
        raise ConfigError(
            "parallel.partitions",
            parallel.partitions,
            f"must be {schedule.num_ranks}, the ranks of {path}",
        )
    if schedule.num_strips != parallel.strips:
        raise ConfigError(
            "parallel.strips", parallel.strips, f"must be {schedule.num_strips}, those of {path}"
        )
    if schedule.num_whole != parallel.micro_batches:
        fault = f"must be {schedule.num_whole}, those of {path}"
        raise ConfigError("parallel.micro_batches", parallel.micro_batches, fault)
    return compute_only(validate(schedule))

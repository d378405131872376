"""The schedule of a run: from a resolved configuration to the one list of actions."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import ConfigError, ScheduleError
from gems.partition.methods import partition_model
from gems.partition.operator_placement import placed_on
from gems.partition.problem import Partition
from gems.profile import ModelProfile
from gems.profile.store import profile_of
from gems.schedule import CAPPED, FAMILIES, FROM_FILE, PLACED, PLACEMENTS
from gems.schedule.families.published_schedules import published_schedules
from gems.schedule.formats.schedule_json import from_json, to_json
from gems.schedule.formats.torch_csv import from_torch_csv
from gems.schedule.lower import add_transfers, compute_only, lower
from gems.schedule.placement import Placement
from gems.schedule.registry import Request
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from gems.schedule.strips import strip_costs, with_strips
from gems.schedule.synthesis import Found, capped, least_cap
from gems.schedule.synthesis.solver import IS_INSTALLED
from gems.schedule.validate import validate
from gems.simulation.costs import activation_cap, depth_costs, network_in_seconds, network_in_units, schedule_costs
from gems.simulation.model_costs import PROFILE, ModelCosts
from gems.utils.cache import cached

SEARCH = 4  # another number for searches that would find other schedules
MAX_CUTS = 2  # times that the model is cut again where no ladder is climbed
MAX_CLIMBED = 512  # ranks x micro-batches up to which it is: a search of more takes far longer than its budget
LADDER = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)  # caps at which the model is cut on the way to a higher one
SHARE = 0.4  # of the budget, for a search at one cap of the ladder, of which there are two
FIRST_SHARE = 0.5  # of that, for the searches before these, on one placement each
FIRST_CUT, CUT = 1 / 8, 0.4  # of the cuts that may be simulated: for each placement, and for the schedule found
NEAR = 1.1  # times the fastest, up to which a placement is cut again once all have been


def compute_schedule(spec: RunSpec) -> Schedule:
    """Return the compute-only schedule of a resolved run: generated, found by search (or in the cache), or read.

    Raises:
        ConfigError: counts or a cap that the family cannot serve, or a file that holds no such schedule.
        ScheduleError: a file's schedule that would not run.
    """
    name = spec.schedule.name
    if name == FROM_FILE:
        return _read(spec)
    if name == PLACED:
        return placed_on(spec, network_in_seconds(spec))
    if name == CAPPED:
        return from_json(search_schedule(spec)["schedule"])  # of a model with the cut that it was found with
    return with_strips(FAMILIES[name].build(schedule_request(spec)), spec.parallel.strips)


def search_schedule(spec: RunSpec, profile: ModelProfile | None = None) -> dict[str, Any]:
    """Return what the search of schedule=capped found, from the cache where it has been done.

    The dictionary holds `schedule` (as JSON), `bound` (the efficiency that no schedule exceeds under the cap),
    `placement`, `method` and `candidates`; with cost=profile also `boundaries`, the cut that was found with the
    schedule, and `unit_bytes`, the bytes of a cap of 1. The profile is that of the run, unless it is given.

    Raises:
        ConfigError: a cap that no placement can keep, or a profile that cannot be had.
    """
    if spec.cost.name != PROFILE:
        request, model = schedule_request(spec), None
    else:
        model = ModelCosts(spec, profile or profile_of(spec))
        request = model_request(spec, model)

    def search() -> dict[str, Any]:
        more: dict[str, Any] = {}
        if model is None:
            answer = capped(request, published_schedules(request))
        else:
            answer, boundaries = search_with_cut(request, model)
            more = {"boundaries": list(boundaries), "unit_bytes": model.unit_bytes}
        names = ("bound", "placement", "method", "candidates")
        return {"schedule": to_json(answer.schedule)} | {name: getattr(answer, name) for name in names} | more

    return cached(spec.cache_dir, CAPPED, repr((SEARCH, request, IS_INSTALLED)), search)


def search_with_cut(request: Request, model: ModelCosts) -> tuple[Found, tuple[int, ...]]:
    """Return the fastest schedule found and the cut of the model that it runs with.

    Where the cut may change, the search climbs from cap to cap of a fixed ladder up to its own. On each it cuts the
    model for each placement, by the time of the step of the fastest schedule that a short search finds there, searches
    all placements with these cuts, cuts again for the schedule found, and searches once more. Each takes what the one
    before it found as a rival, with its cut. So at a cap of the ladder the answer is not slower than at a lower one.
    Large steps are searched and cut in turn under their own cap alone.
    """
    size = request.num_ranks * request.num_micro_batches * request.num_strips
    if model.is_cut or size > MAX_CLIMBED:
        found, model = _searched(request, model, [], MAX_CUTS)
        return found, model.cut(found.schedule.placement)
    rivals: list[Schedule] = []
    lower = [cap for cap in LADDER if request.cap is None or cap < request.cap]
    for cap in (*lower, request.cap):
        asked = replace(request, cap=cap, costs=model, budget_s=request.budget_s * SHARE)
        if cap in lower and least_cap(asked) > cap:
            continue
        rivals = _fastest_on_each_placement(asked, model, rivals)
        for schedule in rivals:
            model = _cut_for(schedule, asked, model, FIRST_CUT)
        found, model = _searched(replace(asked, costs=model), model, rivals, 1, CUT)
        rivals = [found.schedule]
    return found, model.cut(found.schedule.placement)


def _searched(
    request: Request, model: ModelCosts, rivals: Sequence[Schedule], cuts: int, share: float = 1.0
) -> tuple[Found, ModelCosts]:  # fmt: skip
    """Search, and while it changes, so many times, cut the model for the schedule that was found and search again."""
    found = capped(request, [*rivals, *published_schedules(request)])
    for _ in range(cuts):
        before, model = model, _cut_for(found.schedule, request, model, share)
        if model is before:
            break
        request = replace(request, costs=model)
        found = capped(request, [found.schedule, *published_schedules(request)])
    return found, model


def _fastest_on_each_placement(request: Request, model: ModelCosts, known: Sequence[Schedule]) -> list[Schedule]:
    """Return the fastest of known, published and shortly searched schedules on each placement.

    Where one is known all placements have been cut, and those left far behind are left out.
    """
    names = request.placements or PLACEMENTS
    short = replace(request, budget_s=request.budget_s * FIRST_SHARE / len(names))
    made = [*known, *published_schedules(request)]
    for name in names:
        with suppress(ConfigError):  # a cap that this placement cannot keep
            made.append(capped(replace(short, placements=(name,))).schedule)
    fastest: dict[Placement, tuple[float, Schedule]] = {}
    for schedule in made:
        span = _span(schedule, request, model)
        if schedule.placement not in fastest or span < fastest[schedule.placement][0]:
            fastest[schedule.placement] = span, schedule
    longest = NEAR * min(span for span, _ in fastest.values()) if known else math.inf
    return [schedule for span, schedule in fastest.values() if span <= longest]


def _cut_for(schedule: Schedule, request: Request, model: ModelCosts, share: float = 1.0) -> ModelCosts:
    """Return the model with the cut for a schedule, the same model if its steps take no less time with another."""
    cut = model.faster_cut(schedule, request.network, request.cap, share)
    if cut == model.cut(schedule.placement):
        return model
    made = model.with_cut(schedule.placement, cut)
    return made if _span(schedule, request, made) <= _span(schedule, request, model) else model


def _span(schedule: Schedule, request: Request, model: ModelCosts) -> float:
    """Return the time of a step as ranks run it, infinite if it would not run under the cap."""
    costs, network = strip_costs(model.of(schedule.placement), schedule.num_strips), request.network
    try:
        lowered = add_transfers(schedule, costs, network, request.cap)
        return simulate(lowered, costs, network, request.cap).span
    except ScheduleError:
        return math.inf


def partition_of(run: RunSpec, schedule: Schedule) -> Partition:
    """Return the partition of a resolved run: of a schedule that was searched by a profile the cut found with it.

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
        ConfigError: as `compute_schedule`, or a cap that the schedule does not keep.
        ScheduleError: a schedule that would not run.
    """
    made = compute_schedule(spec)
    costs, cap = schedule_costs(spec, made.placement), activation_cap(spec)
    return validate(lower(made, costs, network_in_units(spec), cap), costs, cap)


def model_request(spec: RunSpec, model: ModelCosts) -> Request:
    """Return what a search over the stages of a profiled model is asked for, in the units of `model`."""
    unit_s, link = model.unit_s, spec.cost.link / model.unit_s
    cost = replace(spec.cost, unit_s=unit_s, link=link)
    if spec.schedule.activation_cap_bytes is not None:
        cost = replace(cost, activation_bytes=model.unit_bytes)  # the model is cut for it
    request = schedule_request(replace(spec, cost=cost))
    num_layers, boundaries = model.profile.num_layers, spec.parallel.boundaries
    return replace(
        request, costs=model, max_stages=min(num_layers, request.max_stages or num_layers),
        num_stages=None if boundaries is None else len(boundaries) - 1,
    )  # fmt: skip


def schedule_request(spec: RunSpec) -> Request:
    """Return what the generator is asked for."""
    parallel, schedule = spec.parallel, spec.schedule
    return Request(
        num_ranks=parallel.partitions, num_micro_batches=parallel.micro_batches or 1, num_parts=parallel.parts or 1,
        chunks=schedule.chunks, cap=activation_cap(spec), costs=depth_costs(spec), network=network_in_units(spec),
        allow=tuple(sorted(schedule.memory_actions)), max_stages=schedule.max_stages,
        placements=tuple(schedule.placements), seed=spec.seed, budget_s=schedule.budget_s,
        num_strips=parallel.strips,
    )  # fmt: skip


def _read(spec: RunSpec) -> Schedule:
    """Read the file of schedule=file: what `gems schedule --json` gave, or torch's CSV, valid as it stands."""
    path = Path(spec.schedule.path or "")
    try:
        text = path.read_text()
        is_csv = path.suffix == ".csv"
        schedule = from_torch_csv(text, path.stem) if is_csv else from_json(json.loads(text))
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(
            "schedule.path", path, f"holds no schedule ({error})",
            "give a file of `gems schedule --json`, or a .csv of `gems schedule format=torch`",
        ) from error  # fmt: skip
    asked = spec.parallel
    if schedule.num_ranks != asked.partitions:
        raise ConfigError("parallel.partitions", asked.partitions, f"must be {schedule.num_ranks}, the ranks of {path}")
    if schedule.num_strips != asked.strips:
        raise ConfigError("parallel.strips", asked.strips, f"must be {schedule.num_strips}, those of {path}")
    if schedule.num_whole != asked.micro_batches:
        fault = f"must be {schedule.num_whole}, those of {path}"
        raise ConfigError("parallel.micro_batches", asked.micro_batches, fault)
    return compute_only(validate(schedule))

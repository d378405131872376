"""The schedule of a run: from a resolved configuration to the one list of actions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.partition.operator_placement import placed_on
from gems.schedule import CAPPED, FAMILIES, FROM_FILE, PLACED
from gems.schedule.families.published_schedules import published_schedules
from gems.schedule.formats.schedule_json import from_json, to_json
from gems.schedule.formats.torch_csv import from_torch_csv
from gems.schedule.lower import compute_only, lower
from gems.schedule.registry import Request
from gems.schedule.schedule import Schedule
from gems.schedule.synthesis import capped
from gems.schedule.synthesis.solver import IS_INSTALLED
from gems.schedule.validate import validate
from gems.simulation.costs import activation_cap, depth_costs, network_in_seconds, network_in_units, schedule_costs
from gems.utils.cache import cached


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
        return from_json(search_schedule(spec)["schedule"])
    return FAMILIES[name].build(schedule_request(spec))


def search_schedule(spec: RunSpec) -> dict[str, Any]:
    """Return what the search of schedule=capped found, from the cache where it has been done.

    The dictionary holds `schedule` (as JSON), `bound` (the efficiency that no schedule exceeds under the cap),
    `placement`, `method` and `candidates`.

    Raises:
        ConfigError: a cap that no placement can keep.
    """
    request = schedule_request(spec)

    def search() -> dict[str, Any]:
        answer = capped(request, published_schedules(request))
        names = ("bound", "placement", "method", "candidates")
        return {"schedule": to_json(answer.schedule)} | {name: getattr(answer, name) for name in names}

    return cached(spec.cache_dir, CAPPED, repr((request, IS_INSTALLED)), search)


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


def schedule_request(spec: RunSpec) -> Request:
    """Return what the generator is asked for."""
    parallel, schedule = spec.parallel, spec.schedule
    return Request(
        num_ranks=parallel.partitions, num_micro_batches=parallel.micro_batches or 1, num_parts=parallel.parts or 1,
        chunks=schedule.chunks, cap=activation_cap(spec), costs=depth_costs(spec), network=network_in_units(spec),
        allow=tuple(sorted(schedule.memory_actions)), max_stages=schedule.max_stages,
        placements=tuple(schedule.placements), seed=spec.seed, budget_s=schedule.budget_s,
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
    num = schedule.num_micro_batches
    if num != asked.micro_batches:
        raise ConfigError("parallel.micro_batches", asked.micro_batches, f"must be {num}, those of {path}")
    return compute_only(validate(schedule))

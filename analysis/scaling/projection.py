"""How far a prediction may be off.

A study simulated again with each constant of its machine changed, and with all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from analysis.io.run_config import read_head
from analysis.scaling.points import Point, base_points, format_error
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.schedule.schedule import Schedule
from gems.simulation.build import lowered_schedule
from gems.simulation.costs import activation_cap, schedule_costs, simulate_step
from gems.simulation.jitter import Arrivals, arrivals_of, median_of, noisy_steps
from gems.utils.tables import RIGHT, table

SHARE = 0.2  # by which a constant may be off, either way
NUM_DRAWS = 32  # of all constants at once
NUM_STEPS = 41  # of a median under noise
NUM_BAND_STEPS = 15
BAND = (0.025, 0.975)
COMPUTE = "machine.efficiency"
COMPUTE_TIMES = ("forward", "input_grad", "weight_grad", "recompute")
CONSTANTS = (
    COMPUTE,
    "machine.link_latency_s",
    "machine.link_bytes_per_s",
    "machine.node_latency_s",
    "machine.node_bytes_per_s",
    "machine.noise",
)
# Published scaling efficiencies, of 1, with their sources: by schedule, model and ranks.
PUBLISHED = {
    ("gems_master", "resnet-1001-v2", 1024): (
        0.9732,
        "Jain et al., SC 2020, abstract; base not stated there",
    )
}


@dataclass(frozen=True, slots=True)
class Place:
    """A point of a line with its efficiency, of 1, and its band when all constants change at random."""

    point: Point
    efficiency: float
    low: float
    high: float
    published: tuple[float, str] | None


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """The efficiency of a line's largest point, of 1, with one constant `SHARE` less and `SHARE` more."""

    line: str
    ranks: int
    constant: str
    value: float
    less: float
    more: float


@dataclass(frozen=True, slots=True)
class Projection:
    """Bands and sensitivities of all lines of a study, and the source of its machine's constants."""

    places: tuple[Place, ...]
    sensitivities: tuple[Sensitivity, ...]
    calibrated_from: str
    held_out_error: float | None


def project(points: Sequence[Point], paths: Sequence[Path]) -> Projection | None:
    """Return the bands of a study that is simulated throughout on a calibrated machine.

    None for any other study.
    Each constant that the machine has is changed by 20 %, alone for the sensitivities, and all of
    them at once, evenly and independently, for the bands, with other draws of the noise each time.
    """
    if any(point.source != "simulated" for point in points):
        return None
    specs = dict(map(_read_spec, paths))
    machines = [spec.machine for spec in specs.values()]
    if any(machine.calibrated_from is None or machine.kind != "simulated" for machine in machines):
        return None
    places: list[Place] = []
    sensitivities: list[Sensitivity] = []
    for line, base in base_points(points).items():
        mine = [point for point in points if point.line == line]
        if len(mine) < 2 or any(point.efficiency(base) is None for point in mine):
            continue
        runs = [specs[point.signatures[0]] for point in mine]
        first = runs[mine.index(base)]
        last = max(runs, key=lambda run: run.world_size)
        schedules: dict[tuple[int, int | None], Schedule] = {}
        constants = machine_constants(first)
        rng = np.random.default_rng(runs[0].seed)
        drawn = []
        for draw in range(NUM_DRAWS):
            factors = rng.uniform(1 - SHARE, 1 + SHARE, len(constants)).tolist()
            drawn.append(
                _efficiencies(
                    runs,
                    first,
                    dict(zip(constants, factors, strict=True)),
                    schedules,
                    draw,
                    NUM_BAND_STEPS,
                )
            )
        for point, low, high in zip(mine, *np.quantile(drawn, BAND, axis=0).tolist(), strict=True):
            beside = PUBLISHED.get((runs[0].schedule.name, point.model, point.ranks))
            places.append(Place(point, point.efficiency(base) or 0.0, low, high, beside))
        for name, value in machine_constants(last).items():
            less, more = (
                _efficiencies([last], first, {name: factor}, schedules, 0, NUM_STEPS)[0]
                for factor in (1 - SHARE, 1 + SHARE)
            )
            sensitivities.append(Sensitivity(line, last.world_size, name, value, less, more))
    if not places:
        return None
    errors = [machine.held_out_error for machine in machines if machine.held_out_error is not None]
    origin = "; ".join(dict.fromkeys(machine.calibrated_from or "" for machine in machines))
    return Projection(tuple(places), tuple(sensitivities), origin, max(errors, default=None))


def varied(spec: RunSpec, factors: Mapping[str, float]) -> RunSpec:
    """Return a run whose machine has each named constant times its factor.

    A faster one takes less time to compute.
    """
    machine = spec.machine
    cost = spec.cost
    for constant, factor in factors.items():
        if constant == COMPUTE:
            times = {name: getattr(cost, name) for name in COMPUTE_TIMES}
            cost = replace(
                cost, **{name: time / factor for name, time in times.items() if time is not None}
            )
            given = {name: cost.stages[name] for name in COMPUTE_TIMES if name in cost.stages}
            faster = {name: [time / factor for time in some] for name, some in given.items()}
            cost = replace(cost, stages=cost.stages | faster)
        else:
            name = constant.removeprefix("machine.")
            machine = replace(machine, **{name: getattr(machine, name) * factor})
    return replace(spec, machine=machine, cost=cost)


def machine_constants(spec: RunSpec) -> dict[str, float]:
    """Return the constants of a run's machine that are given and not 0."""
    values = {name: getattr(spec.machine, name.removeprefix("machine.")) for name in CONSTANTS}
    return {name: float(value) for name, value in values.items() if value}


def _efficiencies(
    runs: Sequence[RunSpec],
    base: RunSpec,
    factors: Mapping[str, float],
    schedules: dict[tuple[int, int | None], Schedule],
    seed: int,
    num_steps: int,
) -> list[float]:
    """Return each run's work done per rank and time over that of the base, all with the same changed constants.

    Runs of one line differ in their number of replicas alone or are simulated each by itself, so
    schedules are shared by partitions and micro-batches, and the arrivals of replicas by partitions
    and the node that they begin on.
    """
    arrivals: dict[tuple[int, int], Arrivals] = {}

    def speed(run: RunSpec) -> float:
        spec = varied(run, factors)
        parallel = run.parallel
        noise = spec.machine.noise
        shape = parallel.partitions, parallel.micro_batches
        if shape not in schedules:
            schedules[shape] = lowered_schedule(spec)
        schedule = schedules[shape]
        network, step = simulate_step(spec, schedule)
        if noise:
            costs = schedule_costs(spec, schedule.placement)
            cap = activation_cap(spec)
            place = parallel.partitions, network.first_rank
            if place not in arrivals and parallel.replicas > 1:
                arrivals[place] = arrivals_of(
                    schedule, costs, network, cap, noise, np.random.default_rng(seed)
                )
            known = arrivals.get(place) if parallel.replicas > 1 else None
            step = median_of(
                noisy_steps(
                    schedule, costs, network, cap, noise, parallel.replicas, seed, num_steps, known
                )
            )
        images = (parallel.micro_batches or 0) * parallel.micro_batch_size
        return images / parallel.partitions / (step.span * spec.cost.unit_s)

    of_base = speed(base)
    return [speed(run) / of_base for run in runs]


def _read_spec(path: Path) -> tuple[str, RunSpec]:
    """Read a run's signature and configuration from its trace."""
    attributes, _, document = read_head(path)
    signature = str(attributes.get("signature", ""))
    try:
        return signature, RunSpec.from_dict(document)
    except (ConfigError, TypeError):  # of another version: nothing to simulate again
        return signature, RunSpec()


def place_rows(found: Projection) -> list[dict[str, Any]]:
    """Return a row a point; efficiencies are of 1."""
    rows = []
    for place in found.places:
        row: dict[str, Any] = {"schedule": place.point.line}
        row |= {name: getattr(place.point, name) for name in ("source", "ranks", "images_per_s")}
        row |= {
            "parallel_efficiency": place.efficiency,
            "band_low": place.low,
            "band_high": place.high,
        }
        row["published_efficiency"], row["published_source"] = place.published or (None, "")
        rows.append(
            row | {"calibrated_from": found.calibrated_from, "held_out_error": found.held_out_error}
        )
    return rows


def sensitivity_rows(found: Projection) -> list[dict[str, Any]]:
    """Return a row a line and constant; efficiencies are of 1, of the largest point of the line."""
    return [
        {
            "schedule": each.line,
            "ranks": each.ranks,
            "constant": each.constant,
            "value": each.value,
            f"efficiency_less_{SHARE:.0%}": each.less,
            f"efficiency_more_{SHARE:.0%}": each.more,
        }
        for each in found.sensitivities
    ]


def projection_table(found: Projection) -> str:
    """Return both tables for people, in %."""
    places = []
    for place in found.places:
        low, value, high = (
            f"{100 * share:.2f}" for share in (place.low, place.efficiency, place.high)
        )
        shown = (
            f"published {100 * place.published[0]:.2f} ({place.published[1]})"
            if place.published
            else ""
        )
        places.append((place.point.line, place.point.ranks, value, f"{low} to {high}", shown))
    constants = [
        (each.line, each.ranks, each.constant, each.value, 100 * each.less, 100 * each.more)
        for each in found.sensitivities
    ]
    columns = {"schedule": "", "ranks": "d", "efficiency [%]": RIGHT, "band [%]": RIGHT, "": ""}
    changes = {f"{SHARE:.0%} less [%]": ".2f", f"{SHARE:.0%} more [%]": ".2f"}
    head = f"simulated on constants from {found.calibrated_from}; {describe_error(found)}"
    about = f"efficiency of the largest points with a constant {SHARE:.0%} less, {SHARE:.0%} more"
    return "\n".join(
        [
            table(columns, places, title=head),
            table(
                {"schedule": "", "ranks": "d", "constant": "", "value": ".4g", **changes},
                constants,
                title=about,
            ),
        ]
    )


def describe_error(projection: Projection) -> str:
    """Return how far predictions with the machine's calibration were off."""
    if projection.held_out_error is None:
        return "not checked against runs on that machine"
    return format_error(projection.held_out_error)

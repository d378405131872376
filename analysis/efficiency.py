"""Scaling points: throughput and efficiency over ranks, from the traces of runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from analysis.metrics import step_times_s
from gems.config import CostConfig, DataConfig, ModelConfig, ParallelConfig, ScheduleConfig
from gems.errors import ConfigError
from gems.trace import DTYPES, SOURCES, open_trace, read_column
from gems.trace.hdf5 import get_attributes

Section = TypeVar("Section")


@dataclass(frozen=True, slots=True)
class Point:
    """One place in a scaling study: runs that are alike, their counted steps together.

    Attributes:
        line: the schedule and what bounds it; points of one line are joined.
        source: measured, emulated or simulated.
        ranks: world size.
        partitions: ranks of one pipeline.
        replicas: copies of the pipeline.
        micro_batches: of one step and replica.
        images_per_step: over all micro-batches and replicas.
        problem: what an image costs: equal where the same model sees images of the same size.
        work_s: compute time of one image on one rank; None where only the hardware knows.
        step_s: times of the steps that are not warm-up steps, in the order of the runs.
        signatures: of the runs.
    """

    line: str
    source: str
    ranks: int
    partitions: int
    replicas: int
    micro_batches: int
    images_per_step: int
    problem: tuple[Any, ...]
    work_s: float | None
    step_s: tuple[float, ...]
    signatures: tuple[str, ...]

    @property
    def step_median_s(self) -> float:
        """Median of the step times."""
        return float(np.median(self.step_s))

    @property
    def images_per_s(self) -> float:
        """Images of a step over the median step time."""
        return self.images_per_step / self.step_median_s

    @property
    def compute_efficiency(self) -> float | None:
        """Useful compute over ranks x step time; None where the compute of an image is not known."""
        return None if self.work_s is None else self.images_per_s * self.work_s / self.ranks

    def efficiency(self, base: Point) -> float | None:
        """Gives the parallel efficiency: work done per rank and time, over that of `base`.

        For one problem that is T(p0) p0 / (T(p) p) in strong scaling and T(p0) / T(p) in weak scaling. Where the
        problem grows an image counts by its compute time, or of one model by its pixels; None for two models.
        """
        share = self._work_beside(base)
        return (
            None
            if share is None
            else share * self.images_per_s / self.ranks / (base.images_per_s / base.ranks)
        )

    def _work_beside(self, base: Point) -> float | None:
        if self.problem == base.problem or (self.work_s is None) != (base.work_s is None):
            return 1.0
        if self.work_s is not None and base.work_s is not None:
            return self.work_s / base.work_s
        (*model, pixels), (*base_model, base_pixels) = self.problem, base.problem
        return float(pixels / base_pixels) if model == base_model else None


@dataclass(frozen=True, slots=True)
class Agreement:
    """A simulated point beside the same point of a run: `error` is predicted over observed step time, less 1."""

    line: str
    ranks: int
    source: str
    step_s: float
    simulated_s: float

    @property
    def error(self) -> float:
        """Relative error of the prediction, positive where it is too slow."""
        return self.simulated_s / self.step_s - 1.0


def read_point(path: Path) -> Point:
    """Reads one run: its steps and configuration alone, so that large traces cost no time.

    Raises:
        ConfigError: no trace there, an unreadable one, one without its configuration, or no step after warm-up.
    """
    file_path = path / "trace.h5" if path.is_dir() else path
    if not file_path.exists():
        raise ConfigError("path", path, "has no trace.h5", "give finished runs, or their trace.h5")
    with open_trace(file_path) as file:
        attributes = get_attributes(file)
        steps = np.empty(len(file["steps/step"]), DTYPES["steps"])
        for column in DTYPES["steps"].names or ():
            steps[column] = read_column(file, "steps", column)
        document = yaml.safe_load(file["run_yaml"].asstr()[()])
    if not isinstance(document, dict):
        raise ConfigError("trace", path, "holds no configuration of its run", "collect the run again")
    steps = np.sort(steps, order="step")
    counted = steps[steps["is_warmup"] == 0]
    if not len(counted):
        raise ConfigError("trace", path, "holds no whole step after warm-up", "raise train.steps")
    parallel, cost = _section(document, "parallel", ParallelConfig), _section(document, "cost", CostConfig)
    source = str(attributes["source"])
    work_s = None if source == "measured" else _work_s(parallel, cost)
    return Point(
        line=_line(_section(document, "schedule", ScheduleConfig), parallel),
        source=source,
        ranks=int(attributes["world_size"]),
        partitions=parallel.partitions,
        replicas=parallel.replicas,
        micro_batches=parallel.micro_batches or 0,
        images_per_step=int(counted["images"][0]),
        problem=_problem(document) if work_s is None else (float(f"{work_s:.9g}"),),
        work_s=work_s,
        step_s=tuple(step_times_s(steps)[steps["is_warmup"] == 0].tolist()),
        signatures=(str(attributes.get("signature", "")),),
    )


def read_points(paths: Iterable[Path]) -> list[Point]:
    """Reads runs and gives their points by line, ranks and source; runs of one point are put together.

    Where a line has pipelines of several lengths on as many ranks, each length is a line of its own.

    Raises:
        ConfigError: as `read_point`.
    """
    pooled: dict[Point, Point] = {}
    for path in paths:
        read = read_point(path)
        place = replace(read, step_s=(), signatures=())
        known = pooled.get(place, place)
        pooled[place] = replace(
            read, step_s=known.step_s + read.step_s, signatures=known.signatures + read.signatures
        )
    points = list(pooled.values())
    crowded = {point.line for point in points if sum(_same_place(point, other) for other in points) > 1}
    named = [
        replace(point, line=f"{point.line}, pipelines of {point.partitions}")
        if point.line in crowded
        else point
        for point in points
    ]
    return sorted(named, key=lambda point: (point.line, point.ranks, SOURCES.index(point.source)))


def bases_of(points: Sequence[Point]) -> dict[str, Point]:
    """Gives the base of each line: its smallest point, of the most real source where there are several."""
    ordered = sorted(points, key=lambda point: (point.ranks, SOURCES.index(point.source)), reverse=True)
    return {point.line: point for point in ordered}


def kind_of(points: Sequence[Point]) -> str:
    """Gives the kind of a scaling study: strong, weak, capability, comparison or mixed.

    Strong keeps the images of a step, weak those of a rank; in capability scaling the model or its images grow;
    a comparison has one number of ranks.
    """
    if len({point.ranks for point in points}) == 1:
        return "comparison"
    problems = {(point.work_s is None, point.problem) for point in points}
    if len(problems) > len({is_measured for is_measured, _ in problems}):
        return "capability"
    if len({point.images_per_step for point in points}) == 1:
        return "strong"
    return "weak" if len({Fraction(point.images_per_step, point.ranks) for point in points}) == 1 else "mixed"


def agreements(points: Sequence[Point]) -> list[Agreement]:
    """Gives every simulated point that has run too, measured or emulated, with both step times."""
    return [
        Agreement(point.line, point.ranks, point.source, point.step_median_s, other.step_median_s)
        for point in points
        for other in points
        if other.source == "simulated" and point.source != "simulated" and _same_work(point, other)
    ]


def rows_of(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Gives the table of points, with units in the names of its columns; None where a figure is not known."""
    kind, bases = kind_of(points), bases_of(points)
    rows = []
    for point in points:
        base = bases[point.line]
        rows.append(
            {
                "schedule": point.line,
                "source": point.source,
                "ranks": point.ranks,
                "partitions": point.partitions,
                "replicas": point.replicas,
                "micro_batches": point.micro_batches,
                "images_per_step": point.images_per_step,
                "num_steps": len(point.step_s),
                "step_median_s": point.step_median_s,
                "step_min_s": min(point.step_s),
                "step_max_s": max(point.step_s),
                "images_per_s": point.images_per_s,
                "parallel_efficiency": point.efficiency(base),
                "compute_efficiency": point.compute_efficiency,
                "scaling": kind,
                "base_ranks": base.ranks,
                "base_source": base.source,
                "base_images_per_s": base.images_per_s,
                "signatures": " ".join(point.signatures),
            }
        )
    return rows


def agreement_rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Gives the predictions that can be checked, as plain data."""
    return [{**asdict(found), "error": found.error} for found in agreements(points)]


def _same_place(point: Point, other: Point) -> bool:
    return (point.line, point.source, point.ranks) == (other.line, other.source, other.ranks)


def _same_work(point: Point, other: Point) -> bool:
    def key(of: Point) -> tuple[Any, ...]:
        return of.line, of.partitions, of.replicas, of.micro_batches, of.images_per_step

    return key(point) == key(other) and (point.work_s is None or point.problem == other.problem)


def _section(document: dict[str, Any], name: str, section: type[Section]) -> Section:
    """Reads a section of a resolved configuration; what a later version added to it is passed over."""
    values = document.get(name) or {}
    if not isinstance(values, dict):
        raise ConfigError(f"run_yaml.{name}", values, "must be a mapping of keys")
    known: dict[str, Any] = getattr(section, "__dataclass_fields__", {})
    return section(**{key: value for key, value in values.items() if key in known})


def _line(schedule: ScheduleConfig, parallel: ParallelConfig) -> str:
    words = [schedule.name]
    if schedule.name == "gems_master" and (parallel.parts or 1) > 1:
        words.append(f"{parallel.parts} parts")
    if schedule.activation_cap is not None:
        words.append(f"cap {schedule.activation_cap:g}")
    if schedule.activation_cap_bytes is not None:
        words.append(f"cap {schedule.activation_cap_bytes} bytes")
    return ", ".join([*words, *(f"with {action}" for action in schedule.allow)])


def _work_s(parallel: ParallelConfig, cost: CostConfig) -> float:
    units = parallel.partitions * (cost.forward + cost.input_grad + cost.weight_grad)
    return units * cost.unit_s / parallel.micro_batch_size


def _problem(document: dict[str, Any]) -> tuple[Any, ...]:
    data = _section(document, "data", DataConfig)
    model = sorted(asdict(_section(document, "model", ModelConfig)).items())
    seen = ((key, str(value)) for key, value in model)  # values may be lists and mappings
    return (*seen, data.channels, data.height_px * data.width_px)

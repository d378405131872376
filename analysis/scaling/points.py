"""Points of a scaling study.

A point consists of similar runs with their step times. This module also determines efficiencies,
bases and kinds of scaling.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from fractions import Fraction
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from analysis.io.run_config import read_head, read_section
from analysis.metrics.run_metrics import NS, step_times_s
from analysis.metrics.statistics import (
    Interval,
    harmonic_mean,
    median_draws,
    median_interval,
    percentile,
    percentile_interval,
)
from gems.config.schema import CostConfig, DataConfig, ModelConfig, ParallelConfig, ScheduleConfig
from gems.errors import ConfigError
from gems.trace import SOURCES, TIME_UNIT
from gems.utils.units import counted, number

MAX_JOINED = 4  # largest ratio of the ranks of joined neighbours
DOCUMENTED = ("git_commit", "versions", "created_utc")


@dataclass(frozen=True, slots=True)
class Setting:
    """How the traces of a point's runs were recorded; tuples are sorted, without duplicates.

    `missing` are root attributes that a trace lacks. `num_warmup_steps` is the smallest number of
    steps that a run left out. `clock_error_s` is the largest error of a rank's clock relative to
    that of rank 0.
    """

    missing: tuple[str, ...] = ()
    commits: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    num_warmup_steps: int = 0
    clock_error_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Point:
    """One point of a scaling study: similar runs, with their counted steps together.

    Attributes:
        line: The schedule and its limits; points of one line are joined.
        micro_batches: The number for one step and replica.
        images_per_step: The number over all micro-batches and replicas.
        problem: The cost of an image: equal if the same model sees images of the same size.
        work_s: The compute time of one image on one rank; None if only the hardware determines it.
        step_s: The times of the steps that are not warm-up steps, in the order of the runs.
        num_images: The images of all these steps together; None if each has `images_per_step`.
        run_steps: The number of step times of each run; empty if all belong to one run.
        model: The network's name, depth and version, if the costs are those of a network.
        held_out_error: The relative error of predictions with the machine's calibration; None if
            unknown.
        is_in_units: Whether seconds represent units of time, with configured costs.
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
    num_images: int | None = None
    setting: Setting = field(default_factory=Setting)
    run_steps: tuple[int, ...] = ()
    model: str = ""
    held_out_error: float | None = None
    is_in_units: bool = False

    @property
    def step_median_s(self) -> float:
        """The median of the step times."""
        return float(np.median(self.step_s))

    @property
    def step_interval_s(self) -> Interval:
        """The median of the step times with its 95 % interval, or their range below 6 steps."""
        return median_interval(self.step_s)

    @property
    def run_intervals_s(self) -> tuple[Interval, ...]:
        """The median of the step times of each run separately, with their intervals."""
        ends = accumulate(self.run_steps or (len(self.step_s),), initial=0)
        return tuple(median_interval(self.step_s[start:end]) for start, end in pairwise(ends))

    @property
    def is_deterministic(self) -> bool:
        """Whether all steps would take the same time again, as in a simulation without noise."""
        return self.source == "simulated" and min(self.step_s) == max(self.step_s)

    @property
    def has_range(self) -> bool:
        """Whether the steps differ, and are too few for an interval."""
        return self.step_interval_s.is_range and not self.is_deterministic

    @property
    def step_p95_s(self) -> float:
        """The 95th percentile of the step times."""
        return percentile(self.step_s, 95)

    @property
    def images_per_s(self) -> float:
        """The images of a step divided by the median step time."""
        return self.images_per_step / self.step_median_s

    @property
    def images_per_s_interval(self) -> Interval:
        """The images/s with the bounds that follow from those of the step time."""
        step = self.step_interval_s
        low, high = (self.images_per_step / bound for bound in (step.high, step.low))
        return Interval(low, self.images_per_s, high, step.is_range)

    @property
    def rank_s_per_image(self) -> float:
        """The cost of an image, in seconds of one rank."""
        return self.ranks / self.images_per_s

    @property
    def compute_efficiency(self) -> float | None:
        """Useful compute over ranks x step time; None if the compute of an image is unknown."""
        return None if self.work_s is None else self.images_per_s * self.work_s / self.ranks

    def efficiency(self, base: Point) -> float | None:
        """Return the parallel efficiency: work done per rank and time, divided by that of `base`.

        For a constant problem, this is T(p0) p0 / (T(p) p) in strong scaling and T(p0) / T(p) in
        weak scaling. If the problem grows, an image counts by its compute time, or for the same
        model by its pixels; for two models, return None.
        """
        share = self.work_beside(base)
        return (
            None
            if share is None
            else share * self.images_per_s / self.ranks / (base.images_per_s / base.ranks)
        )

    def efficiency_interval(self, base: Point) -> Interval | None:
        """Return the parallel efficiency with its 95 % interval; both step times are uncertain.

        If one has too few steps for an interval, the bounds are the extremes of both ranges. Return
        None without an efficiency; for the base itself it is exactly 1.
        """
        value = self.efficiency(base)
        if value is None or self is base:
            return None if value is None else Interval(value, value, value)
        own = self.step_interval_s
        its = base.step_interval_s
        if own.is_range or its.is_range:
            low = value * min(1.0, its.low / its.value * own.value / own.high)
            return Interval(
                low, value, value * max(1.0, its.high / its.value * own.value / own.low), True
            )
        draws = median_draws(base.step_s, seed=1) / median_draws(self.step_s)
        return percentile_interval(draws * value * own.value / its.value, value)

    def work_beside(self, base: Point) -> float | None:
        """Return the work of an image divided by that of an image of `base`; None if unknown."""
        if self.problem == base.problem or (self.work_s is None) != (base.work_s is None):
            return 1.0
        if self.work_s is not None and base.work_s is not None:
            return self.work_s / base.work_s
        (*model, pixels), (*base_model, base_pixels) = self.problem, base.problem
        return float(pixels / base_pixels) if model == base_model else None


def in_units(points: Sequence[Point]) -> bool:
    """Return whether the times of any point are in units; then all times are shown in units."""
    return any(point.is_in_units for point in points)


def rate_name(points: Sequence[Point]) -> str:
    """Return the name under which `Point.images_per_s` is shown."""
    return "images/unit" if in_units(points) else "images/s"


def format_error(held_out_error: float) -> str:
    """Return a calibration's error as text."""
    return f"held-out error of step times {100 * held_out_error:.1f} %"


def read_point(path: Path) -> Point:
    """Read one run, only its steps and configuration.

    Raises:
        ConfigError: The trace is missing or unreadable, or lacks its configuration or a step after
            warm-up.
    """
    attributes, steps, document = read_head(path)
    is_counted = steps["is_warmup"] == 0
    images = steps["images"][is_counted]
    if not len(images):
        raise ConfigError("trace", path, "holds no whole step after warm-up", "raise train.steps")
    parallel = read_section(document, "parallel", ParallelConfig)
    cost = read_section(document, "cost", CostConfig)
    model = read_section(document, "model", ModelConfig)
    source = str(attributes["source"])
    units = parallel.partitions * (cost.forward + cost.input_grad + cost.weight_grad)
    work_s = None if source == "measured" else units * cost.unit_s / parallel.micro_batch_size
    return Point(
        line=_line(read_section(document, "schedule", ScheduleConfig), parallel),
        source=source,
        ranks=int(attributes["world_size"]),
        partitions=parallel.partitions,
        replicas=parallel.replicas,
        micro_batches=parallel.micro_batches or 0,
        images_per_step=int(images[0]),
        problem=(
            _problem(model, read_section(document, "data", DataConfig))
            if work_s is None
            else (float(f"{work_s:.9g}"),)
        ),
        work_s=work_s,
        step_s=tuple(step_times_s(steps)[is_counted].tolist()),
        signatures=(str(attributes.get("signature", "")),),
        num_images=int(images.sum()),
        setting=_setting(attributes, len(steps) - len(images)),
        run_steps=(len(images),),
        model=_model_name(model) if work_s is None or cost.name == "profile" else "",
        held_out_error=(
            None if (error := attributes.get("held_out_error")) is None else float(error)
        ),
        is_in_units=TIME_UNIT in attributes,
    )


def read_points(paths: Iterable[Path]) -> list[Point]:
    """Read runs and return their points by line, ranks and source; runs of one point are pooled.

    If a line has several models, or pipelines of several lengths, on equally many ranks, each of
    them becomes a line of its own.

    Raises:
        ConfigError: As in `read_point`.
    """
    pooled: dict[Point, Point] = {}
    for path in paths:
        read = read_point(path)
        place = replace(
            read, step_s=(), signatures=(), num_images=None, setting=Setting(), run_steps=()
        )
        known = pooled.get(place)
        pooled[place] = read if known is None else _together(known, read)
    points = _apart(list(pooled.values()), lambda point: point.model, if_alike=False)
    points = _apart(points, lambda point: f"pipelines of {point.partitions}", if_alike=True)
    return sorted(points, key=lambda point: (point.line, point.ranks, SOURCES.index(point.source)))


def _together(point: Point, other: Point) -> Point:
    mine = point.setting
    its = other.setting
    names = ("missing", "commits", "versions")
    setting = Setting(
        **{name: tuple(sorted({*getattr(mine, name), *getattr(its, name)})) for name in names},
        num_warmup_steps=min(mine.num_warmup_steps, its.num_warmup_steps),
        clock_error_s=max(mine.clock_error_s, its.clock_error_s),
    )
    return replace(
        point,
        step_s=point.step_s + other.step_s,
        signatures=point.signatures + other.signatures,
        num_images=(point.num_images or 0) + (other.num_images or 0),
        setting=setting,
        run_steps=point.run_steps + other.run_steps,
    )


def _apart(points: Sequence[Point], name: Callable[[Point], str], *, if_alike: bool) -> list[Point]:
    """Add names to the lines that have several points at one place.

    This is done if their names differ or, with `if_alike`, also if they are equal.
    """
    places: dict[tuple[str, str, int], list[str]] = {}
    for point in points:
        places.setdefault((point.line, point.source, point.ranks), []).append(name(point))
    lines = {
        line for (line, *_), names in places.items() if len(names if if_alike else set(names)) > 1
    }
    return [
        (
            replace(point, line=f"{point.line}, {name(point)}")
            if point.line in lines and name(point)
            else point
        )
        for point in points
    ]


def _model_name(model: ModelConfig) -> str:
    """Return a network's name in its usual form, such as resnet-1001-v2."""
    parts = [model.name, str(model.depth)] if model.name in ("resnet", "vgg") else [model.name]
    return "-".join([*parts, *([f"v{model.version}"] if model.name == "resnet" else [])])


def _setting(attributes: Mapping[str, Any], num_warmup_steps: int) -> Setting:
    needed = DOCUMENTED if attributes["source"] == "simulated" else (*DOCUMENTED, "hostnames")
    commit = str(attributes.get("git_commit", "unknown"))
    missing = [name for name in needed if not attributes.get(name) or attributes[name] == "unknown"]
    return Setting(
        missing=tuple(sorted(missing)),
        commits=() if commit == "unknown" else (commit,),
        versions=tuple(sorted(map(str, attributes.get("versions", ())))),
        num_warmup_steps=num_warmup_steps,
        clock_error_s=max(map(float, attributes.get("clock_error_ns", ())), default=0.0) * NS,
    )


def _line(schedule: ScheduleConfig, parallel: ParallelConfig) -> str:
    parts = [schedule.name]
    if schedule.name == "gems_master" and (parallel.parts or 1) > 1:
        parts.append(f"{parallel.parts} parts")
    if schedule.activation_cap is not None:
        parts.append(f"cap {schedule.activation_cap:g}")
    if schedule.activation_cap_bytes is not None:
        parts.append(f"cap {schedule.activation_cap_bytes} bytes")
    return ", ".join([*parts, *(f"with {action}" for action in schedule.memory_actions)])


def _problem(model: ModelConfig, data: DataConfig) -> tuple[Any, ...]:
    # values may be lists and mappings
    seen = ((key, str(value)) for key, value in sorted(asdict(model).items()))
    return (*seen, data.channels, math.prod(data.sides_px))


def base_points(points: Sequence[Point]) -> dict[str, Point]:
    """Return the base of each line: its smallest point, from the most real of several sources."""
    ordered = sorted(
        points, key=lambda point: (point.ranks, SOURCES.index(point.source)), reverse=True
    )
    return {point.line: point for point in ordered}


def scaling_kind(points: Sequence[Point]) -> str:
    """Return the kind of a scaling study: strong, weak, capability, comparison or mixed.

    Strong scaling keeps the images of a step, weak scaling those of a rank; in capability scaling
    the model or its images grow within a line; a comparison has one number of ranks.
    """
    if len({point.ranks for point in points}) == 1:
        return "comparison"
    problems = {(point.line, point.work_s is None, point.problem) for point in points}
    if len(problems) > len({(line, is_measured) for line, is_measured, _ in problems}):
        return "capability"
    if len({point.images_per_step for point in points}) == 1:
        return "strong"
    lines = {point.line for point in points}
    return "weak" if len(images_per_rank(points)) == len(lines) else "mixed"


def images_per_rank(points: Sequence[Point]) -> set[tuple[str, Fraction]]:
    """Return the images of a step divided by the ranks, by line; weak scaling has one per line."""
    return {(point.line, Fraction(point.images_per_step, point.ranks)) for point in points}


def most_real(points: Sequence[Point]) -> list[Point]:
    """Return one point for each number of ranks: measured before emulated before simulated."""
    best: dict[int, Point] = {}
    for point in sorted(points, key=lambda point: (point.ranks, SOURCES.index(point.source))):
        best.setdefault(point.ranks, point)
    return list(best.values())


def may_join(kind: str, point: Point, after: Point) -> bool:
    """Return whether neighbours may be joined.

    They may if the ranks grow at most four times, and images do not change independently.
    """
    return kind != "mixed" and after.ranks <= MAX_JOINED * point.ranks


def agreements(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return every simulated point that has also run.

    `error` is the predicted step time divided by the observed one, minus 1.
    """
    return [
        {
            **{name: getattr(point, name) for name in ("line", "ranks", "source")},
            "step_s": point.step_median_s,
            "simulated_s": other.step_median_s,
            "error": other.step_median_s / point.step_median_s - 1.0,
        }
        for point in points
        for other in points
        if other.source == "simulated" and point.source != "simulated" and _same_work(point, other)
    ]


def _same_work(point: Point, other: Point) -> bool:
    names = ("line", "partitions", "replicas", "micro_batches", "images_per_step")
    is_same = all(getattr(point, name) == getattr(other, name) for name in names)
    return is_same and (point.work_s is None or point.problem == other.problem)


def point_rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the table of points, with units in the names of its columns.

    Unknown figures are None.
    """
    kind = scaling_kind(points)
    bases = base_points(points)
    rows = []
    for point in points:
        base = bases[point.line]
        step = point.step_interval_s
        share = point.efficiency_interval(base)
        row: dict[str, Any] = {"schedule": point.line}
        for name in (
            "source",
            "ranks",
            "partitions",
            "replicas",
            "micro_batches",
            "images_per_step",
        ):
            row[name] = getattr(point, name)
        row |= {
            "num_steps": len(point.step_s),
            "step_median_s": step.value,
            "step_low_s": step.low,
            "step_high_s": step.high,
            "step_bounds": "range" if step.is_range else "95 % interval",
            "step_min_s": min(point.step_s),
            "step_p95_s": point.step_p95_s,
            "step_max_s": max(point.step_s),
            "time_unit": "unit" if point.is_in_units else "s",
            "images_per_s": point.images_per_s,
            "images_per_s_mean": harmonic_mean(point.images_per_step / np.asarray(point.step_s)),
        }
        for end, name in (("value", ""), ("low", "_low"), ("high", "_high")):
            row[f"parallel_efficiency{name}"] = None if share is None else getattr(share, end)
        row |= {"compute_efficiency": point.compute_efficiency, "scaling": kind}
        row |= {f"base_{name}": getattr(base, name) for name in ("ranks", "source", "images_per_s")}
        rows.append(row | {"signatures": " ".join(point.signatures)})
    return rows


def base_rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the base of each line with its absolute figures, as plain data."""
    names = ("source", "ranks", "images_per_s", "step_median_s")
    return [
        {"schedule": line, **{name: getattr(base, name) for name in names}}
        for line, base in sorted(base_points(points).items())
    ]


def title(points: Sequence[Point]) -> tuple[str, str]:
    """Return the headline, which names the kind of scaling, and the line below it."""
    first = points[0]
    images = " or ".join(
        f"{float(images):g}" for images in sorted({images for _, images in images_per_rank(points)})
    )
    headline = {
        "strong": f"strong scaling, {first.images_per_step} images a step",
        "weak": f"weak scaling, {images} images a rank",
        "capability": "capability scaling, the work of an image grows",
        "comparison": f"schedules on {counted(first.ranks, 'rank')}",
        "mixed": "scaling, images a step and ranks change independently",
    }[scaling_kind(points)]
    is_range = any(point.has_range for point in points)
    bars = "95 % intervals, below 6 steps the range" if is_range else "95 % intervals"
    detail = f"median step, bars are {bars}, warm-up left out"
    known = [
        error
        for point in points
        if point.source == "simulated" and (error := point.held_out_error) is not None
    ]
    if known:
        detail += f"; {format_error(max(known))}"
    errors = [agreement["error"] for agreement in agreements(points)]
    if errors:
        low, high = (round(100 * pick(errors), 1) + 0.0 for pick in (min, max))  # avoid "-0.0"
        detail += (
            f"; simulated step times are off by {low:+.1f} to {high:+.1f} %"
            f" ({counted(len(errors), 'point')})"
        )
    return headline, detail


def describe_base(base: Point) -> str:
    """Return a base with its absolute figure, its ranks and its source."""
    return (
        f"{number(base.images_per_s)} {rate_name([base])} on {counted(base.ranks, 'rank')},"
        f" {base.source}"
    )

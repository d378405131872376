"""Points of a scaling study: runs that are alike, their step times, and the figures that follow."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from analysis.io.run_config import read_head, read_section
from analysis.metrics.run_metrics import NS, step_times_s
from analysis.metrics.statistics import Interval, median_draws, median_interval, percentile, percentile_interval
from gems.config.schema import CostConfig, DataConfig, ModelConfig, ParallelConfig, ScheduleConfig
from gems.errors import ConfigError
from gems.trace import SOURCES

DOCUMENTED = ("git_commit", "versions", "created_utc")


@dataclass(frozen=True, slots=True)
class Setting:
    """How the traces of a point's runs were taken; tuples are sorted, without duplicates.

    `missing` are root attributes that a trace lacks, `num_warmup_steps` those that the run with the fewest left out,
    `clock_error_s` is the largest error of a rank's clock against that of rank 0.
    """

    missing: tuple[str, ...] = ()
    commits: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    num_warmup_steps: int = 0
    clock_error_s: float = 0.0

    def with_(self, other: Setting) -> Setting:
        """Return the union of two settings."""
        union = {
            name: tuple(sorted({*getattr(self, name), *getattr(other, name)}))
            for name in ("missing", "commits", "versions")
        }
        fewest = min(self.num_warmup_steps, other.num_warmup_steps)
        return Setting(**union, num_warmup_steps=fewest, clock_error_s=max(self.clock_error_s, other.clock_error_s))


@dataclass(frozen=True, slots=True)
class Point:
    """One place in a scaling study: runs that are alike, their counted steps together.

    Attributes:
        line: the schedule and what bounds it; points of one line are joined.
        micro_batches: of one step and replica.
        images_per_step: over all micro-batches and replicas.
        problem: what an image costs: equal if the same model sees images of the same size.
        work_s: compute time of one image on one rank; None if only the hardware determines it.
        step_s: times of the steps that are not warm-up steps, in the order of the runs.
        num_images: images of all these steps together; None if each has `images_per_step`.
        run_steps: how many of the step times are of each run; empty if all are of one run.
        model: the network's name, depth and version, if costs are those of a network.
        held_out_error: how far predictions with the machine's calibration were off, of 1; None if unknown.
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

    @property
    def step_median_s(self) -> float:
        """Median of the step times."""
        return float(np.median(self.step_s))

    @property
    def step_interval_s(self) -> Interval:
        """Median of the step times with its 95 % interval; with fewer than 6 steps their range."""
        return median_interval(self.step_s)

    @property
    def run_intervals_s(self) -> tuple[Interval, ...]:
        """Median of the step times of each run by itself, with their intervals."""
        ends = accumulate(self.run_steps or (len(self.step_s),), initial=0)
        return tuple(median_interval(self.step_s[start:end]) for start, end in pairwise(ends))

    @property
    def is_deterministic(self) -> bool:
        """Whether all steps would take as long again: simulated without noise they do."""
        return self.source == "simulated" and min(self.step_s) == max(self.step_s)

    @property
    def has_range(self) -> bool:
        """Whether there are too few steps for an interval of steps that differ."""
        return self.step_interval_s.is_range and not self.is_deterministic

    @property
    def step_p95_s(self) -> float:
        """95th percentile of the step times."""
        return percentile(self.step_s, 95)

    @property
    def images_per_s(self) -> float:
        """Images of a step over the median step time."""
        return self.images_per_step / self.step_median_s

    @property
    def images_per_s_interval(self) -> Interval:
        """Images/s with the bounds that follow from those of the step time."""
        step = self.step_interval_s
        low, high = (self.images_per_step / bound for bound in (step.high, step.low))
        return Interval(low, self.images_per_s, high, step.is_range, step.level)

    @property
    def rank_s_per_image(self) -> float:
        """What an image costs, in seconds of one rank."""
        return self.ranks / self.images_per_s

    @property
    def compute_efficiency(self) -> float | None:
        """Useful compute over ranks x step time; None if the compute of an image is unknown."""
        return None if self.work_s is None else self.images_per_s * self.work_s / self.ranks

    def efficiency(self, base: Point) -> float | None:
        """Return the parallel efficiency: work done per rank and time, over that of `base`.

        For one problem that is T(p0) p0 / (T(p) p) in strong scaling and T(p0) / T(p) in weak scaling. If the
        problem grows, an image counts by its compute time, or of one model by its pixels; None for two models.
        """
        share = self.work_beside(base)
        return None if share is None else share * self.images_per_s / self.ranks / (base.images_per_s / base.ranks)

    def efficiency_interval(self, base: Point) -> Interval | None:
        """Return the parallel efficiency with its 95 % interval, both step times being uncertain.

        If one has too few steps for an interval, the bounds are the extremes of both ranges. None without an
        efficiency; for the base itself it is exactly 1.
        """
        value = self.efficiency(base)
        if value is None or self is base:
            return None if value is None else Interval(value, value, value)
        mine, its = self.step_interval_s, base.step_interval_s
        if mine.is_range or its.is_range:
            low = value * min(1.0, its.low / its.value * mine.value / mine.high)
            return Interval(low, value, value * max(1.0, its.high / its.value * mine.value / mine.low), True)
        draws = median_draws(base.step_s, seed=1) / median_draws(self.step_s)
        return percentile_interval(draws * value * mine.value / its.value, value)

    def work_beside(self, base: Point) -> float | None:
        """Return the work of an image over that of an image of `base`; None if unknown."""
        if self.problem == base.problem or (self.work_s is None) != (base.work_s is None):
            return 1.0
        if self.work_s is not None and base.work_s is not None:
            return self.work_s / base.work_s
        (*model, pixels), (*base_model, base_pixels) = self.problem, base.problem
        return float(pixels / base_pixels) if model == base_model else None


def format_error(held_out_error: float) -> str:
    """Return a calibration's error as text."""
    return f"held-out error of step times {100 * held_out_error:.1f} %"


def read_point(path: Path) -> Point:
    """Read one run, its steps and configuration alone.

    Raises:
        ConfigError: no trace there, an unreadable one, one without its configuration, or no step after warm-up.
    """
    head = read_head(path)
    attributes, steps, document = head.attributes, head.steps, head.document
    is_counted = steps["is_warmup"] == 0
    images = steps["images"][is_counted]
    if not len(images):
        raise ConfigError("trace", path, "holds no whole step after warm-up", "raise train.steps")
    parallel, cost = read_section(document, "parallel", ParallelConfig), read_section(document, "cost", CostConfig)
    model, source = read_section(document, "model", ModelConfig), str(attributes["source"])
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
        problem=_problem(model, read_section(document, "data", DataConfig))
        if work_s is None
        else (float(f"{work_s:.9g}"),),
        work_s=work_s,
        step_s=tuple(step_times_s(steps)[is_counted].tolist()),
        signatures=(str(attributes.get("signature", "")),),
        num_images=int(images.sum()),
        setting=_setting(attributes, len(steps) - len(images)),
        run_steps=(len(images),),
        model=_model_name(model) if work_s is None or cost.name == "profile" else "",
        held_out_error=None if (error := attributes.get("held_out_error")) is None else float(error),
    )


def read_points(paths: Iterable[Path]) -> list[Point]:
    """Read runs and return their points by line, ranks and source; runs of one point are pooled.

    If a line has several models, or pipelines of several lengths, on as many ranks, each of them is a line of its own.

    Raises:
        ConfigError: as `read_point`.
    """
    pooled: dict[Point, Point] = {}
    for path in paths:
        read = read_point(path)
        place = replace(read, step_s=(), signatures=(), num_images=None, setting=Setting(), run_steps=())
        known = pooled.get(place)
        pooled[place] = read if known is None else _together(known, read)
    points = _apart(list(pooled.values()), lambda point: point.model, if_alike=False)
    points = _apart(points, lambda point: f"pipelines of {point.partitions}", if_alike=True)
    return sorted(points, key=lambda point: (point.line, point.ranks, SOURCES.index(point.source)))


def _together(point: Point, other: Point) -> Point:
    return replace(
        point,
        step_s=point.step_s + other.step_s,
        signatures=point.signatures + other.signatures,
        num_images=(point.num_images or 0) + (other.num_images or 0),
        setting=point.setting.with_(other.setting),
        run_steps=point.run_steps + other.run_steps,
    )


def _apart(points: Sequence[Point], name: Callable[[Point], str], *, if_alike: bool) -> list[Point]:
    """Add names to the lines in which several points have one place: only if their names differ, or also if alike."""
    places: dict[tuple[str, str, int], list[str]] = {}
    for point in points:
        places.setdefault((point.line, point.source, point.ranks), []).append(name(point))
    lines = {line for (line, *_), names in places.items() if len(names if if_alike else set(names)) > 1}
    return [
        replace(point, line=f"{point.line}, {name(point)}") if point.line in lines and name(point) else point
        for point in points
    ]


def _model_name(model: ModelConfig) -> str:
    """Return a network's name as people write it: resnet-1001-v2."""
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
    seen = ((key, str(value)) for key, value in sorted(asdict(model).items()))  # values may be lists and mappings
    return (*seen, data.channels, data.height_px * data.width_px)

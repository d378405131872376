"""The proposal: what a request for compute time shows of a study, as rows and sentences."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

from analysis.io.run_config import read_head, read_section
from analysis.metrics.statistics import Interval
from analysis.scaling.points import (
    Point,
    base_points,
    describe_base,
    most_real,
    read_point,
    read_points,
)
from analysis.scaling.rules import check_rules
from gems.config.schema import MachineConfig
from gems.errors import ConfigError, one_of
from gems.trace import SOURCES
from gems.utils.units import counted, number

STRONG = "strong"
WEAK = "weak"
HOUR_S = 3600.0
MAX_BASES = 6  # that the method names
Key = Callable[[Point], Fraction]
KINDS: Mapping[str, Key] = {
    STRONG: lambda point: Fraction(point.images_per_step),
    WEAK: lambda point: Fraction(point.images_per_step, point.ranks),
}


@dataclass(frozen=True, slots=True)
class Series:
    """Runs of one schedule and problem on several numbers of ranks: `kind` is strong or weak."""

    kind: str
    points: tuple[Point, ...]

    @property
    def base(self) -> Point:
        """The smallest point, of the most real of several sources."""
        (base,) = base_points(self.points).values()
        return base

    @property
    def name(self) -> str:
        """The schedule, and the images that the series keeps."""
        base = self.base
        images = (
            base.images_per_step
            if self.kind == STRONG
            else float(Fraction(base.images_per_step, base.ranks))
        )
        return f"{_title(base)}, {images:g} images a {'step' if self.kind == STRONG else 'GPU'}"

    def ideal_images_per_s(self, ranks: int) -> float:
        """Return what the base's rate would be in proportion to the ranks."""
        return ranks / self.base.rank_s_per_image


@dataclass(frozen=True, slots=True)
class Ask:
    """What compute time is asked for: runs of some steps on some GPUs.

    Without steps the study once more.
    """

    num_runs: int | None = None
    num_steps: int | None = None
    gpus: int | None = None

    def __post_init__(self) -> None:
        """Check the numbers.

        Raises:
            ConfigError: one below 1, or runs or GPUs without steps.
        """
        for name in self.__slots__:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(name.replace("_", "-"), value, "allowed: a whole number from 1")
            if value is not None and self.num_steps is None:
                raise ConfigError(
                    name.replace("_", "-"), value, "needs the steps of a run", "--num-steps N"
                )


@dataclass(frozen=True, slots=True)
class Proposal:
    """All that the page shows; `request` and `method` are sentences, `missing` a line for each kind without a series.

    `rows` are those of the CSV: a point of a series each. `gpu_hours` has the bounds that follow
    from the step's.
    """

    series: tuple[Series, ...]
    missing: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    gpu_hours: Interval
    request: str
    method: str
    sources: tuple[str, ...]


def propose(paths: Sequence[Path], ask: Ask) -> Proposal:
    """Read runs and return what the page of a proposal shows.

    Raises:
        ConfigError: a run that cannot be read, runs of which no two belong together, or GPUs that
        no point has.
    """
    runs = [(path, read_point(path)) for path in paths]
    series = tuple(made for kind, key in KINDS.items() for made in _series(kind, key, runs))
    if not series:
        fault = (
            f"{counted(len(runs), 'run')} without two of one schedule and problem on different"
            " numbers of ranks"
        )
        raise ConfigError(
            "proposal", fault, "allowed: a strong or a weak series", _next_run(runs, STRONG)
        )
    missing = tuple(
        f"No {kind} scaling in these runs. {_next_run(runs, kind)}"
        for kind in KINDS
        if not any(each.kind == kind for each in series)
    )
    asked = _asked_point(series, ask)
    hours, request = _request([point for _, point in runs], asked, ask)
    rows = tuple(_row(each, point, asked, ask) for each in series for point in each.points)
    sources = tuple(dict.fromkeys(point.source for each in series for point in each.points))
    counted_hours = (
        "of its own counted steps" if asked is None else "that the runs asked for would take there"
    )
    method = f"{_method(paths, series)} A point's GPU-hours are those {counted_hours}."
    return Proposal(series, missing, rows, hours, request, method, sources)


def _series(kind: str, key: Key, runs: Sequence[tuple[Path, Point]]) -> list[Series]:
    """Return the series of a kind.

    Alike runs on two numbers of ranks or more, what ran first, then the largest.
    """
    groups: dict[Hashable, list[Path]] = {}
    for path, point in runs:
        groups.setdefault((point.line, point.model, point.problem, key(point)), []).append(path)
    found = []
    for group in groups.values():
        lines: dict[str, list[Point]] = {}
        for point in read_points(group):
            lines.setdefault(point.line, []).append(point)
        found += [
            Series(kind, tuple(mine))
            for mine in lines.values()
            if len({point.ranks for point in mine}) > 1
        ]
    return sorted(
        found,
        key=lambda each: (
            SOURCES.index(each.base.source),
            -max(point.ranks for point in each.points),
            each.base.line,
            key(each.base),
        ),
    )


def _title(point: Point) -> str:
    """Return the schedule and, if its costs are those of a network, that."""
    return point.line if point.model in point.line else f"{point.line}, {point.model}"


def _next_run(runs: Sequence[tuple[Path, Point]], kind: str) -> str:
    """Return which run would make a series of a kind with the smallest run that there is."""
    point = min(
        (point for _, point in runs), key=lambda point: (point.ranks, point.images_per_step)
    )
    ranks = 2 * point.ranks
    images = point.images_per_step * (1 if kind == STRONG else 2)
    return f"Run {_title(point)} on {ranks} ranks with {images} images a step as well."


def _asked_point(series: Sequence[Series], ask: Ask) -> Point | None:
    """Return the point whose step the request counts.

    The most real that has so many GPUs, by default its most.

    Raises:
        ConfigError: no point has so many GPUs.
    """
    if ask.num_steps is None:
        return None
    ordered = sorted(series, key=lambda each: SOURCES.index(each.base.source))
    gpus = ask.gpus or max(point.ranks for point in ordered[0].points)
    for each in ordered:
        for point in most_real(each.points):
            if point.ranks == gpus:
                return point
    known = sorted({point.ranks for each in series for point in each.points})
    raise ConfigError(
        "gpus",
        gpus,
        one_of(map(str, known)),
        "run a point of this size, or simulate it (machine.kind=simulated)",
    )


def _hours(point: Point, ask: Ask) -> Interval:
    """Return the GPU-hours of the runs asked for at a point.

    Without any those of the point's own steps.
    """
    if ask.num_steps is None:
        own = sum(point.step_s) * point.ranks / HOUR_S
        return Interval(own, own, own)
    return point.step_interval_s.scaled((ask.num_runs or 1) * ask.num_steps * point.ranks / HOUR_S)


def _request(points: Sequence[Point], asked: Point | None, ask: Ask) -> tuple[Interval, str]:
    if asked is None:
        total = sum(_hours(point, ask).value for point in points)
        kinds = " and ".join(dict.fromkeys(point.source for point in points))
        text = (
            f"{number(total)} GPU-hours: the {counted(len(points), 'run')} of this study once more,"
            f" by their {kinds} steps; warm-up, start and checkpoints come on top."
        )
        return Interval(total, total, total), text
    hours = _hours(asked, ask)
    step = asked.step_interval_s
    bounds = "range" if step.is_range else f"{100 * step.level:g} % interval"
    between = (
        ""
        if asked.is_deterministic
        else f" ({number(hours.low)} to {number(hours.high)}, {bounds} of the step)"
    )
    figure = "predicted by simulation" if asked.source == "simulated" else f"{asked.source}, median"
    text = (
        f"{number(hours.value)} GPU-hours{between}: {counted(ask.num_runs or 1, 'run')} of"
        f" {ask.num_steps} steps on {asked.ranks} GPUs, {asked.images_per_step} images and"
        f" {number(step.value)} s a step ({figure}; {_title(asked)}); warm-up, start and"
        " checkpoints come on top."
    )
    return hours, text


def _row(series: Series, point: Point, asked: Point | None, ask: Ask) -> dict[str, Any]:
    base = series.base
    step = point.step_interval_s
    rate = point.images_per_s_interval
    share = point.efficiency_interval(base)
    hours = _hours(point, ask)
    row: dict[str, Any] = {"scaling": series.kind, "series": series.name, "source": point.source}
    names = ("ranks", "partitions", "replicas", "micro_batches", "images_per_step")
    row |= {name: getattr(point, name) for name in names}
    row |= {
        "num_runs": len(point.signatures),
        "num_steps": len(point.step_s),
        "num_warmup_steps": point.setting.num_warmup_steps,
        "bounds": "range" if step.is_range else f"{100 * step.level:g} % interval",
    }
    figures = {
        "step_s": step,
        "images_per_s": rate,
        "parallel_efficiency": share,
        "gpu_hours": hours,
    }
    for name, bounds in figures.items():
        for end, column in (("value", name), ("low", f"{name}_low"), ("high", f"{name}_high")):
            row[column] = None if bounds is None else getattr(bounds, end)
    row["ideal_images_per_s"] = series.ideal_images_per_s(point.ranks)
    row |= {f"base_{name}": getattr(base, name) for name in ("ranks", "source", "images_per_s")}
    row |= {
        "asked_runs": None if asked is None else ask.num_runs or 1,
        "asked_steps": ask.num_steps,
    }
    return row | {"is_asked": point is asked}


def _method(paths: Sequence[Path], series: Sequence[Series]) -> str:
    """Return how the figures were taken, after Hoefler and Belli's rules, and which of these are not kept."""
    points = [point for each in series for point in each.points]
    runs = _span([len(point.signatures) for point in points], "run")
    steps = _span([len(point.step_s) for point in points], "step")
    warmups = _span([point.setting.num_warmup_steps for point in points], "warm-up step")
    bases = [f"{each.name}: {describe_base(each.base)}" for each in series]
    if len(bases) > MAX_BASES:
        bases[MAX_BASES:] = [f"{len(bases) - MAX_BASES} more in the CSV"]
    broken = dict.fromkeys(
        f"{rule.number} ({rule.title})"
        for each in series
        for rule in check_rules(each.points)
        if rule.holds is False
    )
    commits = sorted({commit[:12] for point in points for commit in point.setting.commits})
    versions = sorted({version for point in points for version in point.setting.versions})
    sentences = [
        (
            f"A step ends with its slowest rank. Each figure is the median of {steps} from {runs};"
            f" {warmups} of each run left out. Intervals are 95 % bootstrap intervals of the"
            " median, below 6 steps the range, and assume no distribution; a simulation without"
            " noise has none."
        ),
        "Efficiency is the work of a rank and second over that of the base; one rank is one GPU.",
        f"Bases: {'; '.join(bases)}.",
        _machines(paths),
        (
            f"Software: {', '.join(versions) or 'not recorded'}; commit"
            f" {', '.join(commits) or 'not recorded'}."
        ),
        (
            f"Of the rules of Hoefler and Belli (SC 2015) not kept: {', '.join(broken)}; analysis"
            " scaling says why."
            if broken
            else "The rules of Hoefler and Belli (SC 2015) that can be checked are kept."
        ),
    ]
    return " ".join(sentences)


def _machines(paths: Sequence[Path]) -> str:
    """Return what the runs ran on, a clause for each machine and source."""
    found: dict[tuple[str, str], set[str]] = {}
    origins: dict[tuple[str, str], str] = {}
    for path in paths:
        attributes, _, document = read_head(path)
        machine = read_section(document, "machine", MachineConfig)
        source = str(attributes["source"])
        place = machine.name, source
        found.setdefault(place, set()).update(map(str, attributes.get("hostnames", ())))
        if source == "simulated":
            origins[place] = (
                f", constants from {machine.calibrated_from}" if machine.calibrated_from else ""
            )
    clauses = [
        (
            f"{name}, {source}{origins[name, source]}"
            if source == "simulated"
            else f"{name}, {source} on {counted(len(hosts), 'host')}"
        )
        for (name, source), hosts in found.items()
    ]
    return f"Machine: {'; '.join(clauses)}."


def _span(values: Sequence[int], noun: str) -> str:
    """Return the least and the most of counts as text."""
    low = min(values)
    high = max(values)
    return counted(low, noun) if low == high else f"{low} to {counted(high, noun)}"

"""The part of a proposal for compute time: scaling, GPU-hours and method, from a study."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from analysis.io.run_config import read_head, read_section
from analysis.metrics.statistics import Interval
from analysis.scaling.points import Point, most_real, point_rows, read_point, read_points
from analysis.scaling.rules import check_rules
from gems.config.schema import MachineConfig
from gems.errors import ConfigError, one_of
from gems.trace import SOURCES
from gems.utils.units import counted, number

HOUR_S = 3600.0
# kinds of scaling, with the figure that is constant over the runs of each
KINDS: Mapping[str, Callable[[Point], Fraction]] = {
    "strong": lambda point: Fraction(point.images_per_step),
    "weak": lambda point: Fraction(point.images_per_step, point.ranks),
}


@dataclass(frozen=True, slots=True)
class Ask:
    """The requested compute time: runs of some steps on some GPUs.

    Without steps the request is to run the whole study once more.
    """

    num_runs: int | None = None
    num_steps: int | None = None
    gpus: int | None = None

    def __post_init__(self) -> None:
        """Check that runs and GPUs are given with steps alone.

        Raises:
            ConfigError: They are given without.
        """
        for key, value in (("num-runs", self.num_runs), ("gpus", self.gpus)):
            if value is not None and self.num_steps is None:
                raise ConfigError(key, value, "needs the steps of a run", "--num-steps N")

    def hours(self, point: Point) -> Interval:
        """Return the GPU-hours of the requested runs at a point, or of the point's own steps."""
        if self.num_steps is None:
            own = sum(point.step_s) * point.ranks / HOUR_S
            return Interval(own, own, own)
        steps = (self.num_runs or 1) * self.num_steps
        return point.step_interval_s.scaled(steps * point.ranks / HOUR_S)


@dataclass(frozen=True, slots=True)
class Proposal:
    """The content of the section.

    `points` are grouped by kind of scaling; their lines are named after schedule, network and
    images. `missing` has a sentence for each kind without a series. `rows` are the rows of the CSV.
    """

    points: Mapping[str, Sequence[Point]]
    missing: tuple[str, ...]
    rows: tuple[dict[str, Any], ...]
    gpu_hours: Interval
    request: str
    method: str


def propose(paths: Sequence[Path], ask: Ask) -> Proposal:
    """Read runs and return the content of the section of a proposal.

    Raises:
        ConfigError: A run cannot be read, no two runs belong together, or no point has the
            requested GPUs.
    """
    runs = [(path, read_point(path)) for path in paths]
    found = {kind: _series(kind, runs) for kind in KINDS}
    points = {kind: mine for kind, mine in found.items() if mine}
    alone = [point for _, point in runs]
    if not points:
        fault = f"{counted(len(runs), 'run')} without two of one schedule and problem"
        allowed = "allowed: a strong or a weak series"
        raise ConfigError("proposal", fault, allowed, _next_run(alone, "strong"))
    missing = tuple(
        f"No {kind} scaling in these runs. {_next_run(alone, kind)}"
        for kind in KINDS
        if kind not in points
    )
    asked = _asked_point([point for mine in points.values() for point in mine], ask)
    hours, request = _request(alone, asked, ask)
    rows = []
    for kind, mine in points.items():
        for point, row in zip(mine, point_rows(mine), strict=True):
            own = ask.hours(point)
            row |= {"scaling": kind, "gpu_hours": own.value, "gpu_hours_low": own.low}
            row |= {"gpu_hours_high": own.high, "is_asked": point is asked}
            row |= {"num_runs": len(point.signatures)}
            rows.append(row | {"num_warmup_steps": point.setting.num_warmup_steps})
    return Proposal(points, missing, tuple(rows), hours, request, _method(paths, points))


def _series(kind: str, runs: Sequence[tuple[Path, Point]]) -> list[Point]:
    """Return the points of all series of a kind: similar runs on at least two numbers of ranks."""
    key = KINDS[kind]
    groups: dict[Hashable, list[Path]] = {}
    for path, point in runs:
        groups.setdefault((point.line, point.model, point.problem, key(point)), []).append(path)
    series: dict[str, list[Point]] = {}
    for group in groups.values():
        lines: dict[str, list[Point]] = {}
        for point in read_points(group):
            lines.setdefault(point.line, []).append(point)
        for line in lines.values():
            if len({point.ranks for point in line}) > 1:
                per = "step" if kind == "strong" else "GPU"
                name = f"{_title(line[0])}, {float(key(line[0])):g} images a {per}"
                if name in series:
                    name += f" ({len(series) + 1})"
                series[name] = [replace(point, line=name) for point in line]
    return [point for line in series.values() for point in line]


def _title(point: Point) -> str:
    """Return the schedule and, if the costs are those of a network, the network."""
    return point.line if point.model in point.line else f"{point.line}, {point.model}"


def _next_run(points: Sequence[Point], kind: str) -> str:
    """Return advice for the run that would form a series of a kind with the smallest run."""
    point = min(points, key=lambda point: (point.ranks, point.images_per_step))
    images = point.images_per_step * (1 if kind == "strong" else 2)
    return f"Run {_title(point)} on {2 * point.ranks} ranks with {images} images a step as well."


def _asked_point(points: Sequence[Point], ask: Ask) -> Point | None:
    """Return the point whose step the request counts.

    It is the most real point with the requested GPUs, by default with the most GPUs.

    Raises:
        ConfigError: No point has the requested GPUs.
    """
    if ask.num_steps is None:
        return None
    first = min(points, key=lambda point: SOURCES.index(point.source)).source
    gpus = ask.gpus or max(point.ranks for point in points if point.source == first)
    for point in most_real(points):
        if point.ranks == gpus:
            return point
    known = sorted({point.ranks for point in points})
    advice = "run a point of this size, or simulate it (machine.kind=simulated)"
    raise ConfigError("gpus", gpus, one_of(map(str, known)), advice)


def _request(points: Sequence[Point], asked: Point | None, ask: Ask) -> tuple[Interval, str]:
    extra = "warm-up, start and checkpoints come on top."
    if asked is None:
        total = sum(ask.hours(point).value for point in points)
        kinds = " and ".join(dict.fromkeys(point.source for point in points))
        runs = f"the {counted(len(points), 'run')} of this study once more, by their {kinds} steps"
        return Interval(total, total, total), f"{number(total)} GPU-hours: {runs}; {extra}"
    hours = ask.hours(asked)
    bounds = "range" if hours.is_range else "95 % interval"
    between = f" ({number(hours.low)} to {number(hours.high)}, {bounds} of the step)"
    figure = "predicted by simulation" if asked.source == "simulated" else f"{asked.source}, median"
    step = f"{asked.images_per_step} images and {number(asked.step_median_s)} s a step"
    runs = f"{counted(ask.num_runs or 1, 'run')} of {ask.num_steps} steps on {asked.ranks} GPUs"
    shown = f"{number(hours.value)} GPU-hours{'' if asked.is_deterministic else between}"
    return hours, f"{shown}: {runs}, {step} ({figure}; {asked.line}); {extra}"


def _method(paths: Sequence[Path], by_kind: Mapping[str, Sequence[Point]]) -> str:
    """Describe the method after the rules of Hoefler and Belli, and list the rules not kept."""
    points = [point for line in by_kind.values() for point in line]
    runs = _span([len(point.signatures) for point in points], "run")
    steps = _span([len(point.step_s) for point in points], "step")
    warmups = _span([point.setting.num_warmup_steps for point in points], "warm-up step")
    broken = dict.fromkeys(
        f"{rule.number} ({rule.title})"
        for line in by_kind.values()
        for rule in check_rules(line)
        if rule.holds is False
    )
    commits = sorted({commit[:12] for point in points for commit in point.setting.commits})
    versions = sorted({version for point in points for version in point.setting.versions})
    sentences = [
        f"A step ends with its slowest rank. Each figure is the median of {steps} from {runs};"
        f" {warmups} of each run left out. Intervals are 95 % bootstrap intervals of the median,"
        " below 6 steps the range; a simulation without noise has none.",
        "Efficiency is the work of a rank and second over that of the base, the smallest point of a"
        " line; one rank is one GPU.",
        _machines(paths),
        f"Software: {', '.join(versions) or 'not recorded'}; commit"
        f" {', '.join(commits) or 'not recorded'}.",
        f"Of the rules of Hoefler and Belli (SC 2015) not kept: {', '.join(broken) or 'none'}.",
    ]
    return " ".join(sentences)


def _machines(paths: Sequence[Path]) -> str:
    """Describe the machines of the runs, with a clause for each machine and source."""
    machines: dict[tuple[str, str], set[str]] = {}
    for path in paths:
        attributes, _, document = read_head(path)
        machine = read_section(document, "machine", MachineConfig)
        source = str(attributes["source"])
        if source == "simulated" and machine.calibrated_from:
            source += f", constants from {machine.calibrated_from}"
        hosts = machines.setdefault((machine.name, source), set())
        hosts.update(map(str, attributes.get("hostnames", ())))
    clauses = [
        f"{name}, {source}" + (f" on {counted(len(hosts), 'host')}" if hosts else "")
        for (name, source), hosts in machines.items()
    ]
    return f"Machine: {'; '.join(clauses)}."


def _span(values: Sequence[int], noun: str) -> str:
    """Return the range of counts as text."""
    low = min(values)
    high = max(values)
    return counted(low, noun) if low == high else f"{low} to {counted(high, noun)}"

"""Scaling studies: their bases, their kind, efficiencies over ranks, and predictions beside runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

from analysis.scaling.points import Point, format_error
from gems.trace import SOURCES
from gems.utils.units import counted, number

MAX_JOINED = 4  # times as many ranks


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
        """Relative error of the prediction, positive if the prediction is too slow."""
        return self.simulated_s / self.step_s - 1.0


def base_points(points: Sequence[Point]) -> dict[str, Point]:
    """Return the base of each line: its smallest point, of the most real of several sources."""
    ordered = sorted(points, key=lambda point: (point.ranks, SOURCES.index(point.source)), reverse=True)
    return {point.line: point for point in ordered}


def scaling_kind(points: Sequence[Point]) -> str:
    """Return the kind of a scaling study: strong, weak, capability, comparison or mixed.

    Strong keeps the images of a step, weak those of a rank; in capability scaling the model or its images grow in a
    line; a comparison has one number of ranks.
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
    """Return the images of a step over the ranks, by line: one for each line in weak scaling."""
    return {(point.line, Fraction(point.images_per_step, point.ranks)) for point in points}


def most_real(points: Sequence[Point]) -> list[Point]:
    """Return one point for each number of ranks, measured before emulated before simulated."""
    best: dict[int, Point] = {}
    for point in sorted(points, key=lambda point: (point.ranks, SOURCES.index(point.source))):
        best.setdefault(point.ranks, point)
    return list(best.values())


def neighbours(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Return the pairs of neighbours on each line.

    Each number of ranks counts with its most real point. Pairs too far apart to be joined are included.
    """
    return [
        pair
        for line in dict.fromkeys(point.line for point in points)
        for pair in pairwise(most_real([point for point in points if point.line == line]))
    ]


def may_join(kind: str, point: Point, after: Point) -> bool:
    """Return whether a line may be drawn between neighbours, as an interpolation.

    Not if their ranks differ by more than a factor of four, or if images and ranks change independently.
    """
    return kind != "mixed" and after.ranks <= MAX_JOINED * point.ranks


def agreements(points: Sequence[Point]) -> list[Agreement]:
    """Return every simulated point that has run too, measured or emulated, with both step times."""
    return [
        Agreement(point.line, point.ranks, point.source, point.step_median_s, other.step_median_s)
        for point in points
        for other in points
        if other.source == "simulated" and point.source != "simulated" and _same_work(point, other)
    ]


def point_rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the table of points, with units in the names of its columns; None for an unknown figure."""
    kind, bases = scaling_kind(points), base_points(points)
    rows = []
    for point in points:
        base, step = bases[point.line], point.step_interval_s
        share = point.efficiency_interval(base)
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
                "step_median_s": step.value,
                "step_low_s": step.low,
                "step_high_s": step.high,
                "step_bounds": "range" if step.is_range else f"{100 * step.level:g} % interval",
                "step_min_s": min(point.step_s),
                "step_p95_s": point.step_p95_s,
                "step_max_s": max(point.step_s),
                "images_per_s": point.images_per_s,
                "images_per_s_mean": point.images_per_s_mean,
                "parallel_efficiency": None if share is None else share.value,
                "parallel_efficiency_low": None if share is None else share.low,
                "parallel_efficiency_high": None if share is None else share.high,
                "compute_efficiency": point.compute_efficiency,
                "scaling": kind,
                "base_ranks": base.ranks,
                "base_source": base.source,
                "base_images_per_s": base.images_per_s,
                "signatures": " ".join(point.signatures),
            }
        )
    return rows


def base_rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the base of each line with its absolute figures, as plain data."""
    return [
        {
            "schedule": line,
            "source": base.source,
            "ranks": base.ranks,
            "images_per_s": base.images_per_s,
            "step_median_s": base.step_median_s,
        }
        for line, base in sorted(base_points(points).items())
    ]


def agreement_rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the predictions that can be checked, as plain data."""
    return [{**asdict(found), "error": found.error} for found in agreements(points)]


def title(points: Sequence[Point]) -> tuple[str, str]:
    """Return the headline, which names the kind of scaling, and the line below it."""
    kind, first = scaling_kind(points), points[0]
    kinds = {
        "strong": f"strong scaling, {first.images_per_step} images a step",
        "weak": f"weak scaling, {_list_images(points)} images a rank",
        "capability": "capability scaling, the work of an image grows",
        "comparison": f"schedules on {counted(first.ranks, 'rank')}",
        "mixed": "scaling, images a step and ranks change independently",
    }
    return kinds[kind], _detail(points)


def _list_images(points: Sequence[Point]) -> str:
    return " or ".join(f"{float(images):g}" for images in sorted({images for _, images in images_per_rank(points)}))


def _detail(points: Sequence[Point]) -> str:
    found = agreements(points)
    is_range = any(point.step_interval_s.is_range and not point.is_deterministic for point in points)
    bars = "95 % intervals, below 6 steps the range" if is_range else "95 % intervals"
    detail = f"median step, bars are {bars}, warm-up left out"
    known = [error for point in points if point.source == "simulated" and (error := point.held_out_error) is not None]
    if known:
        detail += f"; {format_error(max(known))}"
    if not found:
        return detail
    low, high = (round(100 * pick(each.error for each in found), 1) + 0.0 for pick in (min, max))  # no "-0.0"
    return f"{detail}; simulated step times are off by {low:+.1f} to {high:+.1f} % ({counted(len(found), 'point')})"


def describe_base(base: Point) -> str:
    """Return a base with its absolute figure, its ranks and its source."""
    return f"{number(base.images_per_s)} images/s on {counted(base.ranks, 'rank')}, {base.source}"


def _same_work(point: Point, other: Point) -> bool:
    def key(of: Point) -> tuple[Any, ...]:
        return of.line, of.partitions, of.replicas, of.micro_batches, of.images_per_step

    return key(point) == key(other) and (point.work_s is None or point.problem == other.problem)

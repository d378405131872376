"""Scaling studies: their bases, their kind, efficiencies over ranks, and predictions beside runs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Any

import numpy as np

from analysis.metrics.statistics import harmonic_mean
from analysis.scaling.points import Point, format_error
from gems.trace import SOURCES
from gems.utils.units import counted, number

MAX_JOINED = 4  # times as many ranks


@dataclass(frozen=True, slots=True)
class Agreement:
    """A simulated point beside the same point of a run; `error` is predicted over observed step time, less 1."""

    line: str
    ranks: int
    source: str
    step_s: float
    simulated_s: float
    error: float


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
        Agreement(
            point.line, point.ranks, point.source, point.step_median_s, other.step_median_s,
            other.step_median_s / point.step_median_s - 1.0,
        )
        for point in points
        for other in points
        if other.source == "simulated" and point.source != "simulated" and _same_work(point, other)
    ]  # fmt: skip


def _same_work(point: Point, other: Point) -> bool:
    names = ("line", "partitions", "replicas", "micro_batches", "images_per_step")
    is_same = all(getattr(point, name) == getattr(other, name) for name in names)
    return is_same and (point.work_s is None or point.problem == other.problem)


def point_rows(points: Sequence[Point]) -> list[dict[str, Any]]:
    """Return the table of points, with units in the names of its columns; None for an unknown figure."""
    kind, bases = scaling_kind(points), base_points(points)
    rows = []
    for point in points:
        base, step = bases[point.line], point.step_interval_s
        share = point.efficiency_interval(base)
        row: dict[str, Any] = {"schedule": point.line}
        for name in ("source", "ranks", "partitions", "replicas", "micro_batches", "images_per_step"):
            row[name] = getattr(point, name)
        row |= {
            "num_steps": len(point.step_s), "step_median_s": step.value, "step_low_s": step.low,
            "step_high_s": step.high, "step_bounds": "range" if step.is_range else f"{100 * step.level:g} % interval",
            "step_min_s": min(point.step_s), "step_p95_s": point.step_p95_s, "step_max_s": max(point.step_s),
            "images_per_s": point.images_per_s,
            "images_per_s_mean": harmonic_mean(point.images_per_step / np.asarray(point.step_s)),
        }  # fmt: skip
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
    images = " or ".join(f"{float(images):g}" for images in sorted({images for _, images in images_per_rank(points)}))
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
    known = [error for point in points if point.source == "simulated" and (error := point.held_out_error) is not None]
    if known:
        detail += f"; {format_error(max(known))}"
    found = [each.error for each in agreements(points)]
    if found:
        low, high = (round(100 * pick(found), 1) + 0.0 for pick in (min, max))  # no "-0.0"
        detail += f"; simulated step times are off by {low:+.1f} to {high:+.1f} % ({counted(len(found), 'point')})"
    return headline, detail


def describe_base(base: Point) -> str:
    """Return a base with its absolute figure, its ranks and its source."""
    return f"{number(base.images_per_s)} images/s on {counted(base.ranks, 'rank')}, {base.source}"

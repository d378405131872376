"""Points of a scaling study: runs that are alike, their step times, and the figures that follow."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import numpy as np

from analysis.metrics.statistics import (
    Interval,
    harmonic_mean,
    median_draws,
    median_interval,
    percentile,
    percentile_interval,
)


@dataclass(frozen=True, slots=True)
class Setting:
    """How the traces of a point's runs were taken; tuples are sorted, without duplicates.

    Attributes:
        missing: root attributes that a trace lacks.
        commits: of the code.
        versions: of the libraries.
        num_warmup_steps: steps that the run with the fewest of them left out.
        clock_error_s: the largest error of a rank's clock against that of rank 0.
    """

    missing: tuple[str, ...] = ()
    commits: tuple[str, ...] = ()
    versions: tuple[str, ...] = ()
    num_warmup_steps: int = 0
    clock_error_s: float = 0.0

    def with_(self, other: Setting) -> Setting:
        """Return the union of two settings."""
        return Setting(
            missing=_union(self.missing, other.missing),
            commits=_union(self.commits, other.commits),
            versions=_union(self.versions, other.versions),
            num_warmup_steps=min(self.num_warmup_steps, other.num_warmup_steps),
            clock_error_s=max(self.clock_error_s, other.clock_error_s),
        )


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
        work_s: compute time of one image on one rank; None if only the hardware determines it.
        step_s: times of the steps that are not warm-up steps, in the order of the runs.
        signatures: of the runs.
        num_images: images of all these steps together; None if each has `images_per_step`.
        setting: how the runs were taken.
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
        ends = list(accumulate(self.run_steps or (len(self.step_s),)))
        starts = [0, *ends[:-1]]
        return tuple(median_interval(self.step_s[start:end]) for start, end in zip(starts, ends, strict=True))

    @property
    def is_deterministic(self) -> bool:
        """Whether all steps would take as long again: simulated without noise they do."""
        return self.source == "simulated" and min(self.step_s) == max(self.step_s)

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
    def images_per_s_mean(self) -> float:
        """Harmonic mean of the steps' images/s: all images over all time."""
        return harmonic_mean(self.images_per_step / np.asarray(self.step_s))

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

        If one has too few steps for an interval, the bounds are the extremes of both ranges. None without an efficiency;
        for the base itself it is exactly 1.
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


def _union(texts: Iterable[str], more: Iterable[str]) -> tuple[str, ...]:
    return tuple(sorted({*texts, *more}))


def format_error(held_out_error: float) -> str:
    """Return a calibration's error as text."""
    return f"held-out error of step times {100 * held_out_error:.1f} %"

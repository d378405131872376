"""The points that a law is fitted to: one line of a study, of one source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from analysis.metrics.statistics import median_draws
from analysis.scaling.efficiency import base_points, scaling_kind
from analysis.scaling.points import Point
from gems.trace import SOURCES

FEWEST_POINTS = 3
NUM_DRAWS = 1000


@dataclass(frozen=True, slots=True)
class Series:
    """What an image costs over ranks. A prediction is never mixed with what ran.

    Attributes:
        line: the line of the study.
        source: of all points.
        ranks: shape (num_points,), rising.
        rank_s_per_image: what an image of the base costs, in seconds of one rank, shape (num_points,).
        deviations: how far the medians of resampled steps lie from the medians, as logarithms of their ratio; shape
            (num_draws, num_points), 0 where steps are all alike.
    """

    line: str
    source: str
    ranks: np.ndarray
    rank_s_per_image: np.ndarray
    deviations: np.ndarray

    @property
    def num_ranks(self) -> int:
        """How many different numbers of ranks there are."""
        return len(np.unique(self.ranks))


def make_series(points: Sequence[Point]) -> list[Series]:
    """Return a series for each line that has three numbers of ranks of one source, of the most real such source.

    A comparison and a study in which images and ranks change apart have none: there what an image costs is no
    function of the ranks. Points whose work cannot be held against that of the base are left out.
    """
    if scaling_kind(points) in ("comparison", "mixed"):
        return []
    found = []
    for line, base in sorted(base_points(points).items()):
        of_sources = [_series(line, source, base, points) for source in SOURCES]
        enough = [series for series in of_sources if series.num_ranks >= FEWEST_POINTS]
        found += enough[:1]
    return found


def _series(line: str, source: str, base: Point, points: Sequence[Point]) -> Series:
    shares = {
        point: share
        for point in sorted(points, key=lambda point: point.ranks)
        if (point.line, point.source) == (line, source) and (share := point.work_beside(base)) is not None
    }
    return Series(
        line,
        source,
        np.array([point.ranks for point in shares], dtype=float),
        np.array([point.rank_s_per_image / share for point, share in shares.items()]),
        np.stack([_deviations(point, seed) for seed, point in enumerate(shares)], axis=1)
        if shares
        else np.empty((NUM_DRAWS, 0)),
    )


def _deviations(point: Point, seed: int) -> np.ndarray:
    if min(point.step_s) == max(point.step_s):
        return np.zeros(NUM_DRAWS)
    drawn: np.ndarray = np.log(median_draws(point.step_s, NUM_DRAWS, seed) / point.step_median_s)
    return drawn

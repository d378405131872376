"""The law of scaling: planted ones are found again, and forecasts beyond the data have an interval that grows."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from analysis.scaling.fits import (
    curve_ranks,
    curve_rows,
    fit_lines,
    fit_points,
    fit_rows,
    why_not_fitted,
)
from analysis.scaling.law import Row, fit_law
from analysis.scaling.points import Point
from tests.helpers.planted import noisy, point

RANKS = (1, 2, 4, 8, 16, 32, 64)


def planted(ranks: int, samples: float) -> float:
    return 0.02 + 0.01 * samples + 0.004 * math.log2(ranks)


def rows(*ranks: int, batch: int | None = None) -> list[Row]:
    """Strong scaling of a batch, or weak scaling of 16 samples a rank."""
    batches = [batch or 16 * count for count in ranks]
    return [
        Row(count, size, planted(count, size / count))
        for count, size in zip(ranks, batches, strict=True)
    ]


def weak(*ranks: int, growth: float = 0.03, **fields: object) -> list[Point]:
    """Points whose step of 1 s grows by a part with each doubling."""
    return [point(count, noisy(1.0 + growth * math.log2(count)), **fields) for count in ranks]


def test_a_planted_law_is_found() -> None:
    law = fit_law([*rows(*RANKS, batch=256), *rows(*RANKS)])
    assert law.parameters == pytest.approx(
        {"fixed_s": 0.02, "s_per_sample": 0.01, "s_per_doubling": 0.004}, rel=0.02
    )
    for ranks, samples in ((128, 16), (256, 1), (64, 64)):
        assert law.step_s(ranks, samples).value == pytest.approx(planted(ranks, samples), rel=0.01)


@pytest.mark.parametrize("batch", [None, 1024])
def test_few_rows_foresee_four_times_the_ranks(batch: int | None) -> None:
    law = fit_law(rows(1, 2, 4, 8, batch=batch))
    samples = 16 if batch is None else batch / 32
    step = law.step_s(32, samples)
    assert step.low < planted(32, samples) < step.high
    assert not law.is_reliable(33, samples) and (law.last_ranks, law.limit_ranks) == (8, 32)


def test_an_interval_grows_with_the_ranks_and_with_errors_of_forecasts() -> None:
    law = fit_law(rows(1, 2, 4, 8))
    widths = [law.step_s(ranks, 16).relative_half_width for ranks in (16, 32, 128, 512)]
    assert law.is_reliable(16, 16) and widths == sorted(widths) and widths[-1] > 2 * widths[0]
    bent = [
        Row(row.accelerators, row.global_batch, row.step_s * 1.5 ** (row.accelerators > 4))
        for row in rows(*RANKS)
    ]
    assert (
        fit_law(bent).deviation > 1.2 * fit_law(rows(*RANKS)).deviation
        and fit_law(bent).num_forecasts == 11
    )


def test_steps_that_fall_have_no_part_below_zero() -> None:
    law = fit_law([Row(ranks, 16 * ranks, 1.0 / ranks) for ranks in RANKS])
    assert min(law.parameters.values()) >= 0.0


def test_one_row_alone_stands_on_the_priors() -> None:
    law = fit_law(rows(8))
    assert law.num_forecasts == 0 and law.step_s(8, 16).value == pytest.approx(
        planted(8, 16), rel=0.02
    )
    assert law.step_s(16, 16).value == pytest.approx(1.02 * planted(8, 16), rel=0.02)


@pytest.mark.parametrize("images", [None, 64])
def test_a_study_is_fitted_in_weak_and_in_strong_scaling(images: int | None) -> None:
    points = [
        point(
            count,
            (planted(count, (images or 4 * count) / count),) * 8,
            images_per_step=images or 4 * count,
        )
        for count in RANKS[:5]
    ]
    (fit,) = fit_points(points)
    assert fit.samples(64) == pytest.approx(4 if images is None else 1)
    assert fit.step_s(64).value == pytest.approx(planted(64, fit.samples(64)), rel=0.03)
    rate = fit.images_per_s(64)
    assert rate.value == pytest.approx(64 * fit.samples(64) / fit.step_s(64).value)
    assert rate.low < rate.value < rate.high


def test_larger_images_count_by_their_work() -> None:
    grown = [
        point(count, (1.0,) * 8, images_per_step=4, problem=("resnet", 3, 1024 * count))
        for count in (1, 2, 4)
    ]
    (fit,) = fit_points([*grown, point(8, problem=("vgg", 3, 1024))])
    assert [(row.accelerators, row.samples) for row in fit.law.rows] == [
        (1, 4.0),
        (2, 4.0),
        (4, 4.0),
    ]


def test_what_ran_is_not_mixed_with_what_was_predicted() -> None:
    simulated = weak(1, 2, 4, 8, 16, 32, source="simulated")
    (fit,) = fit_points([*weak(1, 2), *simulated])
    assert (fit.source, fit.law.last_ranks) == ("simulated", 32)
    (fit,) = fit_points([*weak(1, 2, 4), *simulated])
    assert (fit.source, fit.law.limit_ranks) == ("measured", 16)


def test_comparisons_and_studies_that_mix_have_no_fits() -> None:
    comparison = [point(4), point(4, line="gpipe")]
    assert fit_points(comparison) == why_not_fitted(comparison, []) == []
    assert fit_points([point(1), point(2, images_per_step=9), point(4, images_per_step=11)]) == []
    (reason,) = why_not_fitted([point(1), point(2)], fit_points([point(1), point(2)]))
    assert "3 numbers of ranks" in reason


def test_fits_are_plain_data_lines_and_curves() -> None:
    fits = fit_points(weak(1, 2, 4, 8))
    (row,) = json.loads(json.dumps(fit_rows(fits), allow_nan=False))
    assert (
        row["parameters"]["s_per_doubling"] == pytest.approx(0.03, rel=0.3)
        and row["limit_ranks"] == 32
    )
    assert [residual["ranks"] for residual in row["residuals"]] == [1, 2, 4, 8]
    assert [asked["ranks"] for asked in row["extrapolation"]] == [16, 32]
    (line,) = fit_lines(fits)
    assert line.startswith("law of 1f1b: fixed_s ") and "1 to 8 ranks, drawn to 32" in line
    ranks = curve_ranks(fits[0])
    curve = curve_rows(fits)
    assert (ranks[0], ranks[-1]) == (1.0, 32.0) and 8.0 in ranks and (np.diff(ranks) > 0).all()
    assert all((each["ranks"] > 8.0) == bool(each["is_extrapolated"]) for each in curve)
    assert curve[-1]["step_s_low"] < curve[-1]["step_s"] < curve[-1]["step_s_high"]

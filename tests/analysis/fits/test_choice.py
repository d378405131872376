"""Which points a law is fitted to, which laws are fitted, and which fit is the best."""

from __future__ import annotations

import json

import numpy as np
import pytest

from analysis.scaling.fits import (
    best_fits,
    curve_ranks,
    curve_rows,
    fit_laws,
    fit_lines,
    fit_rows,
    make_series,
    why_not_fitted,
)
from analysis.scaling.points import Point
from gems.errors import ConfigError
from tests.analysis.planted import RANKS, noisy, point


def weak(*ranks: int, serial: float = 0.01, **fields: object) -> list[Point]:
    """Points of Amdahl's law: a step of 1 s on one rank."""
    return [point(count, noisy(1.0 + serial * (count - 1)), **fields) for count in ranks]


def test_an_image_costs_its_share_of_a_ranks_time_in_strong_and_weak_scaling() -> None:
    (found,) = make_series(weak(1, 2, 4, serial=0.0))
    assert found.rank_s_per_image == pytest.approx([0.25] * 3, rel=0.01)
    strong = [point(count, (2.0 / count,) * 8, images_per_step=16) for count in (1, 2, 4)]
    (found,) = make_series(strong)
    assert found.rank_s_per_image == pytest.approx([2.0 / 16] * 3)
    assert (found.deviations == 0.0).all()


def test_larger_images_count_by_their_work() -> None:
    grown = [
        point(count, (1.0,) * 8, images_per_step=4, problem=("resnet", 3, 1024 * count))
        for count in (1, 2, 4)
    ]
    (found,) = make_series(grown)
    assert found.rank_s_per_image == pytest.approx([0.25] * 3)
    other_model = point(8, problem=("vgg", 3, 1024))
    (found,) = make_series([*grown, other_model])
    assert found.ranks.tolist() == [1.0, 2.0, 4.0]


def test_what_ran_is_not_mixed_with_what_was_predicted() -> None:
    simulated = weak(1, 2, 4, 8, 16, 32, source="simulated")
    (found,) = make_series([*weak(1, 2), *simulated])
    assert (found.source, found.num_ranks) == ("simulated", 6)
    (found,) = make_series([*weak(1, 2, 4), *simulated])
    assert (found.source, found.ranks.tolist()) == ("measured", [1.0, 2.0, 4.0])
    fits = fit_laws([*weak(1, 2, 4), *simulated])
    assert {fit.law for fit in fits} == {"amdahl", "gustafson"} and {
        fit.limit_ranks for fit in fits
    } == {16}


def test_comparisons_and_studies_that_mix_have_no_fits() -> None:
    comparison = [point(4), point(4, line="gpipe")]
    assert fit_laws(comparison) == why_not_fitted(comparison) == []
    with pytest.raises(ConfigError, match="fit=usl: a fit needs points on 3 numbers of ranks"):
        fit_laws(comparison, "usl")
    assert fit_laws([point(1), point(2, images_per_step=9), point(4, images_per_step=11)]) == []
    assert "needs points on 3 numbers of ranks" in why_not_fitted([point(1), point(2)])[0]
    assert why_not_fitted([point(1), point(2)], "none") == []


def test_the_best_fit_misses_left_out_points_least_and_is_the_simpler_of_equals() -> None:
    points = [*weak(*RANKS, serial=0.02), *weak(*RANKS, serial=0.001, line="gpipe")]
    fits = fit_laws(points)
    assert [fit.line for fit in fits] == ["1f1b"] * 4 + ["gpipe"] * 4
    best = best_fits(fits)
    assert best["1f1b"].law == "amdahl" and best["1f1b"] is fits[0]
    assert fits[3].error > fits[0].error
    exact = best_fits(fit_laws([point(count, (1.0 + 0.02 * count,) * 8) for count in RANKS]))[
        "1f1b"
    ]
    assert exact.law == "amdahl"
    bent = best_fits(fit_laws([point(count, (1.0 + 0.001 * count**2,) * 8) for count in RANKS]))[
        "1f1b"
    ]
    assert bent.law in ("usl", "pmnf")


def test_one_law_alone_none_and_a_wrong_one() -> None:
    points = weak(1, 2, 4, 8)
    assert {fit.law for fit in fit_laws(points, "usl")} == {"usl"}
    assert fit_laws(points, "none") == []
    assert why_not_fitted(points) == [
        "pmnf needs points on 5 numbers of ranks of one source; the most on a line are 4"
    ]
    with pytest.raises(ConfigError, match="fit=pmnf: pmnf needs points on 5"):
        fit_laws(points, "pmnf")
    with pytest.raises(ConfigError, match=r"fit=linear: allowed: .*amdahl"):
        fit_laws(points, "linear")


def test_fits_are_plain_data_and_lines() -> None:
    fits = fit_laws(weak(1, 2, 4, 8))
    rows = json.loads(json.dumps(fit_rows(fits), allow_nan=False))
    assert [row["is_best"] for row in rows] == [True, False, False]
    assert set(rows[0]) >= {
        "name",
        "parameters",
        "intervals",
        "residuals",
        "error",
        "limit_ranks",
        "r2",
        "formula",
    }
    low, high = rows[0]["intervals"]["serial_fraction"]
    assert low <= 0.01 <= high and rows[0]["limit_ranks"] == 32
    assert [residual["ranks"] for residual in rows[0]["residuals"]] == [1, 2, 4, 8]
    assert [asked["ranks"] for asked in rows[0]["extrapolation"]] == [16, 32]
    usl = next(row for row in rows if row["name"] == "usl")
    assert usl["intervals"]["peak_ranks"][1] is None  # no peak is a possibility here
    best, others = fit_lines(fits)
    assert best.startswith("best fit of 1f1b: amdahl, rank_s_per_image 0.2") and "beyond 32" in best
    assert "usl by" in others and "gustafson by" in others


def test_a_curve_ends_at_four_times_the_data_and_says_where_it_extrapolates() -> None:
    (fit,) = fit_laws(weak(1, 2, 4), "amdahl")
    ranks = curve_ranks(fit)
    assert (ranks[0], ranks[-1]) == (1.0, 16.0) and 4.0 in ranks and (np.diff(ranks) > 0).all()
    rows = curve_rows([fit])
    assert all((row["ranks"] > 4.0) == bool(row["is_extrapolated"]) for row in rows)
    assert rows[-1]["images_per_s"] == pytest.approx(16 / fit.cost_s(16).value)
    assert (
        rows[-1]["rank_s_per_image_low"]
        < rows[-1]["rank_s_per_image"]
        < rows[-1]["rank_s_per_image_high"]
    )

"""Laws of scaling: planted ones are found again, with intervals that hold them."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.optimize import nnls

from analysis.scaling.fits import fit_law
from analysis.scaling.laws import LAWS, TERM_NAMES, choose_terms, fit_columns
from gems.errors import ConfigError
from tests.analysis.planted import RANKS, series

P = np.array(RANKS, dtype=float)
PLANTED: dict[str, tuple[np.ndarray, dict[str, float]]] = {
    "amdahl": (0.5 * (1 + 0.03 * (P - 1)), {"rank_s_per_image": 0.5, "serial_fraction": 0.03}),
    "gustafson": (0.5 * P / (P - 0.2 * (P - 1)), {"rank_s_per_image": 0.5, "serial_fraction": 0.2}),
    "usl": (
        0.5 * (1 + 0.03 * (P - 1) + 0.0005 * P * (P - 1)),
        {
            "rank_s_per_image": 0.5,
            "sigma": 0.03,
            "kappa": 0.0005,
            "peak_ranks": (0.97 / 0.0005) ** 0.5,
        },
    ),
    "pmnf": (0.5 + 0.01 * P**0.5 * np.log2(P), {"constant": 0.5, "p^(1/2) log2(p)": 0.01}),
}


@pytest.mark.parametrize("law", PLANTED)
def test_a_law_without_noise_is_found_exactly(law: str) -> None:
    costs_s, expected = PLANTED[law]
    fit = fit_law(LAWS[law], series(costs_s))
    assert {name: bounds.value for name, bounds in fit.parameters.items()} == pytest.approx(
        expected, rel=1e-6
    )
    assert max(abs(residual.relative) for residual in fit.residuals) < 1e-9
    assert fit.error < 1e-6 and fit.r2 == pytest.approx(1.0)
    assert fit.cost_s(64).value == pytest.approx(costs_s[-1])
    assert [residual.ranks for residual in fit.residuals] == list(RANKS)


@pytest.mark.parametrize(("noise", "num_steps"), [(0.02, 1), (0.05, 12)])
@pytest.mark.parametrize("law", ["amdahl", "gustafson", "usl"])
def test_intervals_hold_planted_parameters_under_noise(
    law: str, noise: float, num_steps: int
) -> None:
    """Of 30 studies about 28 should.

    Half of the parameters' error may come from the steps, or all from the runs.
    """
    costs_s, expected = PLANTED[law]
    held = {name: 0 for name in expected}
    for seed in range(30):
        found = fit_law(LAWS[law], series(costs_s, noise, num_steps, seed), seed).parameters
        for name, value in expected.items():
            held[name] += found[name].low <= value <= found[name].high
    assert min(held.values()) >= 25, held


def test_the_normal_form_predicts_where_it_cannot_tell_terms_apart() -> None:
    costs_s, _ = PLANTED["pmnf"]
    asked = 4 * RANKS[-1]
    truth = 0.5 + 0.01 * asked**0.5 * np.log2(asked)
    held = []
    for seed in range(6):
        bounds = fit_law(LAWS["pmnf"], series(costs_s, 0.01, 20, seed), seed).cost_s(asked)
        held.append(bounds.low <= truth <= bounds.high)
        assert bounds.value == pytest.approx(truth, rel=0.15)
    assert sum(held) >= 5


def test_two_terms_are_found_where_there_are_two_and_none_where_there_is_nothing() -> None:
    ranks = 2.0 ** np.arange(10)
    two = 1.0 + 0.2 * np.log2(ranks) + 1e-4 * ranks**1.5
    (found,) = choose_terms(ranks, 1.0 / two, two[None])
    assert {TERM_NAMES[term] for term in np.flatnonzero(found)} == {"", "log2(p)", "p^(3/2)"}
    (found,) = choose_terms(
        ranks[::2], 1.0 / two[::2], two[None, ::2]
    )  # five points do not bear two terms
    assert np.count_nonzero(found[1:]) == 1
    flat = np.exp(0.02 * np.random.default_rng(1).standard_normal((20, 10)))
    chosen = choose_terms(ranks, np.ones(10), flat)
    assert np.mean((chosen[:, 1:] > 0).any(axis=1)) < 0.5
    assert (chosen >= 0).all() and ((chosen[:, 1:] > 0).sum(axis=1) <= 2).all()


def test_columns_are_fitted_as_non_negative_least_squares() -> None:
    rng = np.random.default_rng(2)
    subsets = [
        tuple(np.flatnonzero([a, b, c]))
        for a in (0, 1)
        for b in (0, 1)
        for c in (0, 1)
        if a + b + c
    ]
    for _ in range(50):
        design = rng.normal(size=(8, 3))
        design[:, 0] = rng.uniform(0.5, 1.0, 8)
        target = rng.uniform(0.5, 2.0, 8)
        expected, _ = nnls(design, target)
        assert fit_columns(design, subsets, target[None])[0] == pytest.approx(expected, abs=1e-9)


def test_a_peak_that_never_comes_has_no_end() -> None:
    costs_s, _ = PLANTED["amdahl"]
    peak = fit_law(LAWS["usl"], series(costs_s)).parameters["peak_ranks"]
    assert peak.value > 1e5 and peak.high > 1e5


def test_costs_that_fall_are_no_less_than_constant() -> None:
    """More ranks than ideal would explain.

    No law here has a negative loss, and the residuals show it.
    """
    fit = fit_law(LAWS["usl"], series(1.0 / np.sqrt(P)))
    assert fit.parameters["sigma"].value == fit.parameters["kappa"].value == 0.0
    assert max(residual.relative for residual in fit.residuals) > 0.5 and fit.r2 == pytest.approx(
        0.0, abs=1e-9
    )


@pytest.mark.parametrize("law", LAWS)
def test_a_law_is_asked_within_its_data_and_four_times_beyond(law: str) -> None:
    fit = fit_law(LAWS[law], series(PLANTED["amdahl"][0], 0.01, 10))
    inside = fit.cost_s(64)
    edge = fit.cost_s(256)
    assert edge.low < edge.value < edge.high
    assert edge.high / edge.low > inside.high / inside.low  # the band opens
    assert (fit.first_ranks, fit.last_ranks, fit.limit_ranks) == (1, 64, 256)
    for ranks in (257, 0.5):
        with pytest.raises(ConfigError, match="allowed: 1 to 256"):
            fit.cost_s(ranks)
    with pytest.raises(ConfigError, match="is not valid beyond 4 times"):
        fit.curve([64, 256, 1024])


@pytest.mark.parametrize(
    ("law", "fewest"), [("amdahl", 3), ("gustafson", 3), ("usl", 4), ("pmnf", 5)]
)
def test_a_law_needs_more_points_than_it_has_parameters(law: str, fewest: int) -> None:
    costs_s = PLANTED[law][0]
    assert fit_law(LAWS[law], series(costs_s[:fewest], ranks=RANKS[:fewest])).error < 0.01
    with pytest.raises(ConfigError, match=f"needs points on {fewest} numbers of ranks"):
        fit_law(LAWS[law], series(costs_s[: fewest - 1], ranks=RANKS[: fewest - 1]))


def test_few_points_leave_more_open_than_many() -> None:
    costs_s = PLANTED["amdahl"][0]
    few = fit_law(LAWS["amdahl"], series(costs_s[-3:], 0.02, 1, 3, RANKS[-3:])).parameters[
        "serial_fraction"
    ]
    many = fit_law(LAWS["amdahl"], series(costs_s, 0.02, 1, 3)).parameters["serial_fraction"]
    assert few.high - few.low > 2 * (many.high - many.low)

"""Laws of scaling: what an image costs, in seconds of one rank, on p ranks.

All laws are fitted to one figure, y(p) = p T(p) / images, so that strong and weak scaling, and different laws,
are judged alike. It is a time, not a ratio of times. On p ranks that lose nothing it is as large as on one. The
fit is by relative least squares: an error of 1 % counts as much on 4 ranks as on 1024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from analysis.scaling.fits.normal_form import COLUMNS as PMNF_COLUMNS
from analysis.scaling.fits.normal_form import Subset, choose_terms, count_terms, fit_columns, term_values

Parameters = Mapping[str, np.ndarray]


@dataclass(frozen=True, slots=True)
class Law:
    """A law that can be fitted and evaluated.

    Attributes:
        name: of the law.
        formula: y in terms of its parameters.
        min_points: numbers of ranks that a fit needs: one more than it has parameters, five for the normal form.
        solve: returns coefficients, shape (num_fits, num_coefficients), for ranks (num_points,), weights (num_points,)
        and
            values y (num_fits, num_points).
        predict: returns y, shape (num_fits, num_ranks), for coefficients and ranks (num_ranks,).
        parameters: returns the named parameters, each (num_fits,), of coefficients; the first row is the fit itself
            and determines which there are.
        num_fitted: returns the number of parameters that one row of coefficients has used.
    """

    name: str
    formula: str
    min_points: int
    solve: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    predict: Callable[[np.ndarray, np.ndarray], np.ndarray]
    parameters: Callable[[np.ndarray], Parameters]
    num_fitted: Callable[[np.ndarray], int]


def _subsets(count: int) -> list[Subset]:
    return [chosen for size in range(1, count + 1) for chosen in combinations(range(count), size)]


def _usl_design(ranks: np.ndarray) -> np.ndarray:
    """Return 1, p and p (p - 1): with non-negative coefficients, sigma is in 0..1 and kappa is not below 0."""
    return np.stack([np.ones_like(ranks), ranks, ranks * (ranks - 1.0)], axis=1)


def _amdahl_design(ranks: np.ndarray) -> np.ndarray:
    return _usl_design(ranks)[:, :2]


def _linear(
    design_of: Callable[[np.ndarray], np.ndarray], count: int
) -> tuple[Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray], Callable[[np.ndarray, np.ndarray], np.ndarray]]:
    """Return `solve` and `predict` of a law that is linear in coefficients which are not negative."""

    def solve(ranks: np.ndarray, weights: np.ndarray, values: np.ndarray) -> np.ndarray:
        return fit_columns(design_of(ranks) * weights[:, None], _subsets(count), values * weights)

    def predict(coefficients: np.ndarray, ranks: np.ndarray) -> np.ndarray:
        predicted: np.ndarray = coefficients @ design_of(ranks).T
        return predicted

    return solve, predict


def _amdahl_parameters(coefficients: np.ndarray) -> Parameters:
    parallel, serial = coefficients.T
    return {"rank_s_per_image": parallel + serial, "serial_fraction": serial / (parallel + serial)}


def _usl_parameters(coefficients: np.ndarray) -> Parameters:
    parallel, contended, coherent = coefficients.T
    whole = np.maximum(
        parallel + contended, 1e-12 * coherent
    )  # nothing but coherence: far from one rank it may seem so
    sigma, kappa = contended / whole, coherent / whole
    with np.errstate(divide="ignore", invalid="ignore"):
        peak = np.where(kappa > 0.0, np.sqrt(np.maximum(1.0 - sigma, 0.0) / kappa), np.inf)
    return {"rank_s_per_image": whole, "sigma": sigma, "kappa": kappa, "peak_ranks": peak}


def _gustafson_solve(ranks: np.ndarray, weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Search the serial fraction by finer and finer grids; the time of an image is linear and follows from it."""
    targets = values * weights
    low, high = np.zeros(len(values)), np.ones(len(values))
    steps = np.linspace(0.0, 1.0, 21)
    for _ in range(10):
        fractions = low[:, None] + (high - low)[:, None] * steps
        shape = _gustafson_shape(fractions[..., None], ranks) * weights  # (fits, steps, points)
        whole = (shape * targets[:, None]).sum(axis=2) / (shape**2).sum(axis=2)
        missed = ((whole[..., None] * shape - targets[:, None]) ** 2).sum(axis=2)
        best = np.take_along_axis(fractions, missed.argmin(axis=1)[:, None], axis=1)[:, 0]
        width = (high - low) / 20.0
        low, high = np.maximum(best - width, 0.0), np.minimum(best + width, 1.0)
    shape = _gustafson_shape(best[:, None], ranks) * weights
    return np.stack([(shape * targets).sum(axis=1) / (shape**2).sum(axis=1), best], axis=1)


def _gustafson_shape(fractions: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    shape: np.ndarray = ranks / (ranks - fractions * (ranks - 1.0))
    return shape


def _gustafson_predict(coefficients: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    predicted: np.ndarray = coefficients[:, :1] * _gustafson_shape(coefficients[:, 1:], ranks)
    return predicted


def _pmnf_parameters(coefficients: np.ndarray) -> Parameters:
    shown = {"constant": coefficients[:, 0]}
    return shown | {
        PMNF_COLUMNS[place].name: coefficients[:, place] for place in np.flatnonzero(coefficients[0]) if place
    }


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "amdahl", "y = rank_s_per_image (1 + serial_fraction (p - 1))", 3, *_linear(_amdahl_design, 2),
            _amdahl_parameters, lambda _: 2,
        ),
        Law(
            "gustafson", "y = rank_s_per_image p / (p - serial_fraction (p - 1))", 3, _gustafson_solve,
            _gustafson_predict,
            lambda found: {"rank_s_per_image": found[:, 0], "serial_fraction": found[:, 1]}, lambda _: 2,
        ),
        Law(
            "usl", "y = rank_s_per_image (1 + sigma (p - 1) + kappa p (p - 1))", 4, *_linear(_usl_design, 3),
            _usl_parameters, lambda _: 3,
        ),
        Law(
            "pmnf", "y = constant + sum of at most 2 terms c p^i log2(p)^j", 5, choose_terms, term_values,
            _pmnf_parameters,
            lambda found: 1 + 2 * count_terms(found),
        ),
    )
}  # fmt: skip

"""Laws of scaling: what an image costs, in seconds of one rank, on p ranks.

Amdahl 1967; Gustafson 1988; Gunther 1993 and 2007 (universal scalability law); Calotoiu et al., SC
2013, section 3 (performance-model normal form). All are fitted to one figure, y(p) = p T(p) /
images, so that strong and weak scaling, and different laws, are judged alike. It is a time, not a
ratio of times. On p ranks that lose nothing it is as large as on one. The fit is by relative least
squares: an error of 1 % counts as much on 4 ranks as on 1024.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations, product

import numpy as np

Subset = tuple[int, ...]
Parameters = Mapping[str, np.ndarray]
_TINY = 1e-12
_AT_ONCE = 64  # subsets, so that the arrays stay small


@dataclass(frozen=True, slots=True)
class Law:
    """A law that can be fitted and evaluated.

    Attributes:
        formula: y in terms of its parameters.
        min_points: numbers of ranks that a fit needs: one more than it has parameters, five for the
            normal form.
        solve: returns coefficients, shape (num_fits, num_coefficients), for ranks (num_points,),
            weights (num_points,) and values y (num_fits, num_points).
        predict: returns y, shape (num_fits, num_ranks), for coefficients and ranks (num_ranks,).
        parameters: returns the named parameters, each (num_fits,), of coefficients; the first row
            is the fit itself and determines which there are.
        num_fitted: returns the number of parameters that one row of coefficients has used.
    """

    name: str
    formula: str
    min_points: int
    solve: Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]
    predict: Callable[[np.ndarray, np.ndarray], np.ndarray]
    parameters: Callable[[np.ndarray], Parameters]
    num_fitted: Callable[[np.ndarray], int]


def fit_columns(
    design: np.ndarray,
    subsets: Sequence[Subset],
    targets: np.ndarray,
    handicaps: Sequence[float] = (),
) -> np.ndarray:
    """Return coefficients, none negative, of the subset of columns that leaves the smallest squares.

    With all subsets this is the solution of the non-negative least squares: one of its sets of
    positive columns.

    Args:
        design: shape (num_values, num_columns), both sides weighted already.
        subsets: of column numbers; some subset must have a solution without negative coefficients
            for any target, as one column that is positive throughout has.
        targets: shape (num_targets, num_values).
        handicaps: factors on the errors of the subsets. With them the subset is taken that best
            predicts each value from all the others, which needs no further fits: that error is a
            residual over 1 less its leverage.

    Returns:
        Coefficients of all columns, shape (num_targets, num_columns), 0 for those not taken.
    """
    scales = np.linalg.norm(design, axis=0)
    columns = design / scales
    sizes = np.linalg.norm(targets, axis=1)
    lowest = np.full(len(targets), np.inf)
    found = np.zeros((len(targets), design.shape[1]))
    rows = np.arange(len(targets))
    factors = np.array(handicaps if handicaps else [1.0] * len(subsets))
    by_size: dict[int, list[int]] = {}
    for number, subset in enumerate(subsets):
        by_size.setdefault(len(subset), []).append(number)
    groups = [
        numbers[start : start + _AT_ONCE]
        for _, numbers in sorted(by_size.items())
        for start in range(0, len(numbers), _AT_ONCE)
    ]
    for group in groups:
        chosen = np.array([subsets[number] for number in group])  # (subsets, taken)
        mine = np.moveaxis(columns[:, chosen], 0, 1)  # (subsets, values, taken)
        inverse = np.linalg.pinv(mine)
        coefficients = targets @ np.swapaxes(inverse, 1, 2)  # (subsets, targets, taken)
        missed = targets - coefficients @ np.swapaxes(mine, 1, 2)
        if handicaps:
            leverage = np.einsum("sij,sji->si", mine, inverse)
            missed /= np.maximum(1.0 - leverage, _TINY)[:, None, :]
        # Below the floor a difference is rounding, and the subset with the smaller handicap is
        # taken.
        errors = np.maximum(np.linalg.norm(missed, axis=2), 1e-9 * sizes) * factors[group][:, None]
        errors[(coefficients < -_TINY * sizes[:, None]).any(axis=2)] = np.inf
        best = errors.argmin(axis=0)
        is_better = errors[best, rows] < lowest
        place = best[is_better]
        row = rows[is_better]
        lowest[row] = errors[place, row]
        found[row] = 0.0
        found[row[:, None], chosen[place]] = np.maximum(coefficients[place, row], 0.0)
    scaled: np.ndarray = found / scales
    return scaled


def _linear(
    name: str, formula: str, count: int, parameters: Callable[[np.ndarray], Parameters]
) -> Law:
    """Return the law of the first of 1, p and p (p - 1).

    Non-negative coefficients keep sigma in 0..1, kappa from 0.
    """
    subsets = [
        chosen for size in range(1, count + 1) for chosen in combinations(range(count), size)
    ]

    def design(ranks: np.ndarray) -> np.ndarray:
        return np.stack([np.ones_like(ranks), ranks, ranks * (ranks - 1.0)][:count], axis=1)

    return Law(
        name,
        f"y = rank_s_per_image (1 + {formula})",
        count + 1,
        lambda ranks, weights, values: fit_columns(
            design(ranks) * weights[:, None], subsets, values * weights
        ),
        lambda coefficients, ranks: coefficients @ design(ranks).T,
        parameters,
        lambda _: count,
    )


def _amdahl_parameters(coefficients: np.ndarray) -> Parameters:
    parallel, serial = coefficients.T
    return {"rank_s_per_image": parallel + serial, "serial_fraction": serial / (parallel + serial)}


def _usl_parameters(coefficients: np.ndarray) -> Parameters:
    parallel, contended, coherent = coefficients.T
    whole = np.maximum(
        parallel + contended, 1e-12 * coherent
    )  # far from one rank it may seem all coherence
    sigma = contended / whole
    kappa = coherent / whole
    with np.errstate(divide="ignore", invalid="ignore"):
        peak = np.where(kappa > 0.0, np.sqrt(np.maximum(1.0 - sigma, 0.0) / kappa), np.inf)
    return {"rank_s_per_image": whole, "sigma": sigma, "kappa": kappa, "peak_ranks": peak}


def _gustafson_solve(ranks: np.ndarray, weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Search the serial fraction by finer and finer grids.

    The time of an image is linear and follows from it.
    """
    targets = values * weights
    low = np.zeros(len(values))
    high = np.ones(len(values))
    steps = np.linspace(0.0, 1.0, 21)
    for _ in range(10):
        fractions = low[:, None] + (high - low)[:, None] * steps
        shape = _gustafson_shape(fractions[..., None], ranks) * weights  # (fits, steps, points)
        whole = (shape * targets[:, None]).sum(axis=2) / (shape**2).sum(axis=2)
        missed = ((whole[..., None] * shape - targets[:, None]) ** 2).sum(axis=2)
        best = np.take_along_axis(fractions, missed.argmin(axis=1)[:, None], axis=1)[:, 0]
        width = (high - low) / 20.0
        low = np.maximum(best - width, 0.0)
        high = np.minimum(best + width, 1.0)
    shape = _gustafson_shape(best[:, None], ranks) * weights
    return np.stack([(shape * targets).sum(axis=1) / (shape**2).sum(axis=1), best], axis=1)


def _gustafson_shape(fractions: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    shape: np.ndarray = ranks / (ranks - fractions * (ranks - 1.0))
    return shape


# Of the terms p^i log2(p)^j of the normal form, those that the Extra-P tool tries by default; of
# its larger exponents only those that a cost of one rank can have.
_POWERS = ("0", "1/4", "1/3", "1/2", "2/3", "3/4", "1", "5/4", "4/3", "3/2", "5/3", "2", "5/2", "3")
_TERMS = tuple(product(map(Fraction, _POWERS), range(3)))
TERM_NAMES = tuple(
    " ".join(
        filter(
            None,
            [
                {"0": "", "1": "p"}.get(str(power), f"p^({power})"),
                ("", "log2(p)", "log2(p)^2")[logarithm],
            ],
        )
    )
    for power, logarithm in _TERMS
)  # as they are written, `p^(1/2) log2(p)`; empty for the constant
_TERM_SUBSETS = [
    (0, *chosen) for size in range(3) for chosen in combinations(range(1, len(_TERMS)), size)
]
# What the error of leaving one out must fall by for a further term: with so many to choose from,
# one that lowers it by less does so by chance.
_HANDICAPS = [2.0 ** (len(subset) - 1) for subset in _TERM_SUBSETS]


def _term_values(ranks: np.ndarray) -> np.ndarray:
    """Return all terms on some ranks, shape (num_ranks, num_terms), the constant first."""
    return np.stack(
        [ranks ** float(power) * np.log2(ranks) ** logarithm for power, logarithm in _TERMS], axis=1
    )


def choose_terms(ranks: np.ndarray, weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the coefficients of all terms of the normal form, shape (num_fits, num_terms).

    At most two are not 0 beside the constant: those that best predict each value from the others;
    every fit chooses its own. A term uses up two values, for its coefficient and its exponents, so
    that fewer than six have one term at most.
    """
    max_taken = 1 + min(2, max(0, len(ranks) - 2) // 2)
    subsets = [subset for subset in _TERM_SUBSETS if len(subset) <= max_taken]
    return fit_columns(
        _term_values(ranks) * weights[:, None],
        subsets,
        values * weights,
        _HANDICAPS[: len(subsets)],
    )


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        _linear("amdahl", "serial_fraction (p - 1)", 2, _amdahl_parameters),
        Law(
            "gustafson",
            "y = rank_s_per_image p / (p - serial_fraction (p - 1))",
            3,
            _gustafson_solve,
            lambda found, ranks: found[:, :1] * _gustafson_shape(found[:, 1:], ranks),
            lambda found: {"rank_s_per_image": found[:, 0], "serial_fraction": found[:, 1]},
            lambda _: 2,
        ),
        _linear("usl", "sigma (p - 1) + kappa p (p - 1)", 3, _usl_parameters),
        Law(
            "pmnf",
            "y = constant + sum of at most 2 terms c p^i log2(p)^j",
            5,
            choose_terms,
            lambda found, ranks: found @ _term_values(ranks).T,
            lambda found: {
                TERM_NAMES[term] or "constant": found[:, term]
                for term in (0, *np.flatnonzero(found[0, 1:]) + 1)
            },
            lambda found: 1 + 2 * int(np.count_nonzero(found[1:])),
        ),
    )
}

"""Non-negative least squares over sets of columns, and the performance-model normal form that chooses among them.

The normal form is a constant and at most two terms c p^i log2(p)^j (Calotoiu et al., SC 2013, section 3). Exponents are
those that the Extra-P tool tries by default; of its larger ones only those that a cost of one rank can have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

import numpy as np

Subset = tuple[int, ...]
_TINY = 1e-12
_AT_ONCE = 64
_POWERS = ("0", "1/4", "1/3", "1/2", "2/3", "3/4", "1", "5/4", "4/3", "3/2", "5/3", "2", "5/2", "3")
POWERS = tuple(Fraction(power) for power in _POWERS)
LOGARITHMS = (0, 1, 2)
# What the error of leaving one out must fall by for a further term: with so many to choose from, one that lowers it by
# less does so by chance.
HANDICAP = 2.0


@dataclass(frozen=True, slots=True)
class Term:
    """p^power log2(p)^logarithm; with 0 and 0 the constant."""

    power: Fraction
    logarithm: int

    @property
    def name(self) -> str:
        """The term as it is written, `p^(1/2) log2(p)`; empty for the constant."""
        power = {Fraction(0): "", Fraction(1): "p"}.get(self.power, f"p^({self.power})")
        logarithm = ("", "log2(p)", "log2(p)^2")[self.logarithm]
        return " ".join(word for word in (power, logarithm) if word)

    def values(self, ranks: np.ndarray) -> np.ndarray:
        """Return the term on some ranks."""
        values: np.ndarray = ranks ** float(self.power) * np.log2(ranks) ** self.logarithm
        return values


COLUMNS = tuple(Term(power, logarithm) for power in POWERS for logarithm in LOGARITHMS)


def _subsets(num_terms: int) -> tuple[Subset, ...]:
    places = range(1, len(COLUMNS))
    return tuple((0, *terms) for size in range(num_terms + 1) for terms in combinations(places, size))


_SUBSETS = tuple(_subsets(num_terms) for num_terms in (0, 1, 2))
_HANDICAPS = tuple(HANDICAP ** (len(subset) - 1) for subset in _SUBSETS[2])


def design_of_terms(ranks: np.ndarray) -> np.ndarray:
    """Return all terms on some ranks, shape (num_ranks, num_terms), the constant first."""
    return np.stack([term.values(ranks) for term in COLUMNS], axis=1)


def choose_terms(ranks: np.ndarray, weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the coefficients of all terms, of shape (num_fits, num_terms).

    At most two of them are not 0 beside the constant.

    Terms are those that best predict each value from the others; every fit chooses its own. A term uses up two
    values, for its coefficient and its exponents, so that fewer than six have one term at most.
    """
    subsets = _SUBSETS[min(2, max(0, len(ranks) - 2) // 2)]
    return choose_columns(
        design_of_terms(ranks) * weights[:, None], subsets, values * weights, _HANDICAPS[: len(subsets)]
    )


def term_values(coefficients: np.ndarray, ranks: np.ndarray) -> np.ndarray:
    """Return the sums of terms, shape (num_fits, num_ranks)."""
    sums: np.ndarray = coefficients @ design_of_terms(ranks).T
    return sums


def count_terms(coefficients: np.ndarray) -> int:
    """Return the number of terms that one row of coefficients has beside the constant."""
    return int(np.count_nonzero(coefficients[1:]))


def fit_columns(design: np.ndarray, subsets: Sequence[Subset], targets: np.ndarray) -> np.ndarray:
    """Return coefficients, none negative, of the subset of columns that leaves the smallest squares.

    With all subsets this is the solution of the non-negative least squares: one of its sets of positive columns.

    Args:
        design: shape (num_values, num_columns), both sides weighted already.
        subsets: of column numbers; some subset must have a solution without negative coefficients for any target,
            as one column that is positive throughout has.
        targets: shape (num_targets, num_values).

    Returns:
        Coefficients of all columns, shape (num_targets, num_columns), 0 for those not taken.
    """
    return _best(design, subsets, targets, [1.0] * len(subsets), is_left_out=False)


def choose_columns(
    design: np.ndarray, subsets: Sequence[Subset], targets: np.ndarray, handicaps: Sequence[float]
) -> np.ndarray:
    """Return coefficients, none negative, of the subset that best predicts each value from all the others.

    The error of leaving one out needs no further fits: a residual over 1 less its leverage is that error. A subset's
    error counts `handicaps` times. Shapes are those of `fit_columns`.
    """
    return _best(design, subsets, targets, handicaps, is_left_out=True)


def _best(
    design: np.ndarray, subsets: Sequence[Subset], targets: np.ndarray, handicaps: Sequence[float], *, is_left_out: bool
) -> np.ndarray:
    scales = np.linalg.norm(design, axis=0)
    columns = design / scales
    sizes = np.linalg.norm(targets, axis=1)
    lowest = np.full(len(targets), np.inf)
    found = np.zeros((len(targets), design.shape[1]))
    rows = np.arange(len(targets))
    for group in _groups(subsets):
        chosen = np.array([subsets[place] for place in group])  # (subsets, taken)
        mine = np.moveaxis(columns[:, chosen], 0, 1)  # (subsets, values, taken)
        inverse = np.linalg.pinv(mine)
        coefficients = targets @ np.swapaxes(inverse, 1, 2)  # (subsets, targets, taken)
        missed = targets - coefficients @ np.swapaxes(mine, 1, 2)
        if is_left_out:
            leverage = np.einsum("sij,sji->si", mine, inverse)
            missed /= np.maximum(1.0 - leverage, _TINY)[:, None, :]
        # Below the floor a difference is rounding, and the subset with the smaller handicap is taken.
        errors = np.maximum(np.linalg.norm(missed, axis=2), 1e-9 * sizes)
        errors *= np.array([handicaps[place] for place in group])[:, None]
        errors[(coefficients < -_TINY * sizes[:, None]).any(axis=2)] = np.inf
        best = errors.argmin(axis=0)
        is_better = errors[best, rows] < lowest
        place, row = best[is_better], rows[is_better]
        lowest[row] = errors[place, row]
        found[row] = 0.0
        found[row[:, None], chosen[place]] = np.maximum(coefficients[place, row], 0.0)
    scaled: np.ndarray = found / scales
    return scaled


def _groups(subsets: Sequence[Subset]) -> Iterator[list[int]]:
    """Yield places of subsets of one size in their order, some at a time so that the arrays stay small."""
    for size in sorted({len(subset) for subset in subsets}):
        places = [place for place, subset in enumerate(subsets) if len(subset) == size]
        for start in range(0, len(places), _AT_ONCE):
            yield places[start : start + _AT_ONCE]

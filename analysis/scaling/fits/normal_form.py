"""The performance-model normal form: a constant and at most two terms c p^i log2(p)^j (Calotoiu et al., SC 2013, section 3).

Exponents are those that the Extra-P tool tries by default; of its larger ones only what a cost of one rank can have.
"""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from itertools import combinations

import numpy as np

from analysis.scaling.fits.least_squares import Subset, choose_columns

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
    """Return coefficients of all terms, shape (num_fits, num_terms), of which at most two are not 0 beside the constant.

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

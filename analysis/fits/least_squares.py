"""Least squares with coefficients that are not negative, over sets of columns, for many right-hand sides at once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

Subset = tuple[int, ...]
_TINY = 1e-12


def fit_columns(design: np.ndarray, subsets: Sequence[Subset], targets: np.ndarray) -> np.ndarray:
    """Gives coefficients, none negative, of the subset of columns that leaves the smallest squares.

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
    """Gives coefficients, none negative, of the subset that best predicts each value from all the others.

    The error of leaving one out needs no further fits: a residual over 1 less its leverage is that error. A subset's
    error counts `handicaps` times. Shapes are those of `fit_columns`.
    """
    return _best(design, subsets, targets, handicaps, is_left_out=True)


def _best(
    design: np.ndarray,
    subsets: Sequence[Subset],
    targets: np.ndarray,
    handicaps: Sequence[float],
    *,
    is_left_out: bool,
) -> np.ndarray:
    scales = np.linalg.norm(design, axis=0)
    columns = design / scales
    sizes = np.linalg.norm(targets, axis=1)
    lowest = np.full(len(targets), np.inf)
    found = np.zeros((len(targets), design.shape[1]))
    for subset, handicap in zip(subsets, handicaps, strict=True):
        chosen = list(subset)
        mine = columns[:, chosen]
        inverse = np.linalg.pinv(mine)
        coefficients = targets @ inverse.T
        missed = targets - coefficients @ mine.T
        if is_left_out:
            missed = missed / np.maximum(1.0 - np.einsum("ij,ji->i", mine, inverse), _TINY)
        # Below the floor a difference is rounding, and the subset with the smaller handicap is taken.
        error = handicap * np.maximum(np.linalg.norm(missed, axis=1), 1e-9 * sizes)
        is_better = (error < lowest) & (coefficients >= -_TINY * sizes[:, None]).all(axis=1)
        lowest[is_better] = error[is_better]
        found[is_better] = 0.0
        found[np.ix_(is_better, chosen)] = np.maximum(coefficients[is_better], 0.0)
    scaled: np.ndarray = found / scales
    return scaled

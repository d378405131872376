"""Least squares with coefficients that are not negative, over sets of columns, for many right-hand sides at once."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

Subset = tuple[int, ...]
_TINY = 1e-12
_AT_ONCE = 64


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

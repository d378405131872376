"""Boxes too many to be drawn one by one: the share of each column of pixels that each kind of box covers."""

from __future__ import annotations

import numpy as np


def coverage(start: np.ndarray, end: np.ndarray, row: np.ndarray, num_rows: int, num_columns: int) -> np.ndarray:
    """Return how much of each column the boxes of each row cover, `[row, column]`: 1 is all of it once.

    Args:
        start: begins of the boxes, in columns; what lies outside 0 to `num_columns` is cut off.
        end: ends of them.
        row: of each box.
        num_rows: how many rows there are.
        num_columns: how many columns there are.
    """
    start, end = np.clip(start, 0, num_columns), np.clip(end, 0, num_columns)
    width = num_columns + 2  # a box may end at the last edge, and the sums go on behind their box
    first, last = start.astype(np.int64), end.astype(np.int64)
    place = row.astype(np.int64) * width
    is_within = first == last
    size = num_rows * width

    def added(column: np.ndarray, amount: np.ndarray) -> np.ndarray:
        sums: np.ndarray = np.bincount(place + column, amount, minlength=size)
        return sums

    shares = added(first, np.where(is_within, end - start, first + 1 - start))
    shares += added(last, np.where(is_within, 0.0, end - last))
    whole = np.where(is_within, 0.0, 1.0)
    whole_from = added(first + 1, whole).reshape(num_rows, width)
    whole_to = added(last, whole).reshape(num_rows, width)
    full = np.cumsum(whole_from - whole_to, axis=1)
    found: np.ndarray = (shares.reshape(num_rows, width) + full)[:, :num_columns]
    return found


def blended(shares: np.ndarray, colours: np.ndarray) -> np.ndarray:
    """Return the colour and opacity of each pixel, `[..., 4]`: the mean of what covers it, as opaque as it is covered.

    Args:
        shares: `[kind, ...]` how much each kind covers.
        colours: `[kind, 3]` from 0 to 1.
    """
    total = shares.sum(axis=0)
    mean = np.einsum("k...,kc->...c", shares, colours) / np.maximum(total, 1e-12)[..., None]
    mixed = np.concatenate([mean, np.minimum(total, 1.0)[..., None]], axis=-1)
    found: np.ndarray = np.clip(mixed, 0.0, 1.0)
    return found

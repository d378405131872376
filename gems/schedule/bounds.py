"""Closed forms of the published schedules' step time, held against the replay by tests."""

from __future__ import annotations


def step_units(
    name: str, num_ranks: int, num_micro_batches: int, forward: float, backward: float, parts: int = 1
) -> float | None:
    """Gives the time of one step with equal stages and free links, in the unit of `forward` and `backward`.

    layer_parallel N P (f + b); gpipe and 1f1b (N + P - 1)(f + b); GEMS with runs of m parts
    (P - 1 + m) f + (N / m)(P - 1 + m) b + (N / m - 1) m f, for b >= f (Jain et al. 2020; for m = 1 it is
    P f + N P b + (N - 1) f). None for a name without a closed form, or outside the form's range.
    """
    p, n, f, b = num_ranks, num_micro_batches, forward, backward
    if name == "layer_parallel":
        return n * p * (f + b)
    if name in ("gpipe", "1f1b"):
        return (n + p - 1) * (f + b)
    if name in ("gems_mast", "gems_master") and b >= f:
        runs = n // parts
        return (p - 1 + parts) * f + runs * (p - 1 + parts) * b + (runs - 1) * parts * f
    return None


def bubble(
    name: str, num_ranks: int, num_micro_batches: int, forward: float, backward: float, parts: int = 1
) -> float | None:
    """Gives the share of a step in which a rank idles, by the closed form."""
    span = step_units(name, num_ranks, num_micro_batches, forward, backward, parts)
    return None if not span else 1.0 - num_micro_batches * (forward + backward) / span

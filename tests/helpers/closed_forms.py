"""The closed forms of the schedule families at given sizes."""

from __future__ import annotations

from gems.schedule import registry
from gems.schedule.registry import FAMILIES, Family, Terms


def step_units(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    forward: float,
    backward: float,
    parts: int = 1,
    *,
    weight_grad: float | None = None,
    chunks: int = 2,
    cap: float | None = None,
) -> float | None:
    """Return the time of one step with equal stages and free links, in the unit of `forward` and `backward`.

    These are times of a rank's part of the model; `weight_grad` is half of the backward unless
    given. None for a family without a closed form, or outside of the form's range.
    """
    w = backward / 2 if weight_grad is None else weight_grad
    terms = Terms(num_ranks, num_micro_batches, parts, chunks, cap, forward, backward - w, w)
    return registry.step_units(name, terms)


def peak_units(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    parts: int = 1,
    *,
    chunks: int = 2,
    cap: float | None = None,
) -> float | None:
    """Return the most activations that a rank holds, in micro-batches on one of P equal parts of the model.

    None for a family without a closed form.
    """
    family: Family | None = FAMILIES.get(name)
    if family is None or family.peak_units is None:
        return None
    return family.peak_units(Terms(num_ranks, num_micro_batches, parts, chunks, cap))


def bubble(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    forward: float,
    backward: float,
    parts: int = 1,
) -> float | None:
    """Return the share of a step in which a rank idles, by the closed form."""
    span = step_units(name, num_ranks, num_micro_batches, forward, backward, parts)
    return None if not span else 1.0 - num_micro_batches * (forward + backward) / span

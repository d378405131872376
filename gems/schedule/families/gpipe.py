"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from gems.schedule.action import backward, forward
from gems.schedule.placement import linear
from gems.schedule.schedule import Schedule


def gpipe(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Build GPipe's schedule (Huang et al. 2019, section 2.3).

    Takes (N + P - 1)(f + b) time and holds N micro-batches of activations on every rank.
    """
    rows = tuple(
        tuple(forward(stage, m) for m in range(num_micro_batches))
        + tuple(backward(stage, m) for m in range(num_micro_batches))
        for stage in range(num_ranks)
    )
    return Schedule("gpipe", num_micro_batches, linear(num_ranks), rows)

"""Layer parallelism, the base case: one micro-batch at a time through all ranks (GEMS-Basic)."""

from __future__ import annotations

from gems.schedule.action import backward, forward
from gems.schedule.placement import linear
from gems.schedule.schedule import Schedule


def layer_parallel(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Build the schedule in which a micro-batch goes down and back up before the next starts.

    Takes N P (f + b) time and holds one micro-batch of activations (Jain et al. 2020, GEMS-Basic).
    """
    rows = tuple(
        tuple(make(stage, m) for m in range(num_micro_batches) for make in (forward, backward))
        for stage in range(num_ranks)
    )
    return Schedule("layer_parallel", num_micro_batches, linear(num_ranks), rows)

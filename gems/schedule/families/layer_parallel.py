"""Layer parallelism: one micro-batch at a time goes down and back up the ranks."""

from __future__ import annotations

from gems.schedule.action import backward, forward
from gems.schedule.placement import linear
from gems.schedule.registry import Request, schedule_family
from gems.schedule.schedule import Schedule


@schedule_family(
    "layer_parallel",
    step_units=lambda s: s.p * s.work,
    peak_units=lambda s: 1.0,
    siblings="in_flight",
    planned=None,  # 1F1B with a cap of 1 takes the same time
)
def layer_parallel(request: Request) -> Schedule:
    """Build the schedule in which a micro-batch goes down and back up before the next starts.

    It takes N P (f + b) time and holds one micro-batch of activations (Jain et al. 2020,
    GEMS-Basic).
    """
    rank_schedules = tuple(
        tuple(
            make(stage, m) for m in range(request.num_micro_batches) for make in (forward, backward)
        )
        for stage in range(request.num_ranks)
    )
    return Schedule(
        "layer_parallel", request.num_micro_batches, linear(request.num_ranks), rank_schedules
    )

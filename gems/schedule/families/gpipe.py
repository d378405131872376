"""GPipe: all forwards, then all backwards."""

from __future__ import annotations

from gems.schedule.action import backward, forward
from gems.schedule.placement import linear
from gems.schedule.registry import Request, schedule_family
from gems.schedule.schedule import Schedule


@schedule_family(
    "gpipe",
    step_units=lambda s: s.work + (s.p - 1) * (s.f + s.b),
    peak_units=lambda s: s.n,
    siblings="in_flight",
    planned=None,  # 1F1B takes the same time with less memory
)
def gpipe(request: Request) -> Schedule:
    """Build GPipe's schedule (Huang et al. 2019, section 2.3): all forwards, then all backwards.

    It takes (N + P - 1)(f + b) time and holds N micro-batches of activations on every rank.
    """
    rank_schedules = tuple(
        tuple(
            make(stage, m) for make in (forward, backward) for m in range(request.num_micro_batches)
        )
        for stage in range(request.num_ranks)
    )
    return Schedule("gpipe", request.num_micro_batches, linear(request.num_ranks), rank_schedules)

"""GEMS-ZB: GEMS-MASTER with a split backward."""

from __future__ import annotations

from gems.schedule.action import forward, input_gradient, weight_gradient
from gems.schedule.families.halves import refuse_odd
from gems.schedule.placement import bidirectional
from gems.schedule.registry import Terms, schedule_family
from gems.schedule.request import Request
from gems.schedule.schedule import Schedule


def _step_units(s: Terms) -> float | None:
    return s.p * s.f + s.n * s.p * s.i + (s.n - 1) * (s.f + s.w) + s.w if s.i >= s.f else None


@schedule_family(
    "gems_zb",
    step_units=_step_units,
    peak_units=lambda s: 1.0,
    placement=bidirectional,
    num_directions=2,
    is_quick=True,
)
def gems_zb(request: Request) -> Schedule:
    """Build GEMS-MASTER (Jain et al. 2020) with each backward split: the input gradient first, and then W.

    The next micro-batch, in the other direction, still finds each rank free of activations, but the backward's way
    through the ranks no longer waits for weight gradients: P f + N P i + (N - 1)(f + w) + w time for i >= f, with one
    micro-batch of activations.

    Raises:
        ConfigError: an odd number of micro-batches.
    """
    num_ranks, num_micro_batches = request.num_ranks, request.num_micro_batches
    refuse_odd("gems_zb", num_micro_batches, "the two directions take turns")
    placement = bidirectional(num_ranks)
    rows = tuple(
        tuple(
            make(placement.ranks[m % 2].index(rank), m, m % 2)
            for m in range(num_micro_batches)
            for make in (forward, input_gradient, weight_gradient)
        )
        for rank in range(num_ranks)
    )
    return Schedule("gems_zb", num_micro_batches, placement, rows)

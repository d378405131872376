"""GEMS-ZB: GEMS-MASTER with a split backward."""

from __future__ import annotations

from gems.schedule.action import forward, input_gradient, weight_gradient
from gems.schedule.families.halves import refuse_odd
from gems.schedule.placement import bidirectional
from gems.schedule.schedule import Schedule


def gems_zb(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Build GEMS-MASTER (Jain et al. 2020) with each backward split: the input gradient first, and then W.

    The next micro-batch, in the other direction, still finds each rank free of activations, but the backward's way
    through the ranks no longer waits for weight gradients: P f + N P i + (N - 1)(f + w) + w time for i >= f, with one
    micro-batch of activations.

    Raises:
        ConfigError: an odd number of micro-batches.
    """
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

"""V-Min and V-Half: two chunks a rank placed as a V, one building block repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gems.schedule.action import Action, forward, input_gradient
from gems.schedule.costs import StageCosts, uniform
from gems.schedule.families.timed import in_order_of_time
from gems.schedule.families.weight_gradients import place_weight_gradients
from gems.schedule.placement import v
from gems.schedule.schedule import Schedule

_PERIOD = 6  # F, I and W of two chunks


def v_min(num_ranks: int, num_micro_batches: int, costs: StageCosts | None = None) -> Schedule:
    """Build V-Min (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    Every pass goes on to the next rank at once, so that a micro-batch's life is as short as it can be: at most
    (P + 4) div 3 micro-batches of activations, and a bubble of 2 (P - 1) - 1/2 at f = i = w = 1, two thirds of 1F1B's.
    Where 3 divides P the first and the last chunk of a rank would meet: two waits of two slots part them.
    """
    wait = 0 if num_ranks % 3 else 2
    return _repeat("v_min", num_ranks, num_micro_batches, (1, 1, 1, 1), (wait, 0, wait), (num_ranks + 4) // 3, costs)


def v_half(num_ranks: int, num_micro_batches: int, costs: StageCosts | None = None) -> Schedule:
    """Build V-Half (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    The passes up the ranks take two slots a rank: at most (P + 2) div 2 micro-batches of activations, and for
    N >= P >= 3 a bubble of 3 (P - 1) / 2 - 1/2 at f = i = w = 1, half of 1F1B's.
    """
    wait = 0 if num_ranks % 2 else 3
    return _repeat("v_half", num_ranks, num_micro_batches, (1, 2, 1, 2), (0, 0, wait), (num_ranks + 2) // 2, costs)


def _repeat(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    steps: tuple[int, int, int, int],
    waits: tuple[int, int, int],
    peak: int,
    costs: StageCosts | None,
) -> Schedule:
    """Repeat a building block every six slots and squeezes: ranks keep the order of F and I, W fill the gaps."""
    block = list(_block(num_ranks, steps, waits))
    timed = ((slot + _PERIOD * m, make(stage, m)) for m in range(num_micro_batches) for slot, stage, make in block)
    order = in_order_of_time(name, num_micro_batches, v(num_ranks), timed)
    return place_weight_gradients(order, costs or uniform(num_ranks, 2 * num_ranks), 2 * peak)


def _block(
    num_ranks: int, steps: tuple[int, int, int, int], waits: tuple[int, int, int]
) -> Iterator[tuple[int, int, Callable[[int, int], Action]]]:
    """Yield slot, stage and builder of each F and I of a micro-batch.

    Args:
        num_ranks: P.
        steps: slots from a rank to the next for F down, F up, I down and I up.
        waits: slots beside, at the three turns between those.
    """
    down, up = range(num_ranks), range(num_ranks, 2 * num_ranks)
    passes = [(down, forward), (up, forward), (up[::-1], input_gradient), (down[::-1], input_gradient)]
    slot = 0
    for (stages, make), step, wait in zip(passes, steps, (*waits, 0), strict=True):
        for stage in stages:
            yield slot, stage, make
            slot += step
        slot += 1 - step + wait

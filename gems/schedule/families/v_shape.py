"""V-Half and V-Min: a building block on a V of two chunks a rank, repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from gems.schedule.action import Action, forward, input_gradient
from gems.schedule.families.rows import in_order_of_time
from gems.schedule.families.weight_gradients import place_weight_gradients
from gems.schedule.placement import v
from gems.schedule.registry import Request, schedule_family
from gems.schedule.schedule import Schedule

_PERIOD = 6  # F, I and W of two chunks


def _half_peak(p: int) -> int:
    return (p + 2) // 2


def _min_peak(p: int) -> int:
    return (p + 4) // 3


@schedule_family(
    "v_half", placement=v, stages_per_rank=2, siblings="v", peak_units=lambda s: min(s.n, _half_peak(s.p)),
    step_units=lambda s: s.work + (3 * s.p - 4) * s.f / 2 if s.n >= s.p >= 3 and s.is_even else None,
)  # fmt: skip
def v_half(request: Request) -> Schedule:
    """Build V-Half (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    The passes up the ranks take two slots a rank: at most (P + 2) div 2 micro-batches of activations, and for
    N >= P >= 3 a bubble of 3 (P - 1) / 2 - 1/2 at f = i = w = 1, half of 1F1B's.
    """
    wait = 0 if request.num_ranks % 2 else 3
    return _repeat("v_half", request, (1, 2, 1, 2), (0, 0, wait), _half_peak(request.num_ranks))


@schedule_family(
    "v_min", placement=v, stages_per_rank=2, siblings="v", peak_units=lambda s: min(s.n, _min_peak(s.p)),
    step_units=lambda s: s.work + (4 * s.p - 5) * s.f / 2 if s.p >= 2 and s.is_even else None,
)  # fmt: skip
def v_min(request: Request) -> Schedule:
    """Build V-Min (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    Every pass goes on to the next rank at once, so that a micro-batch's life is as short as it can be: at most
    (P + 4) div 3 micro-batches of activations, and a bubble of 2 (P - 1) - 1/2 at f = i = w = 1, two thirds of 1F1B's.
    If 3 divides P the first and the last chunk of a rank would meet: two waits of two slots part them.
    """
    wait = 0 if request.num_ranks % 3 else 2
    return _repeat("v_min", request, (1, 1, 1, 1), (wait, 0, wait), _min_peak(request.num_ranks))


def _repeat(
    name: str, request: Request, steps: tuple[int, int, int, int], waits: tuple[int, int, int], peak: int
) -> Schedule:
    """Repeat a building block every six slots and squeeze: ranks keep the order of F and I, W fill the gaps."""
    block = list(_block(request.num_ranks, steps, waits))
    micro_batches = range(request.num_micro_batches)
    timed = ((slot + _PERIOD * m, make(stage, m)) for m in micro_batches for slot, stage, make in block)
    order = in_order_of_time(name, request.num_micro_batches, v(request.num_ranks), timed)
    return place_weight_gradients(order, request.costs.stages(2 * request.num_ranks), 2 * peak)


def _block(
    num_ranks: int, steps: tuple[int, int, int, int], waits: tuple[int, int, int]
) -> Iterator[tuple[int, int, Callable[[int, int], Action]]]:
    """Yield slot, stage and builder of each F and I of a micro-batch.

    `steps` are slots from a rank to the next for F down, F up, I down and I up, `waits` more slots between these.
    """
    down, up = range(num_ranks), range(num_ranks, 2 * num_ranks)
    passes = [(down, forward), (up, forward), (up[::-1], input_gradient), (down[::-1], input_gradient)]
    slot = 0
    for (stages, make), step, wait in zip(passes, steps, (*waits, 0), strict=True):
        for stage in stages:
            yield slot, stage, make
            slot += step
        slot += 1 - step + wait

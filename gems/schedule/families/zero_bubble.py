"""ZB-H1, ZB-H2 and ZB-V: split backwards, whose weight gradients fill the bubbles."""

from __future__ import annotations

from gems.schedule.action import forward, input_gradient
from gems.schedule.families.shared import from_letters
from gems.schedule.families.weight_gradients import place_weight_gradients
from gems.schedule.placement import linear, v
from gems.schedule.registry import Request, Terms, schedule_family
from gems.schedule.schedule import Schedule


def _chain_bound(s: Terms, recompute: float, share: float) -> float:
    # a split backward reduces 1F1B's bound to its beginning, the forwards
    return max(s.f, share * (s.f + s.b) / (1 - (1 - share / s.n) ** s.p)) if share else s.f + s.i


@schedule_family(
    "zb_h1",
    siblings="zb_h",
    peak_units=lambda s: min(s.n, s.p),
    chain_bound=_chain_bound,
    step_units=lambda s: (
        s.work + (s.p - 1) * max(s.f, s.i, s.f + s.i - s.w) if s.n >= s.p else None
    ),
)
def zb_h1(request: Request) -> Schedule:
    """Build ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", handcrafted schedules).

    It has the order of 1F1B. A rank holds at most P micro-batches of activations, and runs a W if
    it would otherwise wait or hold more. For N >= P and its own costs it takes N (f + i + w) + (P -
    1) max(f, i, f + i - w) time; for w <= f, i this is the published bubble of (P - 1)(f + i - w),
    a third of 1F1B's at f = i = w.
    """
    return _zero_bubble("zb_h1", request, 1)


def _h2_step_units(s: Terms) -> float | None:
    # The last rank starts (P - 1) f late, so even without a bubble the step takes W + (P - 1) f.
    return (
        s.work + (s.p - 1) * max(s.f, s.f + s.i - 2 * s.w)
        if s.n >= 2 * s.p - 1 and s.w <= s.f
        else None
    )


@schedule_family(
    "zb_h2",
    siblings="zb_h",
    peak_units=lambda s: min(s.n, 2 * s.p - 1),
    step_units=_h2_step_units,
    chain_bound=_chain_bound,
)
def zb_h2(request: Request) -> Schedule:
    """Build ZB-H2 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", handcrafted schedules).

    It has twice the warm-up of 1F1B, so the first rank is busy until its first backward, and holds
    at most 2 P - 1 micro-batches of activations. For N >= 2 P - 1 and f = i = w no rank idles
    between its first and its last action.
    """
    return _zero_bubble("zb_h2", request, 2)


def _zero_bubble(name: str, request: Request, warmup: int) -> Schedule:
    num_ranks = request.num_ranks
    num_micro_batches = request.num_micro_batches
    rank_schedules = []
    for stage in range(num_ranks):
        ahead = min(num_micro_batches, warmup * (num_ranks - 1 - stage))
        actions = [forward(stage, m) for m in range(ahead)]
        for m in range(ahead, num_micro_batches):
            actions += [forward(stage, m), input_gradient(stage, m - ahead)]
        actions += [
            input_gradient(stage, m) for m in range(num_micro_batches - ahead, num_micro_batches)
        ]
        rank_schedules.append(tuple(actions))
    order = Schedule(name, num_micro_batches, linear(num_ranks), tuple(rank_schedules))
    return place_weight_gradients(
        order, request.costs.of(order.placement), warmup * (num_ranks - 1) + 1
    )


@schedule_family(
    "zb_v",
    placement=v,
    stages_per_rank=2,
    siblings="v",
    peak_units=lambda s: min(s.n, s.p),
    step_units=lambda s: s.work + (s.p - 1) * s.f / 2 if s.n >= s.p and s.is_even else None,
)
def zb_v(request: Request) -> Schedule:
    """Build ZB-V (Qi et al. 2023, "Zero Bubble Pipeline Parallelism"; V-ZB in Qi et al. 2024).

    It holds at most P micro-batches of activations, like 1F1B; W fill the remaining time. With f =
    i = w no rank idles between its first and its last action for N >= 2 P - 1, and the step takes N
    (f + i + w) + (P - 1) f / 2 for N >= P.
    """
    num_ranks = request.num_ranks
    num_micro_batches = request.num_micro_batches
    rank_schedules = []
    for rank in range(num_ranks):
        below = num_ranks - rank
        # forwards down until the first one comes up; then both until its gradient comes down; then
        # the chunk at the tip of the V until its gradient is back; then all in turn
        letters = "f" * (2 * below - 1) + "Ff" * rank + "FI" * below + "fiFI" * num_micro_batches
        rank_schedules.append(from_letters(letters, rank, num_ranks, num_micro_batches))
    order = Schedule("zb_v", num_micro_batches, v(num_ranks), tuple(rank_schedules))
    return place_weight_gradients(order, request.costs.of(order.placement), 2 * num_ranks)

"""ZB-H1 and ZB-H2: 1F1B with a split backward, whose weight gradients fill the bubbles."""

from __future__ import annotations

from gems.schedule.action import Action, forward, input_gradient
from gems.schedule.costs import StageCosts, uniform
from gems.schedule.families.weight_gradients import place_weight_gradients
from gems.schedule.placement import linear
from gems.schedule.schedule import Schedule


def zb_h1(num_ranks: int, num_micro_batches: int, costs: StageCosts | None = None) -> Schedule:
    """Build ZB-H1 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", handcrafted schedules).

    1F1B's order, where a rank holds P micro-batches of activations at most and runs a W wherever it would wait or hold
    more. Built for its costs it takes, for N >= P, N (f + i + w) + (P - 1) max(f, i, f + i - w) time: for w <= f, i
    the published bubble of (P - 1)(f + i - w), a third of 1F1B's at f = i = w.
    """
    return _zero_bubble("zb_h1", num_ranks, num_micro_batches, 1, costs)


def zb_h2(num_ranks: int, num_micro_batches: int, costs: StageCosts | None = None) -> Schedule:
    """Build ZB-H2 (Qi et al. 2023, "Zero Bubble Pipeline Parallelism", handcrafted schedules).

    Twice the warm-up of 1F1B, so that the first rank is busy until its first backward, and 2 P - 1 micro-batches of
    activations at most. For N >= 2 P - 1 and f = i = w no rank idles between its first and its last action.
    """
    return _zero_bubble("zb_h2", num_ranks, num_micro_batches, 2, costs)


def _zero_bubble(name: str, num_ranks: int, num_micro_batches: int, warmup: int, costs: StageCosts | None) -> Schedule:
    rows = tuple(
        _row(stage, min(num_micro_batches, warmup * (num_ranks - 1 - stage)), num_micro_batches)
        for stage in range(num_ranks)
    )
    order = Schedule(name, num_micro_batches, linear(num_ranks), rows)
    most_held = warmup * (num_ranks - 1) + 1
    return place_weight_gradients(order, costs or uniform(num_ranks, num_ranks), most_held)


def _row(stage: int, warmup: int, num_micro_batches: int) -> tuple[Action, ...]:
    row = [forward(stage, m) for m in range(warmup)]
    for m in range(warmup, num_micro_batches):
        row += [forward(stage, m), input_gradient(stage, m - warmup)]
    row += [input_gradient(stage, m) for m in range(num_micro_batches - warmup, num_micro_batches)]
    return tuple(row)

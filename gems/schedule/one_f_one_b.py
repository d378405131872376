"""1F1B: warm up, then one forward and one backward in turn, then drain."""

from __future__ import annotations

from gems.schedule.action import Action, backward, forward
from gems.schedule.placement import linear
from gems.schedule.schedule import Schedule


def one_f_one_b(num_ranks: int, num_micro_batches: int) -> Schedule:
    """Builds the synchronous 1F1B schedule (PipeDream-Flush: Narayanan et al. 2021, section 2.2; DAPPLE).

    Takes (N + P - 1)(f + b) time and holds min(N, P - stage) micro-batches of activations.
    """
    return Schedule(
        "1f1b", num_micro_batches, linear(num_ranks),
        tuple(_row(stage, num_ranks, num_micro_batches) for stage in range(num_ranks)),
    )  # fmt: skip


def _row(stage: int, num_ranks: int, num_micro_batches: int) -> tuple[Action, ...]:
    warmup = min(num_ranks - 1 - stage, num_micro_batches)
    row = [forward(stage, m) for m in range(warmup)]
    for m in range(warmup, num_micro_batches):
        row += [forward(stage, m), backward(stage, m - warmup)]
    row += [backward(stage, m) for m in range(num_micro_batches - warmup, num_micro_batches)]
    return tuple(row)

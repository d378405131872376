"""1F1B: warm up, then one forward and one backward in turn, then drain; also with fewer micro-batches in flight."""

from __future__ import annotations

from collections.abc import Iterator

from gems.errors import ConfigError
from gems.schedule.action import Action, backward, forward
from gems.schedule.families.timed import in_order_of_time
from gems.schedule.placement import linear
from gems.schedule.schedule import Schedule


def one_f_one_b(num_ranks: int, num_micro_batches: int, cap: float | None = None) -> Schedule:
    """Build the synchronous 1F1B schedule (PipeDream-Flush: Narayanan et al. 2021, section 2.2; DAPPLE).

    Takes (N + P - 1)(f + b) time and holds min(N, P - stage) micro-batches of activations. With K, the integer part of
    `cap`, below P, micro-batches run in groups of K: the first rank starts a group when the group before has left it,
    so no rank holds more than K, and N micro-batches take ((N - 1) div K)(P - K) (f + b) longer.

    Raises:
        ConfigError: the cap is below one micro-batch.
    """
    if cap is not None and cap < 1:
        raise ConfigError(
            "schedule.activation_cap", cap, "must be 1 or more for 1f1b: a rank holds whole micro-batches of its stage",
            "raise it to 1, or use schedule=capped, whose stages are smaller",
        )  # fmt: skip
    group = num_ranks if cap is None else min(num_ranks, int(cap))
    timed = _timed(num_ranks, num_micro_batches, group)
    return in_order_of_time("1f1b", num_micro_batches, linear(num_ranks), timed)


def _timed(num_ranks: int, num_micro_batches: int, group: int) -> Iterator[tuple[float, Action]]:
    """Yield each action with its slot where forward and backward take one each: forwards and backwards never meet."""
    for m in range(num_micro_batches):
        start = 2 * (m // group * num_ranks + m % group)
        for stage in range(num_ranks):
            yield start + stage, forward(stage, m)
            yield start + 2 * num_ranks - 1 - stage, backward(stage, m)

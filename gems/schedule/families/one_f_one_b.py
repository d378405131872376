"""Pipelines with one stage on each rank: layer parallelism, GPipe and 1F1B."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from math import ceil

from gems.errors import ConfigError
from gems.schedule.action import Action, backward, forward
from gems.schedule.families.shared import in_order_of_time
from gems.schedule.ledger import TOLERANCE
from gems.schedule.placement import linear
from gems.schedule.registry import Request, Terms, schedule_family, with_sizes
from gems.schedule.schedule import Schedule


def _step_units(s: Terms) -> float | None:
    if not s.in_flight:
        return None
    return s.work + (s.p - 1 + (s.n - 1) // s.in_flight * (s.p - s.in_flight)) * (s.f + s.b)


def _chain_bound(s: Terms, recompute: float, share: float) -> float:
    """Return a lower bound of the step time for the best cut.

    Rank r begins after r forwards and ends before r backwards. For every rank, a step of length M
    satisfies N t_r + sum of t_s over s < r <= M. The cut with the least M gives M = T / (1 - (1 -
    1/N)^P), with T the time of the model and N multiplied by the factor of recomputation. With a
    cap of K, micro-batches that are K apart follow each other.
    """
    time = s.f + s.b
    return max(time / (1 - (1 - 1 / (s.n * recompute)) ** s.p), ceil(s.n / s.in_flight) * time)


def _planned_caps(request: Request) -> Iterable[Request]:
    """Return no cap, and caps of 1, 2, 3, 4, 6, 8, 12, ... micro-batches below P and N."""
    p = request.num_ranks
    n = request.num_micro_batches
    caps = {cap for k in range(p.bit_length()) for cap in (2**k, 3 * 2**k) if cap < min(p, n)}
    return with_sizes("cap", [None, *map(float, sorted(caps))])(request)


def _most_in_flight(request: Request) -> Iterable[Request]:
    """Return the most micro-batches in flight that keep the cap, if any do.

    With K in flight, stage s holds min(K, P - s).
    """
    p = request.num_ranks
    n = request.num_micro_batches
    cap = request.cap
    if cap is None:
        return [request]
    limit = cap + TOLERANCE
    sizes = request.costs.of(linear(p)).activation
    fitting = (
        k
        for k in range(p, 0, -1)
        if all(min(k, p - s, n) * size <= limit for s, size in enumerate(sizes))
    )
    return with_sizes("cap", [float(k) for k in fitting][:1])(request)


@schedule_family(
    "1f1b",
    step_units=_step_units,
    peak_units=lambda s: min(s.n, s.in_flight),
    siblings="in_flight",
    planned=_planned_caps,
    rival=_most_in_flight,
    is_quick=True,
    chain_bound=_chain_bound,
    least_in_flight=lambda s: [min(s.n, s.p - rank, s.in_flight) for rank in range(s.p)],
)
def one_f_one_b(request: Request) -> Schedule:
    """Build the synchronous 1F1B schedule.

    Sources: PipeDream-Flush (Narayanan et al. 2021, section 2.2) and DAPPLE. It takes (N + P - 1)(f
    + b) time and holds min(N, P - stage) micro-batches of activations. If K, the integer part of
    `cap`, is below P, micro-batches run in groups of K: the first rank starts a group when the
    previous one has left it, so no rank holds more than K, and N micro-batches take ((N - 1) div
    K)(P - K) (f + b) longer.

    Raises:
        ConfigError: The cap is below one micro-batch.
    """
    num_ranks = request.num_ranks
    num_micro_batches = request.num_micro_batches
    cap = request.cap
    if cap is not None and cap < 1:
        raise ConfigError(
            "schedule.activation_cap",
            cap,
            "must be 1 or more for 1f1b: a rank holds whole micro-batches of its stage",
            "raise it to 1, or use schedule=capped, whose stages are smaller",
        )
    group = num_ranks if cap is None else min(num_ranks, int(cap))

    def timed() -> Iterator[tuple[float, Action]]:
        """Yield actions with slots; forward and backward take one slot each.

        They never collide on a rank.
        """
        for m in range(num_micro_batches):
            start = 2 * (m // group * num_ranks + m % group)
            for stage in range(num_ranks):
                yield start + stage, forward(stage, m)
                yield start + 2 * num_ranks - 1 - stage, backward(stage, m)

    return in_order_of_time("1f1b", num_micro_batches, linear(num_ranks), timed())


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
    return replace(one_f_one_b(replace(request, cap=1.0)), name="layer_parallel")

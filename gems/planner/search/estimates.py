"""Guess about how many bytes a candidate holds, too many or too few.

The guesses give an order in which the candidates that take long are tried.
"""

from __future__ import annotations

import math

from gems.planner.search.bounds import Load, static_bytes
from gems.planner.search.candidate import KEEP, Candidate


def guess_bytes(one: Candidate, load: Load, param_copies: int, buffer_copies: int) -> float:
    """Return about what the fullest rank of a candidate holds.

    Of equal stages: of each micro-batch in flight what the policy keeps on the device, what one of them brings back at
    once, and what a layer makes meanwhile. Arguments as of `bounds.least_bytes`.
    """
    static = static_bytes(one, load, param_copies, buffer_copies) / one.partitions
    held, stages, part = guess_in_flight(one), one.num_stages, load.kept_bytes / one.num_stages
    chunks, handed = stages // one.partitions, load.handed_bytes
    segments = max(1.0, math.sqrt(load.num_layers / stages))
    on_device, at_once = {
        KEEP: (load.kept_bytes / one.partitions, 0.0),
        "recompute/selective": (load.cheap_bytes / one.partitions, part / segments**2),
        "recompute/stage": (chunks * handed, part),
        "recompute/segment": (chunks * segments * handed, part / segments),
    }.get(one.policy, (chunks * handed, 2.0 * load.transient_bytes))
    return static + held * on_device + at_once + load.transient_bytes


def guess_host_bytes(one: Candidate, load: Load) -> float:
    """Return about what the fullest rank of a candidate keeps in host memory."""
    moves = one.memory not in (KEEP, "recompute")
    return moves * guess_in_flight(one) * load.kept_bytes / one.partitions


def guess_in_flight(one: Candidate) -> float:
    """Return about how many micro-batches the fullest rank holds at once of each of its stages."""
    p, n = one.partitions, one.micro_batches
    if p == 1:
        return 1
    most: dict[str, float] = {
        "zb_h2": 2 * p - 1, "interleaved_1f1b": p * (1 + 1 / one.chunks), "v_half": p / 2 + 1, "v_min": p / 3 + 1,
        "chimera": p / 2, "gems_master": one.parts, "gems_zb": 1,
    }  # fmt: skip
    return min(n, one.cap or most.get(one.schedule, p))

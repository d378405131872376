"""LMS by need: which saved tensors an allocator with a limit pages out in a step, and the plan that does so beforehand.

IBM's large model support for PyTorch 1.5 pages out from within the allocator, the least recently used first, when a
request meets the limit, and pages in when an operation reads. A step repeats itself, and the allocator learns it: what
was reclaimed at a place in the last step is copied out there as soon as it is not in use. Here each rank's list is played
with those rules until a step is like the one before. What is then reclaimed is the plan.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, Outcome
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.policies.lms.allocator import OutOfMemoryError
from gems.memory.policies.lms.paging import RankPaging, Use

DEFAULT_SHARE = 0.95  # of the device, where no limit is given
_UNLIMITED = 1 << 62
_TRIES = 8
_SHARE = 0.98  # of the limit that a try leaves to the next, so that tries end
_HELP = "lms_limit pages out saved tensors only: use memory=plan, more partitions, or a smaller image or micro-batch"


def lms_limit(case: MemoryCase, limit_bytes: int | None = None, reclaim: str = "first") -> MemoryPlan:
    """Return the plan of what is reclaimed in a step that repeats itself.

    A layer is offloaded where, over its micro-batches, most of the bytes that leave with it are reclaimed before its
    backward; its memory is free where the first of them is needed by another, and it comes back on demand. What is not
    saved for backward (parameters, gradients, messages, workspace) stays, where the original pages that out as well. The
    limit is on what the allocator reserves, in its segments; where the plan, which treats all micro-batches alike,
    holds more than the limit, the step is played again under less. `counters` has the original's for the first and for
    the repeated step, rank by rank.

    Args:
        case: the run; its `limit_bytes` is what a rank may hold.
        limit_bytes: of the allocator; None or 0 for 0.95 of what the rank may hold. Without either nothing is reclaimed.
        reclaim: "first" takes the least recently used that is large enough, "size" the one that fits best.

    Raises:
        DoesNotFitError: a request that does not fit although everything that may leave has left.
    """
    allowed = limit_bytes or case.limit_bytes or _UNLIMITED
    limit = limit_bytes or (int(DEFAULT_SHARE * allowed) if allowed < _UNLIMITED else _UNLIMITED)
    limits = [max(1, limit)] * case.schedule.num_ranks
    outcome: Outcome | None = None
    played: dict[int, RankPaging] = {}
    for tries in range(1, _TRIES + 1):
        for rank, limit in enumerate(limits):
            if rank in played:
                continue
            played[rank] = RankPaging(case, rank, limit, reclaim)
            try:
                played[rank].settle()
            except OutOfMemoryError as error:
                wanted = -(-(error.reserved_bytes + error.num_bytes) * allowed // limit)
                raise _too_large(rank, outcome.peak_bytes[rank] if outcome else wanted, allowed) from error
        plan = replace(_plan(case, played), counters=_counters(played, tries, limits))
        if allowed == _UNLIMITED:
            return plan
        outcome = case.outcome(plan)
        for rank, peak in enumerate(outcome.peak_bytes):
            if peak > allowed:
                limits[rank] = max(1, int(limits[rank] * _SHARE * allowed / peak))
                del played[rank]
        if len(played) == len(limits):
            return plan
    assert outcome is not None
    rank = outcome.fullest_rank
    raise _too_large(rank, outcome.peak_bytes[rank], allowed)


def _too_large(rank: int, needed_bytes: int, limit_bytes: int) -> DoesNotFitError:
    return DoesNotFitError(f"rank {rank} under lms_limit", needed_bytes, limit_bytes, _HELP)


def _plan(case: MemoryCase, played: Mapping[int, RankPaging]) -> MemoryPlan:
    """Offload the layers most of whose bytes are reclaimed, over all ranks that hold them."""
    uses: dict[int, list[Use]] = {}
    for paging in played.values():
        for layer, use in paging.uses.items():
            uses.setdefault(layer, []).append(use)
    layers = {}
    for layer, found in uses.items():
        soonest = [use.soonest for use in found if use.soonest is not None]
        if 2 * sum(use.reclaimed_bytes for use in found) > sum(use.movable_bytes for use in found):
            layers[layer] = Segment(layer, layer + 1, Choice.OFFLOAD, free_after=max(0, min(soonest)), ahead=0)
    return MemoryPlan.by_layer("lms_limit", case.boundaries, layers)


def _counters(played: Mapping[int, RankPaging], tries: int, limits: Sequence[int]) -> dict[str, Any]:
    return {
        "tries": tries,
        "ranks": [
            {
                "limit_bytes": limits[rank] if limits[rank] < _UNLIMITED else None,
                "steps": len(played[rank].steps),
                "first": played[rank].steps[0].to_json(),
                "steady": played[rank].steps[-1].to_json(),
            }
            for rank in sorted(played)
        ],
    }

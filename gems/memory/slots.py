"""Slots of CUDA graphs: device memory at fixed addresses that actions of a rank share.

Slots are assigned like registers, by colouring the intervals in which values live (Chaitin et al.
1981). For intervals, a list of free slots is optimal.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from heapq import heappop, heappush

from gems.schedule.action import COMPUTE_KINDS, Action, Kind
from gems.schedule.schedule import Schedule

StageKey = tuple[int, int]  # (direction, stage)
_OPENING = frozenset({Kind.F, Kind.R, Kind.PREFETCH})


@dataclass(frozen=True, slots=True)
class Slots:
    """The slot of each compute action of a rank, and the number of slots by direction and stage."""

    of_action: Mapping[Action, int]
    counts: Mapping[StageKey, int]


def split_stages(schedule: Schedule, rank: int) -> set[StageKey]:
    """Return a rank's stages with a split backward for any micro-batch.

    All graphs of such a stage are split, so that any slot fits.
    """
    return {
        (action.direction, action.stage)
        for action in schedule.rank_schedules[rank]
        if action.kind is Kind.I
    }


def assign_slots(schedule: Schedule, rank: int) -> Slots:
    """Assign the fewest slots to a rank's actions so that no two live values share one.

    A value of a stage lives from its F to the end of its backward: B, or W after I. A recomputed
    value lives from R on, and one copied to host memory from PREFETCH on; its F takes a slot and
    returns it at once. The segments of a stage share its slots.
    """
    counts = dict.fromkeys(schedule.placement.stages_on(rank), 0)
    free: dict[StageKey, list[int]] = {key: [] for key in counts}
    slots: dict[tuple[object, ...], int] = {}
    of_action: dict[Action, int] = {}
    for action in schedule.rank_schedules[rank]:
        kind = action.kind
        place = action[1:]
        key = (action.direction, action.stage)
        is_recomputed = schedule.has(Kind.R, *place)
        opens = kind in _OPENING and not (kind is Kind.PREFETCH and is_recomputed)
        if not opens and kind not in COMPUTE_KINDS:
            continue
        if place not in slots:
            if not free[key]:
                heappush(free[key], counts[key])
                counts[key] += 1
            slots[place] = heappop(free[key])
        if kind in COMPUTE_KINDS:
            of_action[action] = slots[place]
        returns = is_recomputed or schedule.has(Kind.OFFLOAD, *place) or schedule.forward_only
        if kind in (Kind.B, Kind.W) or (kind is Kind.F and returns):
            heappush(free[key], slots.pop(place))
    return Slots(of_action, counts)


def grown_slots(
    changes: Iterable[tuple[Action, int]], slot_bytes: Mapping[StageKey, int], num_strips: int = 1
) -> tuple[int, int]:
    """Return the bytes of a rank's slots, and its peak until all of them exist.

    A stage runs eagerly until its first backward has ended; `changes` are the compute actions of a
    step with the bytes that each allocates or frees in eager mode. After that, the first strip of a
    micro-batch takes a free slot, or creates one.
    """
    held_bytes = peak_bytes = 0
    free: dict[StageKey, int] = {}
    eager: set[tuple[int, ...]] = set()
    ended: Counter[tuple[int, ...]] = Counter()
    for action, change in list(changes) * 2:  # in the second step, all have slots
        assert action.micro_batch is not None
        number, strip = divmod(action.micro_batch, num_strips)
        key = (action.direction, action.stage)
        place = (*key, number)
        is_begun = action.kind is Kind.F and not strip
        if is_begun and key not in free:
            eager.add(place)
        elif is_begun and free[key]:
            free[key] -= 1
        elif is_begun:
            held_bytes += slot_bytes[key]
        held_bytes += change if place in eager else 0
        peak_bytes = max(peak_bytes, held_bytes)
        ended[place] += action.kind in (Kind.B, Kind.W)
        if ended[place] == num_strips:
            free[key] = free.get(key, 0) + (place not in eager)
            eager.discard(place)
            del ended[place]
    return held_bytes, peak_bytes

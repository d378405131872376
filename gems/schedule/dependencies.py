"""Data dependencies between actions, and the two ends of a transfer.

This module is the single source of truth for lowering, validation, simulation and execution. A
transfer carries the stage of its own rank; the other end is the next stage, or the stage that it
names in place of a segment: `2.5SEND_F0` carries the output of stage 2 to the rank of stage 5, and
pairs with `5.2RECV_F0`. The output of a stage is sent once to each other rank that reads it,
addressed to the lowest stage that reads it on that rank. The gradients of the readers come back
separately, so that they are added up in the same place and order as in autograd.
"""

from __future__ import annotations

from gems.schedule.action import SEND_KINDS, Action, Kind
from gems.schedule.schedule import Schedule

_F = Kind.F
_B = Kind.B
_I = Kind.I
_R = Kind.R
_FREE = Kind.FREE
_OFFLOAD = Kind.OFFLOAD
_PREFETCH = Kind.PREFETCH
_SEND_F = Kind.SEND_F
_RECV_F = Kind.RECV_F
_SEND_B = Kind.SEND_B
_RECV_B = Kind.RECV_B
_TO_STAGE = {_SEND_F: 1, _RECV_F: -1, _SEND_B: -1, _RECV_B: 1}
_PARTNER = {_SEND_F: _RECV_F, _RECV_F: _SEND_F, _SEND_B: _RECV_B, _RECV_B: _SEND_B}
_SAME = {Kind.W: Kind.I, Kind.OFFLOAD: Kind.F, Kind.FREE: Kind.OFFLOAD, Kind.AWAIT: Kind.PREFETCH}


def dependencies(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return the actions whose data `action` needs.

    A receive needs the send that it pairs with, since the message carries that send's data.
    REDUCE_GRAD needs every backward of its own rank; these precede it in the list, so nothing is
    returned for it. Segments of a stage run one after the other, forward from the first and
    backward from the last; so do the strips of a micro-batch on each stage.
    """
    needs = schedule.needs.get(action)
    if needs is None:
        needs = schedule.needs[action] = (*_find(action, schedule), *_carry(action, schedule))
    return needs


def _find(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    kind, stage, micro_batch, direction, segment = action
    placement = schedule.placement
    if kind in _SAME:
        return (_named(_SAME[kind], stage, micro_batch, direction, segment),)
    if kind is _F:
        if segment:
            return (_named(kind, stage, micro_batch, direction, segment - 1),)
        return tuple([_output(action, other, schedule) for other in placement.predecessors[stage]])
    if kind is _B or kind is _I:
        place = stage, micro_batch, direction, segment
        brought_by = _F  # or by a recomputation, or a copy back
        for again in (_R, _PREFETCH):
            if schedule.has_any(again) and schedule.has(again, *place):
                brought_by = again
                break
        own = _named(brought_by, *place)
        if segment is not None and segment != schedule.last_segment(stage):
            return (own, _named(kind, stage, micro_batch, direction, segment + 1))
        return (own, *[_gradient(action, other, schedule) for other in placement.successors[stage]])
    if kind is _R:
        is_back = schedule.has(_PREFETCH, stage, micro_batch, direction, segment)
        return (_named(_PREFETCH if is_back else _F, stage, micro_batch, direction, segment),)
    if kind is _PREFETCH:
        is_waited_for = schedule.has(_FREE, stage, micro_batch, direction, segment)
        before = _FREE if is_waited_for else _OFFLOAD
        return (_named(before, stage, micro_batch, direction, segment),)
    if kind is _SEND_F:
        return (_named(_F, stage, micro_batch, direction, schedule.last_segment(stage)),)
    if kind is _SEND_B:
        made_by = schedule.backward_kind(stage, micro_batch, direction)
        return (_named(made_by, stage, micro_batch, direction, schedule.first_segment(stage)),)
    if kind is _RECV_F or kind is _RECV_B:
        return (partner_of(action),)
    return ()


def _carry(action: Action, schedule: Schedule) -> tuple[Action, ...]:
    """Return the neighbouring strip that hands rows, or their gradient, to this one."""
    kind, stage, micro_batch, direction, segment = action
    num_strips = schedule.num_strips
    if num_strips == 1 or micro_batch is None:
        return ()
    if kind is _F and micro_batch % num_strips:
        return (_named(_F, stage, micro_batch - 1, direction, segment),)
    if (kind is _B or kind is _I) and (micro_batch + 1) % num_strips:
        made_by = schedule.backward_kind(stage, micro_batch + 1, direction)
        return (_named(made_by, stage, micro_batch + 1, direction, segment),)
    return ()


def _named(
    kind: Kind, stage: int, micro_batch: int | None, direction: int, segment: int | None = None
) -> Action:
    """Build an action; the constructor of a named tuple takes three times as long."""
    return tuple.__new__(Action, (kind, stage, micro_batch, direction, segment))


def _transfer(
    kind: Kind, stage: int, other: int, micro_batch: int | None, direction: int
) -> Action:
    """Build the transfer of a stage to or from another one, which it names if no neighbour."""
    is_next = other == stage + _TO_STAGE[kind]
    return _named(kind, stage, micro_batch, direction, None if is_next else other)


def _output(action: Action, other: int, schedule: Schedule) -> Action:
    """Return the forward that makes an output that `action` reads, or the receive of the output."""
    _, stage, micro_batch, direction, _ = action
    ranks = schedule.placement.ranks[direction]
    here = ranks[stage]
    if not schedule.has_transfers or ranks[other] == here:
        return _named(_F, other, micro_batch, direction, schedule.last_segment(other))
    first = next(s for s in schedule.placement.successors[other] if ranks[s] == here)
    return _transfer(_RECV_F, first, other, micro_batch, direction)


def _gradient(action: Action, other: int, schedule: Schedule) -> Action:
    """Return the backward of a stage that reads an output, or the receive of its gradient."""
    _, stage, micro_batch, direction, _ = action
    ranks = schedule.placement.ranks[direction]
    if schedule.has_transfers and ranks[other] != ranks[stage]:
        return _transfer(_RECV_B, stage, other, micro_batch, direction)
    made_by = schedule.backward_kind(other, micro_batch, direction)
    return _named(made_by, other, micro_batch, direction, schedule.first_segment(other))


def stages_summed(action: Action, schedule: Schedule) -> tuple[int, ...]:
    """Return the stages whose gradients START_REDUCE or REDUCE_GRAD sums.

    REDUCE_GRAD sums the stages that have no START_REDUCE.
    """
    if action.kind is Kind.START_REDUCE:
        return (action.stage,)
    rank = schedule.placement.rank_of(0, action.stage)
    stages = sorted({stage for _, stage in schedule.placement.stages_on(rank)})
    if not schedule.has_any(Kind.START_REDUCE):
        return tuple(stages)
    started = {
        other.stage for other in schedule.rank_schedules[rank] if other.kind is Kind.START_REDUCE
    }
    return tuple(stage for stage in stages if stage not in started)


def transfers_after(action: Action, schedule: Schedule) -> list[tuple[Action, Action, int]]:
    """Return the send, the receive and the receiving rank of each transfer after a compute action.

    These transfers carry the data that the action makes.
    """
    kind, stage, micro_batch, direction, segment = action
    placement = schedule.placement
    ranks = placement.ranks[direction]
    if kind is _F and segment == schedule.last_segment(stage):
        send = _SEND_F
        first = {ranks[other]: other for other in reversed(placement.successors[stage])}
        ends = sorted(first.values())
    elif (kind is _B or kind is _I) and segment == schedule.first_segment(stage):
        send = _SEND_B
        ends = list(placement.predecessors[stage])
    else:
        return []
    transfers = []
    for other in ends:
        if ranks[other] != ranks[stage]:
            transfer = _transfer(send, stage, other, micro_batch, direction)
            transfers.append((transfer, partner_of(transfer), ranks[other]))
    return transfers


def other_stage(transfer: Action) -> int:
    """Return the stage at the other end of a transfer."""
    return (
        transfer.stage + _TO_STAGE[transfer.kind] if transfer.segment is None else transfer.segment
    )


def partner_of(transfer: Action) -> Action:
    """Return the other half of a transfer: the receive of a send, the send of a receive."""
    kind, stage, micro_batch, direction, other = transfer
    own_stage = None if other is None else stage
    return _named(_PARTNER[kind], other_stage(transfer), micro_batch, direction, own_stage)


def sender_of(transfer: Action) -> int:
    """Return the sending stage of a send or of its receive."""
    return transfer.stage if transfer.kind in SEND_KINDS else other_stage(transfer)


def boundary_of(transfer: Action) -> int:
    """Return the stage whose output, or the gradient of whose output, a transfer carries.

    It is the lower one of the two ends.
    """
    return min(transfer.stage, other_stage(transfer))

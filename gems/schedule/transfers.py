"""The two ends of a transfer, from its action alone.

In a chain a transfer joins neighbours. Between the stages of a graph (`Placement.feeders`) it names the stage at the
other end in place of a segment: `2.5SEND_F0` carries what stage 2 made to the rank of stage 5, and pairs with `5.2RECV_F0`.
"""

from __future__ import annotations

from gems.schedule.action import SEND_KINDS, Action, Kind

_TO_STAGE = {Kind.SEND_F: 1, Kind.RECV_F: -1, Kind.SEND_B: -1, Kind.RECV_B: 1}
_PARTNER = {
    Kind.SEND_F: Kind.RECV_F, Kind.RECV_F: Kind.SEND_F, Kind.SEND_B: Kind.RECV_B, Kind.RECV_B: Kind.SEND_B,
}  # fmt: skip


def other_stage(transfer: Action) -> int:
    """Return the stage at the other end of a transfer."""
    return transfer.stage + _TO_STAGE[transfer.kind] if transfer.segment is None else transfer.segment


def partner_of(transfer: Action) -> Action:
    """Return the other half of a transfer: the receive of a send, the send of a receive."""
    kind, stage, micro_batch, direction, other = transfer
    mine = None if other is None else stage
    return Action(_PARTNER[kind], other_stage(transfer), micro_batch, direction, mine)


def sender_of(transfer: Action) -> int:
    """Return the stage that sends, of a send or of its receive."""
    return transfer.stage if transfer.kind in SEND_KINDS else other_stage(transfer)


def boundary_of(transfer: Action) -> int:
    """Return the stage whose output a transfer carries, or whose output's gradient: the lower one of its ends."""
    return min(transfer.stage, other_stage(transfer))

"""Needs and transfers where stages form a graph: branches of a model on different ranks.

What a stage makes goes once to each other rank that reads it, in the name of the lowest stage that does so there. Each reader's
gradient comes back by itself, so that all are added up where autograd would, in its order. Stages run whole, with a
full backward.
"""

from __future__ import annotations

from gems.schedule.action import Action, Kind
from gems.schedule.placement import Placement
from gems.schedule.transfers import partner_of


def needs(action: Action, placement: Placement, has_transfers: bool) -> tuple[Action, ...]:
    """Return the actions whose data `action` needs; see `gems.schedule.dependencies`."""
    kind, stage, micro_batch, direction, _ = action
    here = placement.rank_of(direction, stage)

    def of(kind: Kind, stage: int, other: int | None = None) -> Action:
        return Action(kind, stage, micro_batch, direction, other)

    if kind is Kind.F:
        return tuple(
            of(Kind.F, feeder)
            if not has_transfers or placement.rank_of(direction, feeder) == here
            else of(Kind.RECV_F, first_reader(placement, direction, feeder, here), feeder)
            for feeder in placement.feeders_of(stage)
        )
    if kind is Kind.B:
        found = [of(Kind.F, stage)]
        for reader in placement.users_of(stage):
            is_here = not has_transfers or placement.rank_of(direction, reader) == here
            found.append(of(Kind.B, reader) if is_here else of(Kind.RECV_B, stage, reader))
        return tuple(found)
    if kind is Kind.SEND_F:
        return (of(Kind.F, stage),)
    if kind is Kind.SEND_B:
        return (of(Kind.B, stage),)
    if kind is Kind.RECV_F or kind is Kind.RECV_B:
        return (partner_of(action),)
    return ()


def sends_after(action: Action, placement: Placement) -> tuple[Action, ...]:
    """Return the sends that carry what a compute action makes to other ranks."""
    kind, stage, micro_batch, direction, _ = action
    here = placement.rank_of(direction, stage)
    if kind is Kind.F:
        return tuple(
            Action(Kind.SEND_F, stage, micro_batch, direction, readers[0])
            for rank, readers in readers_by_rank(placement, direction, stage).items()
            if rank != here
        )
    if kind is Kind.B:
        return tuple(
            Action(Kind.SEND_B, stage, micro_batch, direction, feeder)
            for feeder in placement.feeders_of(stage)
            if placement.rank_of(direction, feeder) != here
        )
    return ()


def first_reader(placement: Placement, direction: int, stage: int, rank: int) -> int:
    """Return the lowest stage on `rank` that reads what `stage` makes."""
    return readers_by_rank(placement, direction, stage)[rank][0]


def readers_by_rank(placement: Placement, direction: int, stage: int) -> dict[int, list[int]]:
    """Return the stages that read what `stage` makes, ascending, by their ranks."""
    found: dict[int, list[int]] = {}
    for reader in placement.users_of(stage):
        found.setdefault(placement.rank_of(direction, reader), []).append(reader)
    return found

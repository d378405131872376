"""Edges: ordered pairs of ranks between which messages travel, and the message order on each."""

from __future__ import annotations

from typing import NamedTuple

from gems.errors import ConfigError
from gems.schedule.action import RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import other_stage, partner_of
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule

BACKWARD_KINDS = frozenset((Kind.SEND_B, Kind.RECV_B))


class Edge(NamedTuple):
    """The messages from one rank of a pipeline to another, of activations or of gradients."""

    source: int
    destination: int
    is_backward: bool


def edges_of(placement: Placement) -> list[Edge]:
    """Return the edges between the ranks of neighbouring stages, in order."""
    edges = set()
    for direction in range(placement.num_directions):
        for stage in range(1, placement.num_stages):
            here = placement.rank_of(direction, stage)
            for other in placement.predecessors[stage]:
                there = placement.rank_of(direction, other)
                if here != there:
                    edges |= {Edge(there, here, False), Edge(here, there, True)}
    return sorted(edges)


def check_message_order(schedule: Schedule, transport: str) -> None:
    """Check that each edge of a lowered list sends and receives in the same order.

    Process groups match messages by their order, whereas MPI matches them by tags.

    Raises:
        ConfigError: an edge receives in another order; the error names the first such receive.
    """
    sent: dict[Edge, list[Action]] = {}
    received: dict[Edge, list[Action]] = {}
    for rank, action in schedule.actions():
        if action.kind not in SEND_KINDS | RECV_KINDS:
            continue
        peer = schedule.placement.rank_of(action.direction, other_stage(action))
        is_backward = action.kind in BACKWARD_KINDS
        if action.kind in SEND_KINDS:
            sent.setdefault(Edge(rank, peer, is_backward), []).append(action)
        else:
            received.setdefault(Edge(peer, rank, is_backward), []).append(action)
    for edge, receives in sorted(received.items()):
        for receive, send in zip(receives, sent[edge], strict=True):
            if send != partner_of(receive):
                raise ConfigError(
                    "machine.transport",
                    transport,
                    f"matches messages by their order, and rank {edge.destination} of"
                    f" {schedule.name} posts {receive} where rank {edge.source} sends {send}",
                    "use machine.transport=mpi or host",
                )

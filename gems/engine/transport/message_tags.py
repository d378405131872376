"""Peers and tags of the messages of a schedule."""

from __future__ import annotations

from collections.abc import Sequence

from gems.errors import ConfigError
from gems.schedule.action import Action, Kind
from gems.schedule.dependencies import boundary_of, other_stage, sender_of
from gems.schedule.edges import BACKWARD_KINDS
from gems.schedule.schedule import Schedule


def message_tag(action: Action, index: int, num_stages: int, max_tensors: int) -> int:
    """Return the tag of tensor `index` of a transfer.

    A number for (micro-batch, sending stage, tensor).
    Forward and backward need no tags of their own, since each way has its own links.
    """
    assert action.micro_batch is not None
    sender = sender_of(action)
    return (action.micro_batch * num_stages + sender) * max_tensors + index


class MessageTags:
    """Peers and tags of a schedule whose boundaries have at most `boundary_size` tensors."""

    def __init__(self, schedule: Schedule, boundary_size: int, max_tag: int) -> None:
        """Check that this MPI has a tag for each message of a step.

        Raises:
            ConfigError: it has not.
        """
        self._schedule = schedule
        self._boundary_size = boundary_size
        # a stage sends a gradient to each of its predecessors
        self._max_tensors = boundary_size * max(1, *map(len, schedule.placement.predecessors))
        last = Action(Kind.SEND_B, schedule.num_stages - 1, schedule.num_micro_batches)
        if message_tag(last, 0, schedule.num_stages, self._max_tensors) > max_tag:
            raise ConfigError(
                "parallel.micro_batches",
                schedule.num_micro_batches,
                f"this MPI has message tags up to {max_tag} only",
                "use fewer micro-batches",
            )

    def peer(self, action: Action) -> int:
        """Return the rank of the pipeline at the other end of a transfer."""
        return self._schedule.placement.rank_of(action.direction, other_stage(action))

    def tags(self, action: Action, num_tensors: int) -> Sequence[int]:
        """Return the tags of the tensors of a transfer."""
        first = 0
        if action.kind in BACKWARD_KINDS:
            predecessors = self._schedule.placement.predecessors[sender_of(action)]
            first = self._boundary_size * predecessors.index(boundary_of(action))
        start = message_tag(action, first, self._schedule.num_stages, self._max_tensors)
        return range(start, start + num_tensors)

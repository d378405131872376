"""Routes: between which ranks and under which tags the messages of a schedule travel."""

from __future__ import annotations

from gems.errors import ConfigError
from gems.schedule.action import Action, Kind
from gems.schedule.dependencies import boundary_of, other_stage, sender_of
from gems.schedule.schedule import Schedule

_BACKWARD = (Kind.SEND_B, Kind.RECV_B)


def tag_of(action: Action, index: int, num_stages: int, max_tensors: int) -> int:
    """Return the tag of tensor `index` of a transfer: one number for each (micro-batch, stage of the sender, way, tensor).

    The direction is not in it: each direction has a communicator of its own. In a graph a stage may send several gradients
    back, whose tensors are numbered through.
    """
    sender = sender_of(action)
    assert action.micro_batch is not None
    return ((action.micro_batch * num_stages + sender) * 2 + (action.kind in _BACKWARD)) * max_tensors + index


def first_index(action: Action, schedule: Schedule, largest: int) -> int:
    """Return the number of a transfer's first tensor among those that its stage sends that way.

    A stage of a graph sends a gradient to each of its feeders; `largest` is the most tensors of any boundary.
    """
    if action.kind not in _BACKWARD:
        return 0
    return largest * schedule.placement.feeders_of(sender_of(action)).index(boundary_of(action))


def most_tensors(schedule: Schedule, largest: int) -> int:
    """Return the most tensors that a stage sends one way."""
    placement = schedule.placement
    return largest * max(len(placement.feeders_of(stage)) or 1 for stage in range(schedule.num_stages))


def peer_of(action: Action, schedule: Schedule) -> int:
    """Return the rank of the pipeline at the other end of a transfer."""
    return schedule.placement.rank_of(action.direction, other_stage(action))


def check_tags(schedule: Schedule, max_tensors: int, max_tag: int) -> None:
    """Check that this MPI has a tag for every message of a step.

    Raises:
        ConfigError: it has not.
    """
    top = Action(Kind.SEND_B, schedule.num_stages - 1, schedule.num_micro_batches)
    if tag_of(top, 0, schedule.num_stages, max_tensors) > max_tag:
        raise ConfigError(
            "parallel.micro_batches", schedule.num_micro_batches,
            f"this MPI has message tags up to {max_tag} only", "use fewer micro-batches",
        )  # fmt: skip

"""The memory model: the memory of a rank along its schedule, and its peak for every partition."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from itertools import pairwise
from types import EllipsisType
from typing import Any, NamedTuple

import numpy as np

from gems.memory.slots import StageKey, assign_slots, split_stages
from gems.profile import ModelProfile
from gems.profile.spans import RankCosts, Spans, Table
from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, RANK_KINDS, Action, Kind
from gems.schedule.costs import StageCosts
from gems.schedule.ledger import Ledger
from gems.schedule.schedule import Schedule

_F = Kind.F
_B = Kind.B
_I = Kind.I
_W = Kind.W
_STEP = Kind.STEP
_PREFETCH = Kind.PREFETCH
Where = tuple[int, int] | EllipsisType  # one entry of a table, or all of it
# a buffer such as a running mean is in the layer, and in the message that averages it
MESSAGE_COPIES = 2


@dataclass(frozen=True, slots=True)
class Optimizer:
    """The memory that training keeps for each byte of parameters.

    It consists of the parameters, their gradient, and `states` of the optimizer. The average of the
    weights counts as one more state. In mixed precision there is also a copy of half the size.
    """

    states: int
    has_low_copy: bool = False

    def static_bytes(self, params: Any, buffers: Any) -> Any:
        """Return the bytes that parameters and buffers take throughout a step.

        The arguments are numbers or whole tables.
        """
        return (
            (2 + self.states) * params + self.has_low_copy * params // 2 + MESSAGE_COPIES * buffers
        )


# after the name of an optimizer
AVERAGED = "+average"
MIXED = "+mixed"
OPTIMIZERS = {
    f"{name}{average}{mixed}": Optimizer(states + bool(average), bool(mixed))
    for name, states in (("sgd", 1), ("sgd_plain", 0), ("adam", 2))
    for average in ("", AVERAGED)
    for mixed in ("", MIXED)
}


def static_blocks(
    profile: ModelProfile,
    schedule: Schedule,
    rank: int,
    boundaries: Sequence[int],
    optimizer: Optimizer,
) -> Iterator[int]:
    """Yield the size in bytes of each allocation that a rank holds throughout a step.

    These are the memory of libraries, parameters, their gradients and the optimizer's state,
    buffers, and the images of the step.
    """
    yield profile.library_bytes
    directions = list(schedule.whole_directions().values())
    for direction, stage in schedule.placement.stages_on(rank):
        for layer in profile.layers[boundaries[stage] : boundaries[stage + 1]]:
            yield from (layer.param_bytes,) * (2 + optimizer.states)
            yield from (layer.param_bytes // 2,) * optimizer.has_low_copy
            yield from (layer.buffer_bytes,) * MESSAGE_COPIES
        if stage == 0:
            yield from (profile.input_bytes,) * directions.count(direction)


class HeldCounts(NamedTuple):
    """The number of micro-batches of a stage and direction that hold each kind of tensor."""

    stashes: int = 0  # saved tensors, between forward and backward
    weights: int = 0  # tensors for W, between I and W
    # from the posting of the receive to the end of the backward (of W if split; of the forward if
    # the inputs are offloaded)
    inputs: int = 0
    # received output gradients, for the same time, except the one in use by the running backward
    gradients: int = 0
    outputs: int = 0  # in sends that may last until the next action ends
    input_gradients: int = 0  # likewise
    images: int = 0  # for the whole step
    slots: int = 0  # of CUDA graphs, for the whole step
    split_slots: int = 0  # slots of a split backward


# the tables of `Spans` with the bytes of each field of HeldCounts, and with the transients of each
# kind of action
TABLES = (
    "stash",
    "held_for_weights",
    "given",
    "given_back",
    "handed_on",
    "handed_back",
    "given",
    "slot_pool",
    "split_slot_pool",
)
_TRANSIENTS = {
    Kind.F: "forward_peak",
    Kind.R: "forward_peak",
    Kind.B: "backward_peak",
    Kind.I: "input_gradient_peak",
    Kind.W: "weight_gradient_peak",
}
_TRANSFERRED = {
    Kind.RECV_F: "inputs",
    Kind.RECV_B: "gradients",
    Kind.SEND_F: "outputs",
    Kind.SEND_B: "input_gradients",
}


Counts = dict[StageKey, dict[str, int]]  # the fields of HeldCounts by stage


def boundary_tensors(
    schedule: Schedule, rank: int, has_slots: bool = False
) -> tuple[Counts, Iterator[tuple[Action, bool]]]:
    """Return counts of boundary tensors, images and slots, and the actions that change them.

    A compute action comes twice, while it runs (False) and after it has run (True); other actions
    come once (True). For a stage in segments, the first segment reads the stage's inputs and makes
    their gradients, and the last one makes the outputs and reads their gradients.
    """
    counts = {
        key: dict.fromkeys(HeldCounts._fields, 0) for key in schedule.placement.stages_on(rank)
    }
    directions = list(schedule.whole_directions().values())
    for (direction, stage), stage_counts in counts.items():
        stage_counts["images"] = directions.count(direction) if stage == 0 else 0
    if has_slots:
        split = split_stages(schedule, rank)
        for key, number in assign_slots(schedule, rank).counts.items():
            counts[key]["split_slots" if key in split else "slots"] = number
    return counts, _count_boundary(schedule, rank, counts, has_slots)


def _count_boundary(
    schedule: Schedule, rank: int, counts: Counts, has_slots: bool
) -> Iterator[tuple[Action, bool]]:
    for action in schedule.rank_schedules[rank]:
        kind, stage, _, direction, segment = action
        is_compute = kind in COMPUTE_KINDS
        is_backward = kind is _B or kind is _I
        if kind in _TRANSFERRED:
            counts[direction, stage][_TRANSFERRED[kind]] += 1
        elif is_compute:
            is_at_end = segment == schedule.last_segment(stage)
            has_next = stage < schedule.num_stages - 1
            is_given = is_backward and is_at_end and has_next
            # without slots, into which they are copied, they count among the transients
            counts[direction, stage]["gradients"] -= is_given and not has_slots
            yield action, False
            counts[direction, stage]["gradients"] -= is_given and has_slots
        if is_compute or kind in RANK_KINDS:
            for stage_counts in counts.values():  # earlier sends have completed
                stage_counts["outputs"] = stage_counts["input_gradients"] = 0
        if is_compute:
            if is_at_end and has_next:
                counts[direction, stage]["gradients"] += (kind is _I) - (kind is _W)
            is_last_reader = (
                kind is _F if schedule.inputs_leave(*action[1:4]) else kind is _B or kind is _W
            )
            if is_last_reader and not segment:
                counts[direction, stage]["inputs"] -= stage > 0
            # handed to another stage of this rank without a message
            if kind is _F and is_at_end and (direction, stage + 1) in counts:
                counts[direction, stage + 1]["inputs"] += 1
            if is_backward and not segment and (direction, stage - 1) in counts:
                counts[direction, stage - 1]["gradients"] += 1
        yield action, True


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The tensors that a rank holds, by stage, during an action of kind `kind` on stage `active`.

    `active` is None at the optimizer step.
    """

    counts: tuple[tuple[StageKey, HeldCounts], ...]
    active: StageKey | None
    kind: Kind

    def covers(self, other: Snapshot) -> bool:
        """Return whether every count is at least that in `other`, in the same kind of action."""
        return (self.active, self.kind) == (other.active, other.kind) and all(
            count >= other_count
            for (_, counts), (_, others) in zip(self.counts, other.counts, strict=True)
            for count, other_count in zip(counts, others, strict=True)
        )


def peak_snapshots(schedule: Schedule, rank: int, has_slots: bool = False) -> tuple[Snapshot, ...]:
    """Return the snapshots of a rank's lowered schedule that may be its peak.

    No snapshot covers another. Bytes that a copy moves to host memory count as freed when the copy
    is posted. The slots of CUDA graphs (`has_slots`) contain everything that an action needs.
    """
    ones = (1.0,) * schedule.num_stages
    zeros = (0.0,) * schedule.num_stages
    # in units of one stash; tensors for W are counted separately
    ledger = Ledger(
        schedule, StageCosts(zeros, zeros, zeros, ones, held_for_weights=zeros, boundary=zeros)
    )
    counts, actions = boundary_tensors(schedule, rank, has_slots)
    seen: set[Snapshot] = set()
    snapshots: list[Snapshot] = []

    def record(active: StageKey | None, kind: Kind) -> None:
        snapshot = Snapshot(
            tuple((key, HeldCounts(**stage_counts)) for key, stage_counts in counts.items()),
            active,
            kind,
        )
        if snapshot not in seen and not any(other.covers(snapshot) for other in snapshots):
            snapshots[:] = [*(other for other in snapshots if not snapshot.covers(other)), snapshot]
        seen.add(snapshot)

    for action, has_run in actions:
        kind = action.kind
        key = (action.direction, action.stage)
        if kind in RANK_KINDS or (has_slots and kind in COMPUTE_KINDS):
            record(None, _STEP)
        elif kind in COPY_KINDS:
            counts[key]["stashes"] += 1 if kind is _PREFETCH else -1
        elif kind in COMPUTE_KINDS and has_run:
            counts[key]["stashes"] += int(ledger.brings(action))
            counts[key]["weights"] += (kind is _I) - (kind is _W)
        elif kind in COMPUTE_KINDS:
            counts[key]["stashes"] -= int(ledger.leaves(action))
            record(key, kind)
    return tuple(snapshots)


class MemoryModel:
    """The prediction of each rank's peak in allocated bytes, in the order of its schedule.

    It covers libraries, parameters, gradients, optimizer state, buffers, activations in flight,
    boundary tensors, the largest transient, pending sends, and the images of the whole step.
    `gems.memory.reserved` predicts what torch's allocator reserves beyond that.
    """

    def __init__(self, spans: Spans, optimizer: Optimizer) -> None:
        self._spans = spans
        self._is_captured = spans.profile.is_captured
        self._static: Table = optimizer.static_bytes(spans.params, spans.buffers)

    def rank_costs(self, schedule: Schedule) -> tuple[RankCosts, ...]:
        """Return the bytes of each rank of a lowered schedule, as tables over its layers."""
        known: dict[object, RankCosts] = {}
        costs = []
        for rank in range(schedule.num_ranks):
            keys = schedule.placement.stages_on(rank)
            snapshots = peak_snapshots(schedule, rank, self._is_captured)
            if (keys, snapshots) not in known:
                stages = tuple(sorted({stage for _, stage in keys}))
                tables = tuple(
                    tuple(cache(partial(self._of_stage, snapshot, stage, ...)) for stage in stages)
                    for snapshot in snapshots
                )
                if len(stages) == 1:
                    tables = (
                        (
                            cache(
                                lambda snapshot=tables: reduce(
                                    np.maximum, (table() for (table,) in snapshot)
                                )
                            ),
                        ),
                    )
                known[keys, snapshots] = RankCosts(stages, tables)
            costs.append(known[keys, snapshots])
        return tuple(costs)

    def peak_bytes(self, schedule: Schedule, boundaries: Sequence[int]) -> tuple[int, ...]:
        """Return each rank's peak bytes under one partition, without a table over all others."""
        spans = tuple(pairwise(boundaries))
        peaks = []
        for rank in range(schedule.num_ranks):
            stages = sorted({stage for _, stage in schedule.placement.stages_on(rank)})
            snapshots = peak_snapshots(schedule, rank, self._is_captured)
            peaks.append(
                max(
                    sum(float(self._of_stage(snapshot, s, spans[s])) for s in stages)
                    for snapshot in snapshots
                )
            )
        return tuple(map(round, peaks))

    def _of_stage(self, snapshot: Snapshot, stage: int, where: Where) -> Any:
        """Return the bytes of one stage of a rank at a snapshot, in all directions of the rank."""
        # the memory of libraries counts once, with the first stage of the rank
        is_first = stage == min(key[1] for key, _ in snapshot.counts)
        total: Any = float(self._spans.profile.library_bytes * is_first)
        for key, counts in snapshot.counts:
            if key[1] != stage:
                continue
            total = total + self._static[where]
            for number, table in zip(counts, TABLES, strict=True):
                if number:
                    total = total + number * getattr(self._spans, table)[where]
            if snapshot.active == key:
                total = total + getattr(self._spans, _TRANSIENTS[snapshot.kind])[where]
        return total


def time_costs(spans: Spans, schedule: Schedule) -> tuple[RankCosts, ...]:
    """Return each rank's compute seconds of a step, forward and backward of all micro-batches."""
    directions = list(schedule.directions().values())
    listed: dict[tuple[tuple[int, int], ...], RankCosts] = {}
    for rank in range(schedule.num_ranks):
        counted: dict[int, int] = {}
        for direction, stage in schedule.placement.stages_on(rank):
            counted[stage] = counted.get(stage, 0) + directions.count(direction)
        key = tuple(sorted(counted.items()))
        tables = tuple(cache(partial(np.multiply, number, spans.time_s)) for _, number in key)
        listed.setdefault(key, RankCosts(tuple(stage for stage, _ in key), (tables,)))
    return tuple(listed.values())

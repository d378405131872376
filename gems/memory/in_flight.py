"""What a rank holds during each action of its schedule, in counts of micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, Action, Kind
from gems.schedule.costs import StageCosts
from gems.schedule.ledger import Ledger
from gems.schedule.schedule import Schedule

StageKey = tuple[int, int]  # (direction, stage)


@dataclass(frozen=True, slots=True)
class HeldCounts:
    """How many micro-batches of a stage and direction hold each kind of tensor.

    Attributes:
        stashes: saved tensors, between forward and backward.
        weights: what W needs, between I and W.
        inputs: boundary tensors, from the posting of their receive to the end of the backward (of W if it is split).
        gradients: received gradients likewise, except the one that is used by the running backward.
        outputs: tensors given to a send that may not have left before the next action ends.
        input_gradients: gradients given to a send likewise.
        images: those of the whole step.
    """

    stashes: int = 0
    weights: int = 0
    inputs: int = 0
    gradients: int = 0
    outputs: int = 0
    input_gradients: int = 0
    images: int = 0


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What a rank holds, by stage, during an action of kind `kind` on stage `active`; None at the optimizer step."""

    counts: tuple[tuple[StageKey, HeldCounts], ...]
    active: StageKey | None
    kind: Kind

    def covers(self, other: Snapshot) -> bool:
        """Whether at least as much of everything is held as in `other`."""
        return all(
            mine >= theirs
            for (_, counts), (_, others) in zip(self.counts, other.counts, strict=True)
            for mine, theirs in zip(_numbers(counts), _numbers(others), strict=True)
        )


def peak_snapshots(schedule: Schedule, rank: int) -> tuple[Snapshot, ...]:
    """Return the snapshots of a rank's lowered schedule that may be its peak: none covers another.

    What a copy moves to host memory counts as freed when the copy is posted.
    """
    replay = _Replay(schedule, rank)
    for action in schedule.rows[rank]:
        replay.run(action)
    return tuple(replay.found)


class BoundaryTensors:
    """Counts the tensors between stages, and the images, along a rank's schedule, in the fields of `HeldCounts`.

    Call `begin` before a compute action, `end` after it, and `post` for transfers. Of a stage in segments the first one
    reads the stage's inputs and makes their gradients, the last one makes the outputs and reads their gradients.
    """

    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule = schedule
        self.held = schedule.placement.stages_on(rank)
        directions = schedule.directions()
        self.counts = {held: dict.fromkeys(HeldCounts.__dataclass_fields__, 0) for held in self.held}
        for direction, stage in self.held:
            if stage == 0:
                self.counts[direction, 0]["images"] = sum(d == direction for d in directions.values())

    def post(self, action: Action) -> None:
        """Count what a receive allocates or a send holds."""
        self.counts[action.direction, action.stage][_TRANSFERRED[action.kind]] += 1

    def begin(self, action: Action) -> None:
        """Move the output gradient of a backward into what that backward needs."""
        if action.kind in (Kind.B, Kind.I) and self._is_at_end(action):
            mine = self.counts[action.direction, action.stage]
            mine["gradients"] -= action.stage < self._schedule.num_stages - 1

    def end(self, action: Action) -> None:
        """Count what an action passes to neighbours on this rank, and free what it has read for the last time."""
        self.settle()
        kind, stage, _, direction, segment = action
        mine = self.counts[direction, stage]
        if self._is_at_end(action):
            if kind is Kind.F:
                self._pass_on((direction, stage + 1), "inputs")
            elif stage < self._schedule.num_stages - 1:
                mine["gradients"] += kind is Kind.I
                mine["gradients"] -= kind is Kind.W
        if not segment:
            if kind in (Kind.B, Kind.I):
                self._pass_on((direction, stage - 1), "gradients")
            if kind in (Kind.B, Kind.W):
                mine["inputs"] -= stage > 0

    def settle(self) -> None:
        """Count everything sent before the last action as gone."""
        for counts in self.counts.values():
            counts["outputs"] = counts["input_gradients"] = 0

    def _pass_on(self, held: StageKey, what: str) -> None:
        """Count what another stage of this rank receives without a message."""
        if held in self.counts:
            self.counts[held][what] += 1

    def _is_at_end(self, action: Action) -> bool:
        return action.segment == self._schedule.last_segment(action.stage)


_TRANSFERRED = {
    Kind.RECV_F: "inputs", Kind.RECV_B: "gradients", Kind.SEND_F: "outputs", Kind.SEND_B: "input_gradients",
}  # fmt: skip


class _Replay:
    def __init__(self, schedule: Schedule, rank: int) -> None:
        ones, zeros = (1.0,) * schedule.num_stages, (0.0,) * schedule.num_stages
        # in units of one stash; what W needs is counted apart
        self._ledger = Ledger(schedule, StageCosts(zeros, zeros, zeros, ones, held_for_weights=zeros, boundary=zeros))
        self._boundary = BoundaryTensors(schedule, rank)
        self._seen: set[Snapshot] = set()
        self.found: list[Snapshot] = []

    def run(self, action: Action) -> None:
        kind, held = action.kind, (action.direction, action.stage)
        if kind in (Kind.REDUCE_GRAD, Kind.STEP):
            self._boundary.settle()
            self._record(None, Kind.STEP)
        elif kind in _TRANSFERRED:
            self._boundary.post(action)
        elif kind in COPY_KINDS:
            self._boundary.counts[held]["stashes"] += 1 if kind is Kind.PREFETCH else -1
        elif kind in COMPUTE_KINDS:
            self._compute(action, held)

    def _compute(self, action: Action, held: StageKey) -> None:
        kind, mine = action.kind, self._boundary.counts[held]
        mine["stashes"] -= int(self._ledger.leaves(action))
        self._boundary.begin(action)
        self._record(held, kind)
        self._boundary.end(action)
        mine["stashes"] += int(self._ledger.brings(action))
        mine["weights"] += (kind is Kind.I) - (kind is Kind.W)

    def _record(self, active: StageKey | None, kind: Kind) -> None:
        snapshot = Snapshot(
            tuple((held, HeldCounts(**self._boundary.counts[held])) for held in self._boundary.held), active, kind
        )
        if snapshot in self._seen:
            return
        self._seen.add(snapshot)
        alike = [other for other in self.found if (other.active, other.kind) == (active, kind)]
        if any(other.covers(snapshot) for other in alike):
            return
        covered = {id(other) for other in alike if snapshot.covers(other)}
        self.found = [other for other in self.found if id(other) not in covered] + [snapshot]


def _numbers(counts: HeldCounts) -> Iterable[int]:
    return (
        counts.stashes, counts.weights, counts.inputs, counts.gradients, counts.outputs, counts.input_gradients,
        counts.images,
    )  # fmt: skip

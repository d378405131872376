"""Moments: what a rank holds while it runs each action of its list, in counts of micro-batches."""

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
    """Of one stage in one direction: how many micro-batches hold what.

    `stashes` are those between forward and backward, `weights` those between I and W. `inputs` are boundary tensors
    from the posting of their receive to the end of the backward (of W where it is split, which may read them),
    `gradients` received gradients likewise but for the one under backward, `outputs` and `input_gradients` what was
    handed to a send and may not have left before the next action ends. `images` are those of the whole step.
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
    """What a rank holds, by stage, while it runs an action of kind `kind` on `active`; None at the optimizer step."""

    counts: tuple[tuple[StageKey, HeldCounts], ...]
    active: StageKey | None
    kind: Kind

    def covers(self, other: Snapshot) -> bool:
        """Whether as much as in `other` is held of everything, in the same action."""
        return all(
            mine >= theirs
            for (_, counts), (_, others) in zip(self.counts, other.counts, strict=True)
            for mine, theirs in zip(_numbers(counts), _numbers(others), strict=True)
        )


def peak_snapshots(schedule: Schedule, rank: int) -> tuple[Snapshot, ...]:
    """Return the snapshots of a rank's lowered list that may be its peak: none is covered by another one.

    Of copies to host memory, what leaves is counted as gone when its copy is posted.
    """
    walk = _Walk(schedule, rank)
    for action in schedule.rows[rank]:
        walk.play(action)
    return tuple(walk.found)


class BoundaryTensors:
    """HeldCounts what a rank holds while its list is played, stage by stage: `counts` has the fields of `HeldCounts`.

    Here are the tensors that cross between stages and the images; what stages keep is counted by who asks. `begin` is
    called before a compute action is played, `end` behind it, `post` for transfers. Of a stage in segments the first one
    reads and hands back what is outside the stage, and the last one makes and is given it.
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
        """Count what a receive allocates, or a send still holds."""
        self.counts[action.direction, action.stage][_CROSSING[action.kind]] += 1

    def begin(self, action: Action) -> None:
        """Take the gradient that a backward was given into what that backward needs."""
        if action.kind in (Kind.B, Kind.I) and self._is_at_end(action):
            mine = self.counts[action.direction, action.stage]
            mine["gradients"] -= action.stage < self._schedule.num_stages - 1

    def end(self, action: Action) -> None:
        """Count what an action leaves to its neighbours, and what it has read for the last time."""
        self.settle()
        kind, stage, _, direction, segment = action
        mine = self.counts[direction, stage]
        if self._is_at_end(action):
            if kind is Kind.F:
                self._hand((direction, stage + 1), "inputs")
            elif stage < self._schedule.num_stages - 1:
                mine["gradients"] += kind is Kind.I
                mine["gradients"] -= kind is Kind.W
        if not segment:
            if kind in (Kind.B, Kind.I):
                self._hand((direction, stage - 1), "gradients")
            if kind in (Kind.B, Kind.W):
                mine["inputs"] -= stage > 0

    def settle(self) -> None:
        """Count what was sent before the last action as gone."""
        for counts in self.counts.values():
            counts["outputs"] = counts["input_gradients"] = 0

    def _hand(self, held: StageKey, what: str) -> None:
        """Count what a neighbour on this rank takes without a message."""
        if held in self.counts:
            self.counts[held][what] += 1

    def _is_at_end(self, action: Action) -> bool:
        return action.segment == self._schedule.last_segment(action.stage)


_CROSSING = {
    Kind.RECV_F: "inputs", Kind.RECV_B: "gradients", Kind.SEND_F: "outputs", Kind.SEND_B: "input_gradients",
}  # fmt: skip


class _Walk:
    def __init__(self, schedule: Schedule, rank: int) -> None:
        ones, zeros = (1.0,) * schedule.num_stages, (0.0,) * schedule.num_stages
        # in units of one stash; what W needs is counted apart
        self._ledger = Ledger(schedule, StageCosts(zeros, zeros, zeros, ones, held_for_weights=zeros, boundary=zeros))
        self._crossings = BoundaryTensors(schedule, rank)
        self._seen: set[Snapshot] = set()
        self.found: list[Snapshot] = []

    def play(self, action: Action) -> None:
        kind, held = action.kind, (action.direction, action.stage)
        if kind in (Kind.REDUCE_GRAD, Kind.STEP):
            self._crossings.settle()
            self._record(None, Kind.STEP)
        elif kind in _CROSSING:
            self._crossings.post(action)
        elif kind in COPY_KINDS:
            self._crossings.counts[held]["stashes"] += 1 if kind is Kind.PREFETCH else -1
        elif kind in COMPUTE_KINDS:
            self._compute(action, held)

    def _compute(self, action: Action, held: StageKey) -> None:
        kind, mine = action.kind, self._crossings.counts[held]
        mine["stashes"] -= int(self._ledger.leaves(action))
        self._crossings.begin(action)
        self._record(held, kind)
        self._crossings.end(action)
        mine["stashes"] += int(self._ledger.brings(action))
        mine["weights"] += (kind is Kind.I) - (kind is Kind.W)

    def _record(self, active: StageKey | None, kind: Kind) -> None:
        snapshot = Snapshot(
            tuple((held, HeldCounts(**self._crossings.counts[held])) for held in self._crossings.held), active, kind
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

"""Moments: what a rank holds while it runs each action of its list, in counts of micro-batches."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule

Held = tuple[int, int]  # (direction, stage)


@dataclass(frozen=True, slots=True)
class Counts:
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
class Moment:
    """What a rank holds, by stage, while it runs an action of kind `kind` on `active`; None at the optimizer step."""

    counts: tuple[tuple[Held, Counts], ...]
    active: Held | None
    kind: Kind

    def covers(self, other: Moment) -> bool:
        """Whether as much as in `other` is held of everything, in the same action."""
        return all(
            mine >= theirs
            for (_, counts), (_, others) in zip(self.counts, other.counts, strict=True)
            for mine, theirs in zip(_numbers(counts), _numbers(others), strict=True)
        )


def moments_of(schedule: Schedule, rank: int) -> tuple[Moment, ...]:
    """Gives the moments of a rank's lowered list that may be its peak: none is covered by another one.

    Of copies to host memory, what leaves is counted as gone when its copy is posted.
    """
    walk = _Walk(schedule, rank)
    for action in schedule.rows[rank]:
        walk.play(action)
    return tuple(walk.found)


class _Walk:
    def __init__(self, schedule: Schedule, rank: int) -> None:
        self._schedule = schedule
        self._rank = rank
        self._held = schedule.placement.stages_on(rank)
        directions = schedule.directions()
        self._counts = {held: dict.fromkeys(Counts.__dataclass_fields__, 0) for held in self._held}
        for direction, stage in self._held:
            if stage == 0:
                self._counts[direction, 0]["images"] = sum(d == direction for d in directions.values())
        self._seen: set[Moment] = set()
        self.found: list[Moment] = []

    def play(self, action: Action) -> None:
        kind, held = action.kind, (action.direction, action.stage)
        if kind in (Kind.REDUCE_GRAD, Kind.STEP):
            self._settle()
            self._record(None, Kind.STEP)
            return
        mine = self._counts[held]
        if kind is Kind.RECV_F:
            mine["inputs"] += 1
        elif kind is Kind.RECV_B:
            mine["gradients"] += 1
        elif kind is Kind.SEND_F:
            mine["outputs"] += 1
        elif kind is Kind.SEND_B:
            mine["input_gradients"] += 1
        elif kind is Kind.OFFLOAD:
            mine["stashes"] -= 1
        elif kind is Kind.PREFETCH:
            mine["stashes"] += 1
        else:
            self._compute(action, held, mine)

    def _compute(self, action: Action, held: Held, mine: dict[str, int]) -> None:
        kind, (direction, stage) = action.kind, held
        is_last = stage == self._schedule.num_stages - 1
        if kind in (Kind.B, Kind.I):
            mine["stashes"] -= 1
            mine["gradients"] -= not is_last
        self._record(held, kind)
        self._settle()
        if kind in (Kind.F, Kind.R):
            again = self._schedule.has_any(Kind.R) and self._schedule.has(
                Kind.R, stage, action.micro_batch, direction
            )
            mine["stashes"] += not again or kind is Kind.R
            if kind is Kind.F:
                self._hand((direction, stage + 1), "inputs")
        if kind is Kind.I:
            mine["weights"] += 1
            mine["gradients"] += not is_last
        if kind in (Kind.B, Kind.I):
            self._hand((direction, stage - 1), "gradients")
        if kind is Kind.W:
            mine["weights"] -= 1
            mine["gradients"] -= not is_last
        if kind in (Kind.B, Kind.W):
            mine["inputs"] -= stage > 0

    def _hand(self, held: Held, what: str) -> None:
        """Counts what a neighbour on this rank takes without a message."""
        if held in self._counts:
            self._counts[held][what] += 1

    def _settle(self) -> None:
        """Counts what was sent before the last action as gone."""
        for counts in self._counts.values():
            counts["outputs"] = counts["input_gradients"] = 0

    def _record(self, active: Held | None, kind: Kind) -> None:
        moment = Moment(tuple((held, Counts(**self._counts[held])) for held in self._held), active, kind)
        if moment in self._seen:
            return
        self._seen.add(moment)
        alike = [other for other in self.found if (other.active, other.kind) == (active, kind)]
        if any(other.covers(moment) for other in alike):
            return
        covered = {id(other) for other in alike if moment.covers(other)}
        self.found = [other for other in self.found if id(other) not in covered] + [moment]


def _numbers(counts: Counts) -> Iterable[int]:
    return (
        counts.stashes, counts.weights, counts.inputs, counts.gradients, counts.outputs, counts.input_gradients,
        counts.images,
    )  # fmt: skip

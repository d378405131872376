"""A schedule: the ordered actions of every rank of one pipeline, for one step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from gems.schedule.action import RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.placement import Placement

_B = Kind.B
_I = Kind.I
_TRANSFERS = SEND_KINDS | RECV_KINDS
_MARKS = frozenset(
    {Kind.I, Kind.R, Kind.OFFLOAD, Kind.PREFETCH, Kind.FREE, Kind.AWAIT, Kind.START_REDUCE}
)


@dataclass(frozen=True, slots=True)
class Schedule:
    """The program of one step: the actions of each rank, in order.

    `num_micro_batches` counts all micro-batches of a step over both directions; each runs in one
    direction. If `num_strips` is above 1, that many consecutive micro-batches are the strips of one
    (`gems.schedule.strips`). `passes` names the passes that were applied to the compute-only list
    of a generator. `num_segments` has the number of segments of each stage (None if it runs whole).
    With `has_transfers`, data of other ranks comes only through transfers in the list. `needs`
    caches the answers of `gems.schedule.dependencies`.
    """

    name: str
    num_micro_batches: int
    placement: Placement
    rank_schedules: tuple[tuple[Action, ...], ...]
    passes: tuple[str, ...] = ()
    forward_only: bool = False
    num_strips: int = 1
    num_stages: int = field(init=False, repr=False, compare=False)
    num_segments: tuple[int | None, ...] = field(init=False, repr=False, compare=False)
    has_transfers: bool = field(init=False, repr=False, compare=False)
    needs: dict[Action, tuple[Action, ...]] = field(init=False, repr=False, compare=False)
    _marks: frozenset[tuple[object, ...]] = field(
        init=False, repr=False, compare=False
    )  # actions of _MARKS
    _marked: frozenset[Kind] = field(init=False, repr=False, compare=False)  # their kinds

    def __post_init__(self) -> None:
        marks = frozenset(
            action for actions in self.rank_schedules for action in actions if action[0] in _MARKS
        )
        last: dict[int, int] = {}
        in_segments: set[int] = set()
        for actions in self.rank_schedules:
            for kind, stage, _, _, segment in actions:
                if segment is not None and kind not in _TRANSFERS:
                    last[stage] = max(segment, last.get(stage, 0))
                    if segment == 0:
                        in_segments.add(stage)
        num_stages = self.placement.num_stages
        for name, value in (
            ("_marks", marks),
            ("_marked", frozenset(action[0] for action in marks)),
            ("num_stages", num_stages),
            (
                "num_segments",
                tuple(last[s] + 1 if s in in_segments else None for s in range(num_stages)),
            ),
            ("has_transfers", "add_transfers" in self.passes),
            ("needs", {}),
        ):
            object.__setattr__(self, name, value)

    def has(
        self,
        kind: Kind,
        stage: int,
        micro_batch: int | None,
        direction: int,
        segment: int | None = None,
    ) -> bool:
        """Return whether the list has this I, R or copy action of a stage (or segment)."""
        return (kind, stage, micro_batch, direction, segment) in self._marks

    def has_any(self, kind: Kind) -> bool:
        """Return whether the list has any I, R, copy action or START_REDUCE of that kind."""
        return kind in self._marked

    def inputs_leave(self, stage: int, micro_batch: int | None, direction: int) -> bool:
        """Return whether a stage's inputs are in host memory between forward and recompute.

        If they are, they count among the activations from the end of the forward on, and no longer
        as a received message.
        """
        place = stage, micro_batch, direction, self.first_segment(stage)
        return (
            self.placement.is_received(direction, stage)
            and self.has(Kind.R, *place)
            and self.has(Kind.OFFLOAD, *place)
        )

    def backward_kind(self, stage: int, micro_batch: int | None, direction: int) -> Kind:
        """Return the kind that makes the input gradient: I if the backward is split, else B."""
        segment = None if self.num_segments[stage] is None else 0
        return _I if (_I, stage, micro_batch, direction, segment) in self._marks else _B

    def first_segment(self, stage: int) -> int | None:
        """Return the segment that reads a stage's input; None if the stage runs whole."""
        return None if self.num_segments[stage] is None else 0

    def last_segment(self, stage: int) -> int | None:
        """Return the segment that makes a stage's output; None if the stage runs whole."""
        count = self.num_segments[stage]
        return None if count is None else count - 1

    def segments_of(self, stage: int) -> tuple[int | None, ...]:
        """Return the segments of a stage in order, or only None if it runs whole."""
        count = self.num_segments[stage]
        return (None,) if count is None else tuple(range(count))

    @property
    def has_split_backward(self) -> bool:
        """Whether any backward is split in two."""
        return Kind.I in self._marked

    @property
    def has_memory_actions(self) -> bool:
        """Whether any activations are recomputed or copied to host memory."""
        return Kind.R in self._marked or self.has_copies

    @property
    def has_copies(self) -> bool:
        """Whether activations leave for host memory, so that the bytes held depend on time, too."""
        return Kind.OFFLOAD in self._marked

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return self.placement.num_ranks

    @property
    def num_directions(self) -> int:
        """1, or 2 if the pipeline runs both ways."""
        return self.placement.num_directions

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Yield every (rank, action), rank by rank in the order of the list."""
        for rank, actions in enumerate(self.rank_schedules):
            for action in actions:
                yield rank, action

    def rank_of(self, action: Action) -> int:
        """Return the rank that must run `action`, for actions that belong to one stage."""
        return self.placement.rank_of(action.direction, action.stage)

    def directions(self) -> dict[int, int]:
        """Return the direction of each micro-batch."""
        firsts = {row[0] for row in self.placement.ranks}
        return {
            action.micro_batch: action.direction
            for rank in sorted(firsts)
            for action in self.rank_schedules[rank]
            if action.stage == 0 and action.kind is Kind.F and action.micro_batch is not None
        }

    @property
    def num_whole(self) -> int:
        """Micro-batches of a step, each with all of its strips."""
        return self.num_micro_batches // self.num_strips

    def whole_directions(self) -> dict[int, int]:
        """Return the direction of each micro-batch with all of its strips."""
        return {
            number // self.num_strips: direction for number, direction in self.directions().items()
        }

    def digest(self) -> str:
        """Return the SHA-256 of all actions as text, which ranks compare before the first step."""
        text = "\n".join(" ".join(map(str, actions)) for actions in self.rank_schedules)
        text += f"\nstrips {self.num_strips}" if self.num_strips > 1 else ""
        return hashlib.sha256(text.encode()).hexdigest()

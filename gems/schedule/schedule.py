"""A schedule: the ordered actions of every rank of one pipeline, for one step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass

from gems.schedule.action import Action, Kind
from gems.schedule.placement import Placement


@dataclass(frozen=True, slots=True)
class Schedule:
    """The program of one step: what each rank does, in order.

    `num_micro_batches` counts all of a step over both directions; a micro-batch runs in one direction.
    `passes` names what has been done to the compute-only list that a generator made.
    """

    name: str
    num_micro_batches: int
    placement: Placement
    rows: tuple[tuple[Action, ...], ...]
    passes: tuple[str, ...] = ()
    forward_only: bool = False

    @property
    def num_ranks(self) -> int:
        """Ranks of one pipeline."""
        return self.placement.num_ranks

    @property
    def num_stages(self) -> int:
        """Stages that the model is cut into."""
        return self.placement.num_stages

    @property
    def num_directions(self) -> int:
        """1, or 2 where the pipeline runs both ways."""
        return self.placement.num_directions

    @property
    def has_transfers(self) -> bool:
        """Whether transfers are in the list, so that data of other ranks comes only through them."""
        return "add_transfers" in self.passes

    def actions(self) -> Iterator[tuple[int, Action]]:
        """Gives every (rank, action), rank by rank in the order of the list."""
        for rank, row in enumerate(self.rows):
            for action in row:
                yield rank, action

    def rank_of(self, action: Action) -> int:
        """Gives the rank that must run `action`, for actions that belong to one stage."""
        return self.placement.rank_of(action.direction, action.stage)

    def directions(self) -> dict[int, int]:
        """Gives the direction of each micro-batch."""
        return {
            action.micro_batch: action.direction
            for _, action in self.actions()
            if action.kind is Kind.F and action.stage == 0 and action.micro_batch is not None
        }

    def digest(self) -> str:
        """Gives the SHA-256 of the text of all rows, which ranks compare before the first step."""
        text = "\n".join(" ".join(map(str, row)) for row in self.rows)
        return hashlib.sha256(text.encode()).hexdigest()

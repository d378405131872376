"""A schedule as JSON for other programs: schema gems.schedule/1, with strips gems.schedule/2."""

from __future__ import annotations

from typing import Any

from gems.errors import ConfigError
from gems.schedule.action import RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import other_stage
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule

SCHEMA = "gems.schedule/1"
WITH_STRIPS = "gems.schedule/2"


def to_json(schedule: Schedule) -> dict[str, Any]:
    """Return the dictionary of the schema; an action is [kind, stage, direction, micro_batch].

    With strips, micro-batches are counted and numbered in strips, `strips` per micro-batch; schema
    1 has no such field. An action of a segment also has the segment, and a transfer to or from a
    stage that is not a neighbour has that stage. `predecessors` are omitted for a chain of stages.
    """
    placement = schedule.placement
    return {
        "schema": SCHEMA if schedule.num_strips == 1 else WITH_STRIPS,
        "name": schedule.name,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "micro_batches": schedule.num_micro_batches,
        **({} if schedule.num_strips == 1 else {"strips": schedule.num_strips}),
        "directions": schedule.num_directions,
        "placement": [list(row) for row in placement.ranks],
        **({} if placement.is_chain else {"predecessors": list(map(list, placement.predecessors))}),
        "passes": list(schedule.passes),
        "actions": [list(map(_words, actions)) for actions in schedule.rank_schedules],
    }


def from_json(document: dict[str, Any]) -> Schedule:
    """Read a document of `to_json`.

    Raises:
        ConfigError: the schema is another one, or a field is missing or malformed.
    """
    schema = document.get("schema") if isinstance(document, dict) else None
    if schema not in (SCHEMA, WITH_STRIPS):
        raise ConfigError("schema", schema, f"allowed: {SCHEMA}, {WITH_STRIPS}")
    try:
        rank_schedules = tuple(
            tuple(_action(*words) for words in actions) for actions in document["actions"]
        )
        if int(document.get("strips", 1)) < 1:
            raise ValueError(f"strips of {document['strips']}")
        if len(rank_schedules) != int(document["ranks"]):
            raise ValueError(
                f"{len(rank_schedules)} lists of actions for {document['ranks']} ranks"
            )
        schedule = Schedule(
            name=str(document["name"]),
            num_micro_batches=int(document["micro_batches"]),
            placement=_placement(document),
            rank_schedules=rank_schedules,
            passes=tuple(map(str, document.get("passes", ()))),
            forward_only=not any(
                action.kind in (Kind.B, Kind.I) for actions in rank_schedules for action in actions
            ),
            num_strips=int(document.get("strips", 1)),
        )
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ConfigError("schedule", "json", f"not of schema {schema} ({error!r})") from error
    return schedule


def _placement(document: dict[str, Any]) -> Placement:
    ranks = tuple(tuple(map(int, row)) for row in document["placement"])
    num_ranks = int(document["ranks"])
    if len(ranks) != document["directions"] or any(len(row) != document["stages"] for row in ranks):
        raise ValueError("placement must give a rank to each stage in each direction")
    if not ranks or any(not 0 <= rank < num_ranks for row in ranks for rank in row):
        raise ValueError(f"placement must name ranks from 0 to {num_ranks - 1}")
    read = document.get("predecessors", document.get("feeders", ()))  # the key in earlier files
    return Placement(num_ranks, ranks, tuple(tuple(map(int, stages)) for stages in read))


def _words(action: Action) -> list[str | int | None]:
    kind, stage, micro_batch, direction, segment = action
    words = [kind.value, stage, direction, micro_batch]
    return words if segment is None else [*words, segment]


def _action(
    kind: str, stage: int, direction: int, micro_batch: int | None, segment: int | None = None
) -> Action:
    if not all(
        isinstance(number, int) for number in (stage, direction, micro_batch or 0, segment or 0)
    ):
        raise TypeError(f"no whole numbers in {[kind, stage, direction, micro_batch, segment]}")
    action = Action(Kind(kind), stage, micro_batch, direction)
    is_transfer = action.kind in SEND_KINDS | RECV_KINDS
    if segment is None or (is_transfer and segment == other_stage(action)):
        return action  # earlier files name neighbours, too
    return action._replace(segment=segment)

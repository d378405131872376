"""A schedule as JSON, the form that other programs read (schema gems.schedule/1)."""

from __future__ import annotations

from typing import Any

from gems.errors import ConfigError
from gems.schedule.action import Action, Kind
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule

SCHEMA = "gems.schedule/1"


def to_json(schedule: Schedule) -> dict[str, Any]:
    """Gives the dictionary of schema gems.schedule/1; an action is [kind, stage, direction, micro_batch]."""
    return {
        "schema": SCHEMA,
        "name": schedule.name,
        "ranks": schedule.num_ranks,
        "stages": schedule.num_stages,
        "micro_batches": schedule.num_micro_batches,
        "directions": schedule.num_directions,
        "placement": [list(row) for row in schedule.placement.ranks],
        "passes": list(schedule.passes),
        "actions": [
            [[action.kind.value, action.stage, action.direction, action.micro_batch] for action in row]
            for row in schedule.rows
        ],
    }


def from_json(document: dict[str, Any]) -> Schedule:
    """Reads what `to_json` wrote.

    Raises:
        ConfigError: another schema, or a missing or malformed field.
    """
    if document.get("schema") != SCHEMA:
        raise ConfigError("schema", document.get("schema"), f"allowed: {SCHEMA}")
    try:
        placement = Placement(
            int(document["ranks"]), tuple(tuple(map(int, row)) for row in document["placement"])
        )
        rows = tuple(
            tuple(
                Action(Kind(kind), stage, micro_batch, direction)
                for kind, stage, direction, micro_batch in row
            )
            for row in document["actions"]
        )
        return Schedule(
            name=str(document["name"]),
            num_micro_batches=int(document["micro_batches"]),
            placement=placement,
            rows=rows,
            passes=tuple(document.get("passes", ())),
            forward_only=not any(action.kind is Kind.B for row in rows for action in row),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError("schedule", "json", f"not of schema {SCHEMA} ({error!r})") from error

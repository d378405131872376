"""gems.schedule.formats.schedule_json: schema gems.schedule/1."""

from __future__ import annotations

import json
from typing import Any

import pytest

from gems.errors import ConfigError
from gems.schedule import generate, published
from gems.schedule.families.given_placement import forward_only
from gems.schedule.formats.schedule_json import from_json, to_json
from gems.schedule.lower import lower
from gems.schedule.placement import linear
from gems.schedule.validate import validate


@pytest.mark.parametrize("p", [1, 2, 5])
@pytest.mark.parametrize("name", published())
def test_round_trip_through_text(name: str, p: int) -> None:
    made = generate(name, p, 12, 2)
    for schedule in (made, lower(made)):
        assert from_json(json.loads(json.dumps(to_json(schedule)))) == schedule


def test_round_trip_of_forward_only() -> None:
    schedule = lower(forward_only(linear(3), 2))
    assert from_json(json.loads(json.dumps(to_json(schedule)))) == schedule


def test_fields_of_the_schema() -> None:
    assert to_json(generate("gems_mast", 2, 2)) == {
        "schema": "gems.schedule/1",
        "name": "gems_mast",
        "ranks": 2,
        "stages": 2,
        "micro_batches": 2,
        "directions": 2,
        "placement": [[0, 1], [1, 0]],
        "passes": [],
        "actions": [
            [["F", 0, 0, 0], ["B", 0, 0, 0], ["F", 1, 1, 1], ["B", 1, 1, 1]],
            [["F", 1, 0, 0], ["B", 1, 0, 0], ["F", 0, 1, 1], ["B", 0, 1, 1]],
        ],
    }


def test_lowered_holds_the_other_actions() -> None:
    document = to_json(lower(generate("1f1b", 2, 1)))
    assert document["actions"][1] == [
        ["RECV_F", 1, 0, 0],
        ["F", 1, 0, 0],
        ["B", 1, 0, 0],
        ["SEND_B", 1, 0, 0],
        ["REDUCE_GRAD", 1, 0, None],
        ["STEP", 1, 0, None],
    ]
    assert document["passes"] == ["add_transfers", "add_reduce", "add_step"]


def test_a_reader_of_the_published_fields_alone_is_enough() -> None:
    document = to_json(generate("gems_mast", 3, 2))
    del document["passes"]
    assert validate(from_json(document)) == generate("gems_mast", 3, 2)


def changed(**fields: Any) -> dict[str, Any]:
    return {**to_json(generate("gems_mast", 2, 2)), **fields}


@pytest.mark.parametrize("schema", ["gems.schedule/3", "gems.profile/1", None, 1])
def test_another_schema_is_refused(schema: object) -> None:
    with pytest.raises(ConfigError, match=r"allowed: gems\.schedule/1"):
        from_json(changed(schema=schema))


@pytest.mark.parametrize("document", [{}, [], None, "gems.schedule/1", [["F", 0, 0, 0]]])
def test_what_is_no_schedule_at_all(document: Any) -> None:
    with pytest.raises(ConfigError, match=r"allowed: gems\.schedule/1"):
        from_json(document)


@pytest.mark.parametrize(
    "missing", ["name", "ranks", "stages", "micro_batches", "directions", "placement", "actions"]
)
def test_missing_field_is_named(missing: str) -> None:
    document = changed()
    del document[missing]
    with pytest.raises(ConfigError, match=missing):
        from_json(document)


@pytest.mark.parametrize(
    "fields",
    [
        {"actions": [[["Q", 0, 0, 0]], []]},
        {"actions": [[["F", 0, 0]], []]},
        {"actions": [[["F", "0", 0, 0]], []]},
        {"actions": [[["F", 0, 0.5, 0]], []]},
        {"actions": 3},
        {"actions": [[]]},
        {"placement": []},
        {"placement": [[0, 1], [1]]},
        {"placement": [[0, 1], [1, 2]]},
        {"placement": [], "directions": 0},
        {"stages": 3},
        {"ranks": "two"},
        {"ranks": 3},
        {"micro_batches": None},
        {"passes": 3},
    ],
    ids=str,
)
def test_malformed_field_is_one_clear_error(fields: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"not of schema gems\.schedule/1"):
        from_json(changed(**fields))

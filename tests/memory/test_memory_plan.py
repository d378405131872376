"""gems.memory.plan: segments, joined segments, and the document of the run folder."""

from __future__ import annotations

import json

import pytest

from gems.errors import ConfigError
from gems.memory.plan import SCHEMA, Choice, MemoryPlan, Segment

PLAN = MemoryPlan.by_layer(
    "test",
    (0, 3, 5),
    {
        0: Segment(0, 1, Choice.OFFLOAD, free_after=2, ahead=3, is_awaited=True),
        4: Segment(4, 5, Choice.SELECTIVE),
    },
)


def test_every_layer_is_a_segment_and_kept_unless_said_otherwise() -> None:
    assert PLAN.boundaries == (0, 3, 5)
    assert [[(one.first, one.end, one.choice.value) for one in stage] for stage in PLAN.stages] == [
        [(0, 1, "offload"), (1, 2, "keep"), (2, 3, "keep")],
        [(3, 4, "keep"), (4, 5, "selective")],
    ]


def test_only_kept_neighbours_are_joined() -> None:
    joined = PLAN.joined()
    assert [[(one.first, one.end) for one in stage] for stage in joined.stages] == [
        [(0, 1), (1, 3)],
        [(3, 4), (4, 5)],
    ]
    assert joined.stages[0][0] == PLAN.stages[0][0]
    both = MemoryPlan("test", ((Segment(0, 1, Choice.RECOMPUTE), Segment(1, 2, Choice.RECOMPUTE)),))
    assert both.joined() == both, "two that are run again are run one after the other"


def test_what_is_recomputed_may_be_copied_too() -> None:
    recomputed = {choice for choice in Choice if choice.is_recomputed}
    assert recomputed == {Choice.RECOMPUTE, Choice.SELECTIVE, Choice.OFFLOAD_INPUTS}
    assert {choice for choice in Choice if choice.is_copied} == {
        Choice.OFFLOAD,
        Choice.OFFLOAD_INPUTS,
    }
    assert [choice.uncopied for choice in (Choice.OFFLOAD, Choice.OFFLOAD_INPUTS)] == [
        Choice.KEEP,
        Choice.RECOMPUTE,
    ]
    assert all(choice.uncopied is choice for choice in Choice if not choice.is_copied)


def test_it_comes_back_from_its_document() -> None:
    document = json.loads(json.dumps(PLAN.to_json()))
    assert document["schema"] == SCHEMA
    assert MemoryPlan.from_json(document) == PLAN


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"schema": "gems.memory/9"}, "must be of schema gems.memory/1"),
        ({"stages": [[{"first": 0, "end": 1, "choice": "melt"}]]}, "melt"),
        ({"stages": None}, "not of schema"),
    ],
)
def test_another_document_is_refused(changes: dict[str, object], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        MemoryPlan.from_json(PLAN.to_json() | changes)


def test_a_plan_of_an_older_version_is_read() -> None:
    assert Choice("cheap") is Choice.SELECTIVE

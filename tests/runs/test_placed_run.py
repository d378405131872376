"""schedule=placed on paper: the placer's time is the simulated one, and what cannot stand beside it is refused."""

from __future__ import annotations

import json

import pytest

from gems.partition.dlplacer import cp_sat
from gems.profile.operator_graph import Op, OpGraph
from tests.helpers.commands import Gems, check_refusal

RUN = (
    "model=googlenet",
    "machine=v100",
    "machine.kind=simulated",
    "machine.link_bytes_per_s=1e6",
    "data=synthetic",
    "data.height_px=64",
    "data.width_px=64",
    "schedule=placed",
    "parallel.partitions=2",
    "parallel.micro_batches=1",
)


@pytest.fixture
def gems_(gems: Gems, monkeypatch: pytest.MonkeyPatch) -> Gems:
    """Run commands on two blocks of four branches in place of the model's operators."""
    ops = [Op("stem", 1e-3, 2e-3, 100, 30, 10)]
    edges = []
    for block in range(2):
        entry = 5 * block
        for branch in range(1, 5):
            ops.append(Op(f"{block}.{branch}", 1e-3 * branch, 2e-3 * branch, 100, 20, 10))
            edges += [(entry, entry + branch), (entry + branch, entry + 5)]
        ops.append(Op(f"join{block}", 1e-4, 1e-4, 100, 0, 0))
    graph = OpGraph(tuple(ops), tuple(edges))
    monkeypatch.setattr(
        "gems.partition.operator_placement.operators_taken", lambda spec: graph.to_json()
    )
    return gems


def answer_of(gems_: Gems, *words: str) -> dict[str, object]:
    said = gems_(*words, "--json")
    assert said.code == 0, said.err
    return dict(json.loads(said.out))


@pytest.mark.skipif(not cp_sat.IS_INSTALLED, reason="needs OR-tools")
def test_the_schedule_takes_the_time_of_the_placement(gems_: Gems) -> None:
    placed = answer_of(gems_, "place", *RUN)
    simulated = answer_of(gems_, "simulate", *RUN)
    assert placed["optimal"] and simulated["step_s"] == pytest.approx(placed["step_s"])
    assert simulated["efficiency"] == pytest.approx(
        float(str(placed["one_device_s"])) / 2 / float(str(placed["step_s"]))
    )
    assert float(str(simulated["efficiency"])) <= float(str(simulated["bound"])) + 1e-9
    # unlike a pipeline's rank, one may begin the next micro-batch while others are still at this
    # one
    several = answer_of(gems_, "simulate", *RUN[:-1], "parallel.micro_batches=4")
    assert float(str(several["step_s"])) <= 4 * float(str(simulated["step_s"])) + 1e-9


def test_the_program_names_the_graph(gems_: Gems) -> None:
    answer = answer_of(gems_, "schedule", *RUN)
    assert (answer["stages"], answer["name"]) == (11, "placed")
    predecessors = answer["predecessors"]
    assert isinstance(predecessors, list)
    assert predecessors[5] == [1, 2, 3, 4] and predecessors[6] == [5]
    lowered = gems_("schedule", *RUN, "level=lowered").out
    assert "SEND_F0" in lowered and "RECV_B0" in lowered


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("parallel.partitions=1", "parallel.partitions=1: must be 2 or more"),
        (
            "parallel.partitions=8",
            "parallel.partitions=8: is more than the branches of googlenet can use",
        ),
        ("parallel.boundaries=[0,6,13]", "parallel.boundaries"),
        ("schedule.activation_cap=1", "schedule.activation_cap=1.0"),
        ("memory=recompute", "memory=recompute"),
        ("cost=profile", "cost=profile"),
        ("model=vgg16", "schedule=placed: lays branches beside each other, and vgg is a chain"),
        ("profile=measured", "profile=measured: knows whole layers only"),
    ],
)
def test_what_cannot_stand_beside_it_is_refused(gems_: Gems, word: str, expected: str) -> None:
    check_refusal(gems_("simulate", *RUN, word), expected)

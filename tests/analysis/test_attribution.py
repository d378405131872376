"""Attribution of runs on paper.

A planted cause has all of the time that it costs, and the parts sum to the step.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from analysis.attribution.causes import CAUSES, attribute
from gems.schedule import published
from tests.helpers.attributed import check_sums, spec_of, trace_of

# 1F1B, 4 ranks, 8 micro-batches, f = i = w = 1: 24 units of compute a rank, and a bubble of 3
# micro-batches.
IDEAL = 24.0
BUBBLE = 9.0


@pytest.mark.parametrize(
    ("cause", "run"),
    [
        ("bubble", {}),
        ("imbalance", {"times": [1, 1.5, 1, 1]}),
        ("point_to_point", {"link": 0.2}),
        ("point_to_point", {"boundary_bytes": 10, "machine": {"link_bytes_per_s": 100.0}}),
        ("all_reduce", {"replicas": 4, "param_bytes": 100, "machine": {"link_bytes_per_s": 100.0}}),
        ("input", {"input_load": 2.0}),
        ("noise", {"machine": {"slow_rank": 1, "slowdown": 1.5}}),
        ("noise", {"machine": {"slow_rank": 6, "slowdown": 1.5}, "replicas": 2}),
    ],
)
def test_a_planted_cause_has_all_that_it_costs(cause: str, run: dict[str, object]) -> None:
    found = attribute(trace_of(spec_of(**run)))  # type: ignore[arg-type]
    check_sums(found)
    planted = {"bubble": BUBBLE} | (
        {} if cause == "bubble" else {cause: found.step_s - IDEAL - BUBBLE}
    )
    assert found.ideal_s == pytest.approx(IDEAL) and found.residual_s == pytest.approx(0, abs=1e-9)
    assert found.run_s == pytest.approx({name: planted.get(name, 0.0) for name in CAUSES}, abs=1e-6)
    assert planted[cause] > 1 and (found.source, found.num_steps) == ("simulated", 2)
    assert len(found.causes_s[cause]) == 4 * int(run.get("replicas", 1))  # type: ignore[call-overload]


def test_what_copies_and_recomputation_cost(tmp_path: Path) -> None:
    """One rank and one micro-batch: F 1, out 2, back 2, B 2, and with recomputation F 1, R 1, B 2."""
    for name, actions, cause, step in (
        ("copies", ["F", "OFFLOAD", "PREFETCH", "B"], "memory", 7.0),
        ("again", ["F", "R", "B"], "recompute", 4.0),
    ):
        path = tmp_path / f"{name}.json"
        path.write_text(
            json.dumps(
                {
                    "schema": "gems.schedule/1",
                    "name": name,
                    "ranks": 1,
                    "stages": 1,
                    "micro_batches": 1,
                    "directions": 1,
                    "placement": [[0]],
                    "actions": [[[kind, 0, 0, 0] for kind in actions]],
                }
            )
        )
        found = attribute(trace_of(spec_of("file", 1, 1, path=path, offload=2.0)))
        check_sums(found)
        assert found.step_s == pytest.approx(step)
        assert found.run_s == pytest.approx(
            {c: step - 3.0 if c == cause else 0.0 for c in CAUSES}, abs=1e-6
        )
        assert found.own_s[cause] == pytest.approx((step - 3.0,))


def test_a_graph_of_stages_is_attributed(tmp_path: Path) -> None:
    """Stages 1 and 2 read stage 0, 3 reads both; rank 1 runs stage 2 beside 1, 0.5 units away."""
    path = tmp_path / "graph.json"
    ranks = ["F0 F1 F3 B3 B1 B0", "F2 B2"]
    document = {
        "schema": "gems.schedule/1",
        "name": "graph",
        "ranks": 2,
        "stages": 4,
        "micro_batches": 1,
        "directions": 1,
        "placement": [[0, 0, 1, 0]],
        "predecessors": [[], [0], [0], [1, 2]],
        "actions": [[[word[0], int(word[1]), 0, 0] for word in row.split()] for row in ranks],
    }
    path.write_text(json.dumps(document))
    found = attribute(trace_of(spec_of("file", 2, 1, path=path, link=0.5)))
    check_sums(found)
    assert found.residual_s == pytest.approx(0, abs=1e-9)
    assert found.step_s > found.ideal_s and found.run_s["point_to_point"] > 0


@pytest.mark.parametrize("name", published())
def test_the_parts_sum_to_the_step_whatever_the_schedule(name: str) -> None:
    spec = (
        spec_of(
            name,
            replicas=2,
            times=[1, 1.3, 0.8, 1],
            link=0.05,
            param_bytes=100,
            input_load=0.7,
            boundary_bytes=10,
            machine={"slow_rank": 2, "slowdown": 1.2, "link_bytes_per_s": 1000.0},
        )
        if name != "gems_mast"
        else spec_of(name, micro_batches=2, link=0.05, input_load=0.7)
    )
    found = attribute(trace_of(spec))
    check_sums(found)
    assert abs(found.residual_s) < 1e-6 * found.step_s, "the replay is the simulation again"
    assert found.run_s["host"] == pytest.approx(0, abs=1e-6)
    assert found.run_s["point_to_point"] > 0 and found.run_s["input"] >= 0


def test_the_bubble_is_that_of_the_closed_form() -> None:
    """For all schedules that have one, with equal stages and free links."""
    for name, bubble in (
        ("gpipe", 9.0),
        ("1f1b", 9.0),
        ("interleaved_1f1b", 4.5),
        ("layer_parallel", 72.0),
    ):
        assert attribute(trace_of(spec_of(name))).run_s["bubble"] == pytest.approx(bubble)


def test_uneven_stages_can_save_time_and_then_are_below_zero() -> None:
    """GEMS runs both ways over a pair of ranks, so a heavy stage shortens the chain on the other rank."""
    found = attribute(trace_of(spec_of("gems_master", times=[1, 2, 1, 1])))
    assert found.run_s["imbalance"] == pytest.approx(73.6 - 75.0)
    check_sums(found)


def test_a_rank_has_what_it_spends_itself() -> None:
    found = attribute(trace_of(spec_of(times=[1, 1.5, 1, 1])))
    assert found.own_s["imbalance"] == pytest.approx(
        [24 * r - 24 for r in (8 / 9, 4 / 3, 8 / 9, 8 / 9)]
    )
    lost = found.causes_s["imbalance"]
    assert lost[1] > lost[0] == pytest.approx(lost[3]) and found.causes_s["bubble"][1] < BUBBLE
    stalled = attribute(trace_of(spec_of(input_load=2.0)))
    assert (
        stalled.own_s["input"] == pytest.approx((5, 0, 0, 0))
        and max(stalled.causes_s["input"]) == (stalled.causes_s["input"][0])
    )


def test_the_largest_causes_come_first() -> None:
    found = attribute(trace_of(spec_of(link=0.2, input_load=2.0)))
    assert [name for name, _ in found.largest(2)] == ["bubble", "point_to_point"]
    assert found.efficiency == pytest.approx(IDEAL / found.step_s)


def test_many_ranks_are_split_as_one_pipeline_is() -> None:
    one, many = (
        attribute(trace_of(spec_of("gems_master", replicas=replicas, link=0.1)))
        for replicas in (1, 128)
    )
    assert len(many.causes_s["bubble"]) == 512 and many.run_s == pytest.approx(one.run_s)

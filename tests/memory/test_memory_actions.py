"""gems.memory.plan: where a plan's actions stand in the lists of the ranks."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gems.memory.plan import Choice, MemoryPlan, Segment, add_memory
from gems.memory.timeline import segment_costs
from gems.schedule import generate
from gems.schedule.action import COMPUTE_KINDS, Kind
from gems.schedule.costs import Network
from gems.schedule.formats.schedule_json import from_json, to_json
from gems.schedule.lower import compute_only, lower
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from gems.schedule.strips import with_strips
from gems.schedule.validate import validate
from tests.helpers.profiles import random_profile

SCHEDULES = (
    ("layer_parallel", 1, 2),
    ("1f1b", 3, 5),
    ("gems_master", 2, 4),
    ("zb_h1", 3, 5),
    ("interleaved_1f1b", 2, 4),
    ("zb_v", 2, 4),
    ("chimera", 4, 4),
)
LAYERS = 16


def even_cuts(num_stages: int) -> tuple[int, ...]:
    return tuple(round(LAYERS * stage / num_stages) for stage in range(num_stages + 1))


def words(schedule: Schedule, rank: int = 0) -> str:
    return " ".join(map(str, schedule.rank_schedules[rank]))


def layer_by_layer(*segments: Segment) -> str:
    plan = MemoryPlan("test", (segments,))
    return words(add_memory(generate("layer_parallel", 1, 1), plan))


def test_a_strip_whose_backward_follows_its_forward_is_not_run_again() -> None:
    plan = MemoryPlan("test", ((Segment(0, 1, Choice.RECOMPUTE),),))
    strips = add_memory(with_strips(generate("layer_parallel", 1, 1), 2), plan)
    assert words(strips) == "0.0F0 0.0F1 0.0B1 0.0R0 0.0B0"
    assert layer_by_layer(Segment(0, 1, Choice.RECOMPUTE)) == "0.0F0 0.0R0 0.0B0"


def test_the_last_micro_batch_of_each_direction_may_be_kept() -> None:
    stages = ((Segment(0, 1, Choice.RECOMPUTE),), (Segment(1, 2, Choice.RECOMPUTE),))
    plan = MemoryPlan("test", stages, except_last=True)
    assert MemoryPlan.from_json(plan.to_json()) == plan
    gpipe = add_memory(generate("gpipe", 2, 3), plan)
    assert words(gpipe, 1) == ("1.0F0 1.0F1 1.0F2 1.0R0 1.0B0 1.0R1 1.0B1 1.0B2")
    both = add_memory(generate("gems_master", 2, 4), plan)
    again = [str(action) for _, action in both.actions() if action.kind is Kind.R]
    kept = {action.micro_batch for _, action in both.actions() if action.kind is Kind.F}
    kept -= {action.micro_batch for _, action in both.actions() if action.kind is Kind.R}
    assert len(again) == 4 and kept == {2, 3}


def test_an_offloaded_layer_leaves_behind_its_forward_and_is_back_for_its_backward() -> None:
    def three(**options: int | bool) -> str:
        return layer_by_layer(
            Segment(0, 1, Choice.OFFLOAD, **options), Segment(1, 2), Segment(2, 3)
        )  # type: ignore[arg-type]

    plain = "0.0F0 0.0OFFLOAD0 0.1F0 0.0FREE0 0.2F0 0.2B0 0.0PREFETCH0 0.1B0 0.0B0"
    assert three() == plain
    assert (
        three(free_after=0, ahead=0)
        == "0.0F0 0.0OFFLOAD0 0.0FREE0 0.1F0 0.2F0 0.2B0 0.1B0 0.0PREFETCH0 0.0B0"
    ), "waits at once, comes on demand"
    assert three(is_awaited=True) == plain.replace("0.1B0", "0.1B0 0.0AWAIT0")
    assert (
        three(ahead=100) == "0.0F0 0.0OFFLOAD0 0.1F0 0.0FREE0 0.0PREFETCH0 0.2F0 0.2B0 0.1B0 0.0B0"
    ), "not before it has left"


def test_what_is_posted_at_one_place_comes_back_in_the_order_of_need() -> None:
    offloaded = [
        Segment(layer, layer + 1, Choice.OFFLOAD, free_after=0, ahead=ahead)
        for layer, ahead in ((0, 2), (1, 1))
    ]
    found = layer_by_layer(*offloaded, Segment(2, 3), Segment(3, 4))
    assert found.endswith("0.3B0 0.1PREFETCH0 0.0PREFETCH0 0.2B0 0.1B0 0.0B0")
    again = layer_by_layer(*offloaded, Segment(2, 3, Choice.RECOMPUTE), Segment(3, 4))
    assert again.endswith("0.3B0 0.1PREFETCH0 0.0PREFETCH0 0.2R0 0.2B0 0.1B0 0.0B0"), (
        "copies go while it runs"
    )


def test_what_would_come_back_before_it_has_left_is_kept() -> None:
    assert layer_by_layer(Segment(0, 1), Segment(1, 2, Choice.OFFLOAD)) == "0.0F0 0.1F0 0.1B0 0.0B0"


@pytest.mark.parametrize("choice", [Choice.RECOMPUTE, Choice.SELECTIVE])
def test_a_segment_is_run_again_right_before_its_backward(choice: Choice) -> None:
    assert layer_by_layer(Segment(0, 1, choice), Segment(1, 3)) == "0.0F0 0.1F0 0.1B0 0.0R0 0.0B0"


def test_inputs_that_leave_are_back_for_the_second_run() -> None:
    def three(**options: int | bool) -> str:
        inputs = Segment(1, 2, Choice.OFFLOAD_INPUTS, **options)  # type: ignore[arg-type]
        return layer_by_layer(Segment(0, 1), inputs, Segment(2, 3), Segment(3, 4))

    plain = (
        "0.0F0 0.1F0 0.1OFFLOAD0 0.2F0 0.1FREE0 0.3F0 0.3B0 0.1PREFETCH0 0.2B0 0.1R0 0.1B0 0.0B0"
    )
    assert three() == plain
    assert three(ahead=0) == plain.replace("0.1PREFETCH0 0.2B0", "0.2B0 0.1PREFETCH0"), (
        "on demand, before the R"
    )
    assert three(is_awaited=True) == plain.replace("0.2B0", "0.2B0 0.1AWAIT0")
    recomputed = "0.0F0 0.1F0 0.2F0 0.3F0 0.3B0 0.2B0 0.1R0 0.1B0 0.0B0"
    assert three(free_after=4) == recomputed, "what would come back before it has left stays"
    first = Segment(0, 2, Choice.OFFLOAD_INPUTS)
    assert layer_by_layer(first, Segment(2, 3)) == "0.0F0 0.1F0 0.1B0 0.0R0 0.0B0", (
        "the stage's own inputs stay"
    )


def test_inputs_of_a_stage_leave_if_they_came_in_a_message_for_one_segment() -> None:
    def rows(family: str, *cuts: int) -> list[str]:
        compute = generate(family, 2, 3)
        spans = list(pairwise([0, *cuts]))
        stages = tuple((Segment(*span, Choice.OFFLOAD_INPUTS),) for span in spans)
        made = add_memory(compute, MemoryPlan("test", stages))
        return [words(made, rank) for rank in range(2)]

    first, second = rows("gpipe", 1, 2)
    assert "OFFLOAD" not in first, "images"
    assert (
        second.startswith("1.0F0 1.0OFFLOAD0 1.0F1 1.0OFFLOAD1 1.0FREE0")
        and "1.0PREFETCH0 1.0F2" in second
    )
    both = " ".join(rows("zb_v", 1, 2, 3, 4))
    assert "1.0OFFLOAD1" in both and "2.0OFFLOAD" not in both, "the rank made it itself"
    parted = (Segment(1, 2, Choice.OFFLOAD_INPUTS), Segment(2, 3, Choice.OFFLOAD_INPUTS))
    made = add_memory(generate("gpipe", 2, 3), MemoryPlan("test", ((Segment(0, 1),), parted)))
    assert "1.1OFFLOAD0" in words(made, 1) and "1.0OFFLOAD" not in words(made, 1), (
        "the second one may read it too"
    )


@pytest.mark.parametrize(("name", "ranks", "micro_batches"), SCHEDULES)
@settings(
    max_examples=6, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(data=st.data())
def test_any_plan_gives_a_list_that_runs(
    name: str, ranks: int, micro_batches: int, data: st.DataObject
) -> None:
    compute = generate(name, ranks, micro_batches)
    cuts = even_cuts(compute.num_stages)
    plan = data.draw(plans(cuts))
    made = add_memory(compute, plan)
    schedule = lower(made)
    validate(schedule)
    costs = segment_costs(random_profile(LAYERS), plan, schedule, 1e3, 2e3)
    validate(schedule, costs)
    played = simulate(schedule, costs, Network(0.01, 1e-4))
    plain = simulate(lower(compute), costs, Network(0.01, 1e-4))
    assert played.span >= max(plain.busy) - 1e-9
    assert sum(played.busy) == pytest.approx(sum(plain.busy)), "what runs again is not useful"
    assert from_json(json.loads(json.dumps(to_json(schedule)))) == schedule
    assert compute_only(schedule).rank_schedules == made.rank_schedules
    for row, before in zip(made.rank_schedules, compute.rank_schedules, strict=True):
        order = [a._replace(segment=None) for a in row if a.kind in COMPUTE_KINDS - {Kind.R}]
        assert list(dict.fromkeys(order)) == list(before), "segments stand where their stage stood"


@st.composite
def plans(draw: st.DrawFn, cuts: tuple[int, ...]) -> MemoryPlan:
    stages = []
    for first, end in pairwise(cuts):
        marks = sorted({first, end, *draw(st.lists(st.integers(first, end), max_size=6))})
        stages.append(
            tuple(
                Segment(
                    begin,
                    stop,
                    draw(st.sampled_from(Choice)),
                    draw(st.integers(0, 3)),
                    draw(st.integers(0, 4)),
                    draw(st.booleans()),
                )
                for begin, stop in pairwise(marks)
            )
        )
    return MemoryPlan("random", tuple(stages))

"""gems.schedule.strips: each micro-batch as a row of strips, in order, in any list."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.errors import ConfigError, ScheduleError
from gems.schedule.action import Action, Kind
from gems.schedule.costs import DepthCosts
from gems.schedule.dependencies import dependencies
from gems.schedule.formats.schedule_json import from_json, to_json
from gems.schedule.lower import lower
from gems.schedule.placement import Placement
from gems.schedule.registry import generate
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from gems.schedule.strips import StripCosts, strip_costs, with_strips, without_strips
from gems.schedule.validate import validate

NAMES = (
    "layer_parallel",
    "gpipe",
    "1f1b",
    "interleaved_1f1b",
    "gems_mast",
    "gems_master",
    "gems_zb",
    "zb_h1",
    "zb_v",
    "v_min",
    "chimera",
    "dualpipe_v",
)


def in_strips(
    name: str, num_ranks: int, num_micro_batches: int, num_strips: int, **more: object
) -> Schedule:
    return with_strips(generate(name, num_ranks, num_micro_batches, **more), num_strips)


def efficiency(schedule: Schedule) -> float:
    costs = StripCosts(DepthCosts(schedule.num_ranks), schedule.num_strips).of(schedule.placement)
    return simulate(schedule, costs).efficiency


def test_strips_of_a_stage_need_each_other_in_order() -> None:
    made = in_strips("1f1b", 2, 2, 3)
    assert dependencies(Action(Kind.F, 0, 0), made) == ()
    assert dependencies(Action(Kind.F, 0, 2), made) == (Action(Kind.F, 0, 1),)
    assert dependencies(Action(Kind.F, 0, 3), made) == (), "the first strip of the next image"
    assert dependencies(Action(Kind.B, 1, 5), made) == (Action(Kind.F, 1, 5),), (
        "the loss follows the last strip"
    )
    assert dependencies(Action(Kind.B, 1, 3), made) == (Action(Kind.F, 1, 3), Action(Kind.B, 1, 4))


def test_each_action_makes_room_for_its_strips_and_backward_starts_with_the_last() -> None:
    row = " ".join(map(str, in_strips("layer_parallel", 2, 1, 3).rank_schedules[0]))
    assert row == "0F0 0F1 0F2 0B2 0B1 0B0"


@pytest.mark.parametrize("name", NAMES)
def test_whole_micro_batches_are_found_again(name: str) -> None:
    whole = generate(name, 4, 8)
    made = with_strips(whole, 3)
    assert (
        made.num_whole == whole.num_micro_batches and made.whole_directions() == whole.directions()
    )
    assert without_strips(lower(made)) == whole


@pytest.mark.parametrize("name", NAMES)
def test_every_schedule_runs_in_strips_with_its_memory_and_in_less_time(name: str) -> None:
    whole = generate(name, 4, 8)
    made = with_strips(whole, 4)
    costs = StripCosts(DepthCosts(4), 4).of(made.placement)
    validate(lower(made), costs)
    before, after = (
        simulate(*pair) for pair in ((whole, DepthCosts(4).of(made.placement)), (made, costs))
    )
    assert after.span < before.span
    assert max(after.peak) <= max(before.peak) + 1e-9


@pytest.mark.parametrize("num_ranks", [2, 3, 8])
@pytest.mark.parametrize("num_strips", [1, 2, 5, 16])
def test_under_a_cap_of_one_the_efficiency_is_k_over_k_and_the_other_ranks(
    num_ranks: int, num_strips: int
) -> None:
    for name, more in (("layer_parallel", {}), ("1f1b", {"cap": 1.0})):
        found = efficiency(in_strips(name, num_ranks, 6, num_strips, **more))
        assert found == pytest.approx(num_strips / (num_strips + num_ranks - 1)), name


def test_costs_of_strips_are_equal_shares_and_reductions_stay() -> None:
    whole = replace(DepthCosts(2, boundary_bytes=8.0, copy=2.0).stages(2), reduce=(3.0, 3.0))
    part = strip_costs(whole, 4)
    assert (
        part.forward == (0.25, 0.25)
        and part.activation == (0.25, 0.25)
        and part.boundary_bytes == (2.0, 2.0)
    )
    assert part.copy == (0.5, 0.5) and part.reduce == (3.0, 3.0)
    assert strip_costs(whole, 1) is whole


def test_json_has_strips_in_schema_2_and_without_them_is_schema_1() -> None:
    made = in_strips("zb_v", 2, 2, 3)
    document = to_json(made)
    assert (document["schema"], document["strips"], document["micro_batches"]) == (
        "gems.schedule/2",
        3,
        6,
    )
    assert from_json(document) == made
    assert made.digest() != replace(made, num_strips=1).digest()
    assert "strips" not in to_json(generate("zb_v", 2, 2))
    with pytest.raises(ConfigError, match="strips of 0"):
        from_json({**document, "strips": 0})


def test_a_list_that_breaks_the_order_of_strips_is_refused() -> None:
    made = in_strips("layer_parallel", 1, 1, 2)
    forward = made.rank_schedules[0][:2]
    backward = made.rank_schedules[0][2:]
    with pytest.raises(ScheduleError, match="comes before 0B1, which it needs"):
        validate(replace(made, rank_schedules=((*forward, *reversed(backward)),)))
    with pytest.raises(ScheduleError, match=r"3 strips are no whole micro-batches of 2"):
        validate(replace(made, num_micro_batches=3))


def test_strips_of_a_micro_batch_run_in_one_direction() -> None:
    with pytest.raises(ScheduleError, match="runs in another direction than strips before it"):
        validate(replace(generate("gems_master", 2, 4), num_strips=2))


def test_a_graph_of_stages_has_no_strips() -> None:
    graph = Placement(1, ((0, 0, 0),), ((), (0,), (0, 1)))
    rows = (
        tuple(
            Action(kind, stage, 0)
            for kind, stage in ((Kind.F, 0), (Kind.F, 1), (Kind.B, 1), (Kind.B, 0))
        ),
    )
    with pytest.raises(ConfigError, match=r"parallel.strips=2: must be 1 for schedule=graph"):
        with_strips(Schedule("graph", 1, graph, rows), 2)

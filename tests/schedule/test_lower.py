"""gems.schedule.lower: from compute to the list that a rank runs, before and after as text."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.errors import ScheduleError
from gems.schedule import generate, published
from gems.schedule.action import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.costs import DepthCosts, Network, uniform
from gems.schedule.dependencies import dependencies, transfers_after
from gems.schedule.lower import add_transfers, compute_only, lower
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from gems.schedule.validate import validate
from tests.helpers.drawings import lines, text_of, with_rows

CASES = {
    ("1f1b", 3, 3): (
        "\n"
        "        0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0F2 0SEND_F2 "
        "0RECV_B1 0B0 0RECV_B2 0B1 0B2 0REDUCE_GRAD 0STEP\n"
        "        1RECV_F0 1RECV_F1 1F0 1SEND_F0 1RECV_B0 1F1 1SEND_F1 1RECV_F2 1B0 1SEND_B0 "
        "1RECV_B1 1F2 1SEND_F2 1RECV_B2 1B1 1SEND_B1 1B2 1SEND_B2 1REDUCE_GRAD 1STEP\n"
        "        2RECV_F0 2F0 2RECV_F1 2B0 2SEND_B0 2F1 2RECV_F2 2B1 "
        "2SEND_B1 2F2 2B2 2SEND_B2 2REDUCE_GRAD 2STEP\n"
        "    "
    ),
    ("gems_mast", 3, 2): (
        "\n"
        "        0RECV_B0 0F0 0SEND_F0 2RECV_F1/1 0B0 2F1/1 2B1/1 2SEND_B1/1 0REDUCE_GRAD 0STEP\n"
        "        1RECV_F0 1RECV_B0 1F0 1SEND_F0 1RECV_F1/1 1B0 1SEND_B0 1RECV_B1/1 "
        "1F1/1 1SEND_F1/1 1B1/1 1SEND_B1/1 1REDUCE_GRAD 1STEP\n"
        "        2RECV_F0 2F0 2B0 2SEND_B0 0RECV_B1/1 0F1/1 0SEND_F1/1 0B1/1 0REDUCE_GRAD 0STEP\n"
        "    "
    ),
    ("gems_mast", 1, 2): "0F0 0B0 0F1/1 0B1/1 0REDUCE_GRAD 0STEP",
    ("gpipe", 1, 2): "0F0 0F1 0B0 0B1 0REDUCE_GRAD 0STEP",
}


@pytest.mark.parametrize(("case", "expected"), CASES.items(), ids=str)
def test_before_and_after(case: tuple[str, int, int], expected: str) -> None:
    assert text_of(lower(generate(*case))) == lines(expected)


@pytest.mark.parametrize(
    ("receives_ahead", "expected"),
    [
        (0, "1RECV_F0 1F0 1RECV_F1 1F1 1B0 1SEND_B0 1B1 1SEND_B1"),
        (1, "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"),
        (9, "1RECV_F0 1RECV_F1 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1"),
    ],
)
def test_receives_ahead(receives_ahead: int, expected: str) -> None:
    assert (
        text_of(add_transfers(generate("gpipe", 2, 2), receives_ahead=receives_ahead))[1]
        == expected
    )


@pytest.mark.parametrize(
    ("latency", "expected"),
    [
        (0.0, "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1"),
        (
            1.0,
            "1RECV_F0 1F0 1RECV_F1 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        ),  # needed at 5, so posted by 4: at 3
        (
            2.5,
            "1RECV_F0 1RECV_F1 1F0 1B0 1SEND_B0 1F1 1B1 1SEND_B1",
        ),  # needed at 6.5, so posted by 4: at 0, not at 4.5
    ],
)
def test_a_receive_is_as_early_as_its_link_asks_for(latency: float, expected: str) -> None:
    """Rank 1 runs F0 (1 unit) and B0 (2 units) before F1, whose receive may come before either."""
    lowered = add_transfers(generate("1f1b", 2, 2), uniform(2, 2), Network(latency=latency))
    assert text_of(lowered)[1] == expected


UNEVEN = DepthCosts(
    6, 1.0, 1.5, 0.5, times=(1.0, 3.0, 1.0), activations=(3.0, 4.0, 1.0, 8.0, 9.0, 7.0)
)


@pytest.mark.parametrize(
    ("made", "depth", "link", "one_ahead", "in_time"),
    [
        (generate("interleaved_1f1b", 6, 32), UNEVEN, 1.0, 176.5, 169.3),
        (generate("looped_bfs", 4, 14, chunks=3), DepthCosts(4), 1.5, 94.0, 178 / 3),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_receives_in_time_cost_the_step_nothing(
    made: Schedule, depth: DepthCosts, link: float, one_ahead: float, in_time: float
) -> None:
    costs = depth.stages(made.num_stages)
    network = Network(latency=link)
    late = lower(made)
    early = lower(made, costs, network)
    spans = [simulate(each, costs, network).span for each in (late, early, made)]
    assert spans == pytest.approx([one_ahead, in_time, in_time])


NETWORKS = (
    Network(0.1),
    Network(2.3),
    Network(0.3, 0.4, 2, 0.0, 0.1),
    Network(1.0, 0.5, 2, has_contention=True),
)


@pytest.mark.parametrize("network", NETWORKS, ids=("quick", "slow", "nodes", "contention"))
@pytest.mark.parametrize("p", [2, 5])
@pytest.mark.parametrize("name", published())
def test_no_list_waits_for_a_late_receive(name: str, p: int, network: Network) -> None:
    """The step takes what it takes with all receives posted at its start, also if messages compete for links."""
    made = generate(name, p, 12, 2)
    costs = DepthCosts(p, 1.0, 1.2, 0.8, boundary_bytes=1.0, times=(1.0, 3.0, 0.4)).stages(
        made.num_stages
    )
    lowered = validate(lower(made, costs, network))
    early = simulate(add_transfers(made, receives_ahead=1000), costs, network)
    assert simulate(lowered, costs, network).span == early.span
    assert network.has_contention or early.span == simulate(made, costs, network).span
    assert compute_only(lowered) == made
    for row, fewest in zip(lowered.rank_schedules, lower(made).rank_schedules, strict=True):
        assert sorted(row) == sorted(fewest)


def test_a_list_that_would_not_run_is_left_to_the_validator() -> None:
    stuck = with_rows(generate("gpipe", 2, 2), ["0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"])
    lowered = lower(stuck, uniform(2, 2), Network(latency=1.0))
    assert lowered == lower(stuck)
    with pytest.raises(ScheduleError, match="never comes"):
        validate(lowered)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
@pytest.mark.parametrize("name", published())
def test_transfers_stand_where_they_should(name: str, p: int) -> None:
    made = generate(name, p, 16, 8, budget_s=0.1)
    lowered = lower(made)
    assert lowered.passes == ("add_transfers", "add_reduce", "add_step")
    assert compute_only(lowered) == made
    for row in lowered.rank_schedules:
        computes = [action for action in row if action.kind in COMPUTE_KINDS]
        for i, action in enumerate(row):
            if action.kind in SEND_KINDS:
                assert row[i - 1] == dependencies(action, lowered)[0], (
                    "a send stands behind its compute"
                )
            if action.kind in RECV_KINDS:
                used = next(k for k, c in enumerate(computes) if action in dependencies(c, lowered))
                before = sum(other.kind in COMPUTE_KINDS for other in row[:i])
                assert before == max(0, used - 1), "a receive is posted one compute action ahead"
        sends = [action for action in row if action.kind in SEND_KINDS]
        expected = [send for c in computes for send, _, _ in transfers_after(c, made)]
        assert sends == expected
        assert [str(action.kind) for action in row[-2:]] == ["REDUCE_GRAD", "STEP"]
    if p == 1:
        assert not any(action.kind in SEND_KINDS | RECV_KINDS for _, action in lowered.actions())


def test_two_stages_on_one_rank_hand_over_without_messages() -> None:
    looped = Schedule("v", 1, Placement(2, ((0, 1, 1, 0),)), ((), ()))
    made = with_rows(looped, ["0F0 3F0 3B0 0B0", "1F0 2F0 2B0 1B0"])
    lowered = lower(validate(made))
    assert text_of(validate(lowered)) == lines("""
        3RECV_F0 0F0 0SEND_F0 3F0 0RECV_B0 3B0 3SEND_B0 3START_REDUCE 0B0 0REDUCE_GRAD 0STEP
        1RECV_F0 1F0 2RECV_B0 2F0 2SEND_F0 2B0 2START_REDUCE 1B0 1SEND_B0 1REDUCE_GRAD 1STEP
    """)


@pytest.mark.parametrize(
    ("name", "starts"),
    [("interleaved_1f1b", True), ("zb_v", True), ("1f1b", False), ("gems_master", False)],
)
def test_sums_start_where_a_stage_is_done_before_its_rank(name: str, starts: bool) -> None:
    lowered = lower(generate(name, 4, 8))
    for row in lowered.rank_schedules:
        found = [action for action in row if action.kind is Kind.START_REDUCE]
        computes = [action for action in row if action.kind in COMPUTE_KINDS]
        stages = {action.stage for action in computes}
        assert {action.stage for action in found} == (
            stages - {computes[-1].stage} if starts else set()
        )
        for action in found:
            at = row.index(action)
            assert all(
                other.stage != action.stage
                for other in row[at + 1 :]
                if other.kind in COMPUTE_KINDS
            )
            before = next(other for other in reversed(row[:at]) if other.kind in COMPUTE_KINDS)
            assert before.stage == action.stage, "not later than it may be"


def test_reduce_and_step_carry_the_lowest_stage() -> None:
    lowered = lower(generate("gems_mast", 4, 2))
    for place, kind in ((-2, "REDUCE_GRAD"), (-1, "STEP")):
        last = [row[place] for row in lowered.rank_schedules]
        assert last == [Action.parse(f"{stage}{kind}") for stage in (0, 1, 1, 0)]


@pytest.mark.parametrize("name", ["1f1b", "gems_master", "zb_v"])
def test_a_list_that_lacks_an_action_is_lowered_for_the_validator_to_name_it(name):
    made = generate(name, 2, 4)
    for rank, row in enumerate(made.rank_schedules):
        for missing in row:
            rows = [*made.rank_schedules]
            rows[rank] = tuple(action for action in row if action != missing)
            with pytest.raises(ScheduleError):
                validate(lower(replace(made, rank_schedules=tuple(rows))))

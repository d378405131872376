"""gems.runs.wait_graph: from marks to the rank that holds the others up, by hand on small schedules."""

from __future__ import annotations

import pytest

from gems.runs.heartbeat import Beat
from gems.runs.wait_graph import SENDS, State, WaitGraph, WaitingChain, parse_action, waiting_chain
from gems.schedule import generate
from gems.schedule.action import COMPUTE_KINDS, RECV_KINDS, Kind
from gems.schedule.dependencies import dependencies
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule

NOW_S = 1000.0
THREE = lower(generate("1f1b", 3, 4))
PAIR = lower(generate("gems_master", 2, 4))


def beat(
    step: int,
    action: str,
    age_s: float,
    waits_for: str = "",
    alive_age_s: float | None = 0.5,
    rank: int = 0,
) -> Beat:
    """A mark that is `age_s` old; the sign of life is `alive_age_s` old, or there is none."""
    alive_ns = 0 if alive_age_s is None else round((NOW_S - alive_age_s) * 1e9)
    return Beat(
        100 + rank, f"n{rank}", step, action, round((NOW_S - age_s) * 1e9), alive_ns, waits_for
    )


def chain(schedule, *beats: Beat) -> WaitingChain:
    return waiting_chain(schedule, dict(enumerate(beats)), round(NOW_S * 1e9))


def roots(found: WaitingChain) -> list[tuple[int, State]]:
    return [(root.rank, root.state) for root in found.roots]


def test_a_stopped_rank_is_blamed_and_not_those_that_wait():
    found = chain(
        THREE,
        beat(5, "0B0", 31, "0RECV_B0"),
        beat(5, "1B0", 31, "1RECV_B0"),
        beat(5, "2F0", 33, alive_age_s=32),
    )
    assert roots(found) == [(2, State.SILENT)]
    assert found.path(0) == (0, 1, 2)
    assert (
        found.text(0) == "rank 0 waits in step 5, action 0B0 since 31 s for 1SEND_B0 of rank 1, "
        "which waits in step 5, action 1B0 since 31 s for 2SEND_B0 of rank 2, "
        "which is silent in step 5, action 2F0 since 33 s"
    )


def test_a_stopped_rank_is_found_though_its_message_was_posted():
    """A large message moves only while its sender lives.

    Rank 1 has gone on to 1F3, and 1SEND_B1 never came.
    """
    found = chain(
        THREE,
        beat(5, "0B1", 40, "0RECV_B1"),
        beat(5, "1F3", 39, alive_age_s=39),
        beat(6, "2F0", 38, "2RECV_F0"),
    )
    assert roots(found) == [(1, State.SILENT)]
    assert found.states[0].of_ranks == found.states[2].of_ranks == (1,)


def test_a_rank_that_is_long_in_one_action_is_blamed():
    found = chain(
        THREE, beat(5, "0F1", 90), beat(5, "1F1", 80, "1RECV_F1"), beat(5, "2F1", 79, "2RECV_F1")
    )
    assert roots(found) == [(0, State.WORKS)]
    assert found.text().endswith("which works in step 5, action 0F1 since 90 s")
    assert found.text().startswith(
        "rank 1 waits in step 5, action 1F1 since 80 s for 0SEND_F1 of rank 0"
    )


def test_without_signs_of_life_the_schedule_tells_who_waits():
    """Marks of ranks without a watchdog: 2F1 needs 1SEND_F1, before which rank 1 stands, and so on."""
    one = beat(5, "1F1", 20, alive_age_s=None)
    two = beat(5, "2F1", 20, alive_age_s=None)
    found = chain(THREE, beat(5, "0F1", 21, alive_age_s=None), one, two)
    assert roots(found) == [(0, State.WORKS)]
    assert found.path(2) == (2, 1, 0)
    found = chain(THREE, beat(5, "0F2", 21, alive_age_s=None), one, two)
    assert found.states[1].state is State.WORKS, "its data was sent, so it computes"
    assert roots(found) == [(1, State.WORKS)]


def test_the_sum_waits_for_those_who_have_not_come():
    """Two pipelines of two ranks: all four sum, rank 3 of the world is still at a backward."""
    found = chain(
        PAIR,
        beat(2, "0REDUCE_GRAD", 50, "the sum over 4 ranks"),
        beat(2, "0REDUCE_GRAD", 49, "the sum over 4 ranks"),
        beat(2, "0REDUCE_GRAD", 51, "the sum over 4 ranks"),
        beat(2, "0B3/1", 52),
    )
    assert roots(found) == [(3, State.WORKS)]
    assert found.states[0].of_ranks == (3,)
    assert (
        found.text(0)
        == "rank 0 waits in step 2, action 0REDUCE_GRAD since 50 s for the sum over 4 ranks of rank"
        " 3, which works in step 2, action 0B3/1 since 52 s"
    )


def test_pipelines_of_other_replicas_are_kept_apart():
    found = chain(
        PAIR,
        beat(2, "0B0", 20, "0RECV_B0"),
        beat(2, "1F0", 20, alive_age_s=20),
        beat(2, "0B0", 1, "0RECV_B0"),
        beat(2, "1B0", 0.5),
    )
    assert found.states[0].of_ranks == (1,) and found.states[2].of_ranks == (3,)
    assert roots(found)[0] == (1, State.SILENT)


def test_all_wait_at_the_end_of_a_step_for_the_last():
    found = chain(
        THREE, beat(3, "0STEP", 30, "the sum on rank 0"), beat(4, "load", 29), beat(3, "2STEP", 31)
    )
    assert found.states[0].of_ranks == (2,), "rank 1 has gone on, rank 2 is in its optimizer"
    assert roots(found) == [(2, State.WORKS)]


def test_a_barrier_between_steps_waits_for_who_is_not_there():
    found = chain(
        THREE,
        beat(4, "begin", 30, "the other ranks"),
        beat(4, "begin", 30, "the other ranks"),
        beat(3, "2B3", 33, alive_age_s=33),
    )
    assert found.states[0].of_ranks == found.states[1].of_ranks == (2,)
    assert roots(found) == [(2, State.SILENT)]


def test_sends_wait_for_who_has_not_posted_the_receive():
    found = chain(
        THREE,
        beat(3, "0STEP", 30, "0RECV_B0"),
        beat(3, "1STEP", 29, SENDS),
        beat(3, "2F0", 34, alive_age_s=34),
    )
    assert found.states[1].of_ranks == (2,)


def test_a_ring_is_told_as_one():
    found = chain(PAIR, beat(1, "0B0", 30, "0RECV_B0"), beat(1, "0B1/1", 30, "0RECV_B1/1"))
    assert found.roots == () and sorted(found.cycle) == [0, 1]
    assert found.text(0).endswith("of rank 0, which closes the ring")


def test_all_in_one_operation_that_fails_are_told_as_they_are():
    both = [beat(1, "0REDUCE_GRAD", age, "the sum over 2 ranks") for age in (30.0, 31.0)]
    found = chain(PAIR, *both)
    assert roots(found) == [(1, State.WAITS), (0, State.WAITS)] and found.cycle == ()


def test_a_message_from_a_rank_that_has_finished_is_told():
    found = chain(PAIR, beat(1, "0B0", 30, "0RECV_B0"), beat(-1, "finished", 40, alive_age_s=40))
    assert roots(found) == [(1, State.FINISHED)]
    assert "which has finished outside of the steps (finished)" in found.text(0)


def test_ranks_that_have_left_no_mark_are_no_riddle():
    found = waiting_chain(THREE, {1: beat(0, "1F0", 30, "1RECV_F0")}, round(NOW_S * 1e9))
    assert found.path(1) == (1,) and "rank 1 waits" in found.text(1)
    assert waiting_chain(THREE, {}).text() == "no rank waits"


def test_without_a_clock_the_last_sign_of_life_is_now():
    beats = {
        0: beat(5, "0B0", 31, "0RECV_B0"),
        1: beat(5, "1B0", 31, "1RECV_B0"),
        2: beat(5, "2F0", 33, alive_age_s=32),
    }
    found = waiting_chain(THREE, beats)
    assert found.roots[0].rank == 2 and found.roots[0].since_s == pytest.approx(32.5)


def test_only_a_rank_that_moves_nothing_is_silent_and_a_late_sign_is_none():
    lively = chain(THREE, beat(5, "0F0", 0.1, alive_age_s=15), beat(5, "1F0", 1), beat(5, "2F0", 1))
    assert lively.states[0].state is State.WORKS, "its mark is young"


def test_who_holds_a_rank_up_is_found_without_reading_the_rest():
    class Noting(dict[int, Beat]):
        def __getitem__(self, rank: int) -> Beat:
            read.add(rank)
            return super().__getitem__(rank)

    read: set[int] = set()
    beats = Noting(
        {
            rank: beat(5, f"{rank % 3}F1", 80, "" if rank % 3 == 0 else f"{rank % 3}RECV_F1")
            for rank in range(300)
        }
    )
    graph = WaitGraph(THREE, beats, round(NOW_S * 1e9))
    assert [mark.action for mark in graph.held_up_by(5)] == ["1F1", "0F1"]
    assert read == {3, 4, 5}


def test_a_long_chain_is_told_in_one_line_of_moderate_length():
    num_ranks = 64
    schedule = lower(generate("gpipe", num_ranks, 2))
    beats = [beat(0, "0F0", 99)] + [
        beat(0, f"{r}F0", 98, f"{r}RECV_F0") for r in range(1, num_ranks)
    ]
    text = chain(schedule, *beats).text(num_ranks - 1)
    assert text.startswith("rank 63 waits") and text.endswith(
        "which works in step 0, action 0F0 since 99 s"
    )
    assert "and so on over" in text and "\n" not in text and len(text) < 700


@pytest.mark.parametrize(
    ("text", "expected"),
    [("2F3", True), ("0.1OFFLOAD5/1", True), ("load", False), ("start", False)],
)
def test_phases_are_no_actions(text: str, expected: bool):
    assert (parse_action(text) is not None) is expected


@pytest.mark.parametrize("family", ["gpipe", "1f1b", "gems_master", "chimera", "zb_h1"])
def test_wherever_one_rank_hangs_all_others_lead_to_it(family: str):
    """Each schedule, with a rank that never ends one of its actions.

    The others run on until they must wait.
    """
    schedule = lower(generate(family, 4, 8))
    num_cases = 0
    for hung in range(4):
        for index, stuck in enumerate(schedule.rank_schedules[hung]):
            if index % 3 or stuck.kind not in COMPUTE_KINDS:
                continue
            num_cases += 1
            found = waiting_chain(schedule, stopped_at(schedule, hung, index), round(NOW_S * 1e9))
            assert [root.rank for root in found.roots] == [hung], (stuck, found.text())
    assert num_cases > 5


def stopped_at(schedule: Schedule, hung: int, index: int) -> dict[int, Beat]:
    """Simulate a step until nobody can go on, since rank `hung` never ends its action number `index`."""
    at = [0] * schedule.num_ranks
    done = set()
    has_moved = True

    def awaited(rank: int) -> str:
        if at[rank] == len(schedule.rank_schedules[rank]):
            return "the other ranks"
        action = schedule.rank_schedules[rank][at[rank]]
        if action.kind is Kind.REDUCE_GRAD:
            group = schedule.placement.reduce_group(rank, 1)
            is_whole = all(len(schedule.rank_schedules[peer]) - at[peer] <= 2 for peer in group)
            return "" if is_whole else f"the sum over {len(group)} ranks"
        needs = dependencies(action, schedule) if action.kind in COMPUTE_KINDS else ()
        receives = [need for need in needs if need.kind in RECV_KINDS]
        return next(
            (str(one) for one in receives if dependencies(one, schedule)[0] not in done), ""
        )

    while has_moved:
        has_moved = False
        for rank, row in enumerate(schedule.rank_schedules):
            while not awaited(rank) and (rank, at[rank]) != (hung, index):
                done.add(row[at[rank]])
                at[rank] += 1
                has_moved = True
    return {
        rank: beat(
            0,
            str(row[min(at[rank], len(row) - 1)]),
            50,
            "" if rank == hung else awaited(rank),
            rank=rank,
        )
        for rank, row in enumerate(schedule.rank_schedules)
    }

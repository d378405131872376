"""gems.schedule.simulate: times on paper, with posting and waiting apart."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from gems.errors import ScheduleError
from gems.schedule import generate, published
from gems.schedule.action import Action, Kind
from gems.schedule.costs import uniform
from gems.schedule.dependencies import dependencies, transfers_after
from gems.schedule.ledger import peaks
from gems.schedule.lower import add_transfers, lower
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from tests.helpers.drawings import edited, play, uniform_cost


def blocking_span(schedule: Schedule, forward: float, backward: float) -> float:
    """Simulate a lowered schedule in which a receive waits where it stands.

    What an executor must not do.
    """
    done: dict[Action, float] = {}
    clock = [0.0] * schedule.num_ranks
    left = [list(row) for row in schedule.rank_schedules]
    while any(left):
        moved = False
        for rank, row in enumerate(left):
            while row and all(need in done for need in dependencies(row[0], schedule)):
                action = row.pop(0)
                clock[rank] = max(
                    [clock[rank], *(done[need] for need in dependencies(action, schedule))]
                )
                clock[rank] += {Kind.F: forward, Kind.B: backward}.get(action.kind, 0)
                done[action] = clock[rank]
                moved = True
        if not moved:
            return math.inf
    return max(clock)


def received_when_sent(made: Schedule) -> Schedule:
    """Insert transfers as torch.distributed.pipelining does.

    Rank by rank in turn, the receive with its send.
    """
    rows: list[list[Action]] = [[] for _ in made.rank_schedules]
    left = [list(row) for row in made.rank_schedules]
    done: set[Action] = set()
    while any(left):
        for rank, row in enumerate(left):
            if row and all(need in done for need in dependencies(row[0], made)):
                action = row.pop(0)
                done.add(action)
                rows[rank].append(action)
                for send, receive, there in transfers_after(action, made):
                    rows[rank].append(send)
                    rows[there].append(receive)
    return replace(made, rank_schedules=tuple(map(tuple, rows)), passes=("add_transfers",))


def test_1f1b_takes_33_units_because_receives_only_post() -> None:
    """4 stages, 8 micro-batches, f = 1, b = 2: 33 = (N + P - 1)(f + b).

    45 if each receive waited in its place.
    """
    made = generate("1f1b", 4, 8)
    assert play(made, uniform_cost(1, 2)).span == 33
    assert play(lower(made), uniform_cost(1, 2)).span == 33
    early = received_when_sent(made)
    assert play(early, uniform_cost(1, 2)).span == 33
    assert blocking_span(early, 1, 2) == 45
    assert math.isinf(blocking_span(lower(made), 1, 2)), (
        "our receives stand even earlier, so they must not wait"
    )


@pytest.mark.parametrize("link", [0.0, 0.5, 3.0])
@pytest.mark.parametrize("name", published())
def test_compute_only_and_lowered_take_the_same_time(name: str, link: float) -> None:
    """Lowered without costs it may be later, if a receive one action ahead is posted after the data was ready to go."""
    for p, n, parts in ((1, 2, 1), (2, 4, 2), (5, 12, 2)):
        if name == "gems_mast":
            parts = n // 2
        made = generate(name, p, n, parts)
        plain = play(made, uniform_cost(1, 2), link).span
        eager = play(add_transfers(made, receives_ahead=1000), uniform_cost(1, 2), link).span
        assert eager == plain
        lowered = play(lower(made), uniform_cost(1, 2), link).span
        assert lowered == plain if link == 0 else plain <= lowered <= plain + n * p * link


@pytest.mark.parametrize("link", [0.0, 1.0, 2.5])
def test_links_take_their_time(link: float) -> None:
    p = 4
    n = 3
    f = 1.0
    b = 2.0
    played = play(generate("layer_parallel", p, n), uniform_cost(f, b), link)
    assert played.span == n * (p * (f + b) + 2 * (p - 1) * link)


def test_arrival_is_a_links_time_after_both_sides_are_posted() -> None:
    lowered = lower(generate("gpipe", 2, 1))
    played = play(lowered, uniform_cost(1, 2), link=10)
    rows = [list(map(str, row)) for row in lowered.rank_schedules]
    assert rows[0] == ["0RECV_B0", "0F0", "0SEND_F0", "0B0", "0REDUCE_GRAD", "0STEP"]
    starts = [
        dict(zip(row, start, strict=True)) for row, start in zip(rows, played.start, strict=True)
    ]
    ends = [dict(zip(row, end, strict=True)) for row, end in zip(rows, played.end, strict=True)]
    assert (starts[0]["0SEND_F0"], ends[0]["0SEND_F0"], ends[1]["1RECV_F0"]) == (1, 11, 11)
    assert (starts[1]["1F0"], ends[1]["1F0"], ends[1]["1B0"]) == (11, 12, 14)
    assert (ends[1]["1SEND_B0"], starts[0]["0B0"], played.span) == (24, 24, 26)


@pytest.mark.parametrize(("receives_ahead", "start"), [(0, 12.0), (1, 11.5)])
def test_a_receive_posted_late_makes_the_data_late(receives_ahead: int, start: float) -> None:
    """Rank 1 computes from 1.5 to 11.5, and micro-batch 1 is sent at 2.

    The buffer stands ready, or not until 11.5.
    """
    schedule = add_transfers(generate("gpipe", 2, 2), receives_ahead=receives_ahead)
    played = play(schedule, lambda action: 10.0 if str(action) == "1F0" else 1.0, link=0.5)
    assert played.start[1][schedule.rank_schedules[1].index(Action(Kind.F, 1, 1))] == start


def test_busy_and_efficiency() -> None:
    played = play(generate("1f1b", 4, 8), uniform_cost(1, 2))
    assert played.busy == (24,) * 4
    assert played.efficiency == pytest.approx(24 / 33)


def test_cost_may_differ_from_action_to_action() -> None:
    schedule = generate("gpipe", 2, 2)
    played = play(schedule, lambda action: 10.0 if str(action) == "1F0" else 1.0)
    assert played.start[1] == (1, 11, 12, 13)
    assert played.span == 15
    assert played.busy == (4, 13)


def test_peers_wait_for_each_other_at_the_reduction() -> None:
    schedule = lower(generate("gems_mast", 2, 2))
    played = simulate(schedule, replace(uniform(2, 2, 1.0, 2.0), reduce=(5.0, 0.0)))
    ends = [row[-3] for row in played.end]
    assert ends[0] != ends[1]
    assert [row[-2] for row in played.end] == [max(ends) + 5] * 2
    assert played.start[0][-2] == ends[0] or played.start[1][-2] == ends[1]


def test_an_empty_step() -> None:
    played = play(generate("gpipe", 2, 0), uniform_cost(1, 2))
    assert (played.span, played.busy, played.peak) == (0, (0, 0), (0, 0))
    assert played.efficiency == 1 and math.isfinite(played.efficiency)


def peaks_with(schedule: Schedule) -> tuple[float, ...]:
    return peaks(schedule, uniform(schedule.num_ranks, schedule.num_stages))


def test_peak_counts_what_is_held_at_once() -> None:
    assert peaks_with(generate("gems_master", 2, 8, 4)) == (4, 4)
    assert peaks_with(lower(generate("1f1b", 3, 2))) == (2, 2, 1)


def test_two_ranks_that_wait_for_each_other() -> None:
    """Rank 0 wants the gradient of micro-batch 0 before it sends micro-batch 1, which rank 1 wants first."""
    schedule = generate("gpipe", 2, 2)
    stuck = edited(schedule, 0, "0F0 0F1 0B0 0B1", "0F0 0B0 0F1 0B1")
    with pytest.raises(ScheduleError, match="waits for 1B0, which never comes") as error:
        play(stuck, uniform_cost(1, 2))
    assert (error.value.rank, str(error.value.action)) == (0, "0B0")


def test_a_reduction_that_a_peer_never_joins() -> None:
    schedule = edited(lower(generate("gems_mast", 2, 2)), 1, "0REDUCE_GRAD 0STEP", "0STEP")
    with pytest.raises(ScheduleError, match="waits for its peers, which never comes") as error:
        play(schedule, uniform_cost(1, 2))
    assert (error.value.rank, str(error.value.action)) == (0, "0REDUCE_GRAD")

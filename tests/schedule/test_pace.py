"""The pace: slow ranks and inputs that come late, in the simulation and its split of time."""

from __future__ import annotations

import pytest

from gems.schedule import generate
from gems.schedule.action import Kind
from gems.schedule.costs import uniform
from gems.schedule.lower import lower
from gems.schedule.simulate import EVEN, Pace, rank_times, simulate


def test_a_slow_rank_takes_longer_to_compute_and_for_nothing_else() -> None:
    schedule = lower(generate("1f1b", 2, 4))
    pace = Pace(slow_rank=1, slowdown=1.5)
    for rank, action in schedule.actions():
        is_slow = rank == 1 and action.kind in (Kind.F, Kind.B)
        assert pace.factor(rank, action) == (1.5 if is_slow else 1.0)
        assert EVEN.factor(rank, action) == 1.0


def test_the_slow_rank_sets_the_time_of_the_step() -> None:
    """1F1B with f = 1 and b = 2 on 4 ranks.

    N x 3 x 2 on the slow one, and 3 forwards and backwards around it.
    """
    schedule = lower(generate("1f1b", 4, 8))
    costs = uniform(4, 4)
    assert simulate(schedule, costs).span == 33
    slow = simulate(schedule, costs, pace=Pace(slow_rank=3, slowdown=2.0))
    assert slow.span == 8 * 3 * 2 + 3 * 3


def test_inputs_come_one_after_the_other_where_a_direction_begins() -> None:
    schedule = lower(generate("gems_master", 4, 4))
    pace = Pace(input=5.0)
    for rank, first in ((0, 0), (3, 1)):
        ready = pace.inputs_ready(schedule, rank)
        assert sorted(ready.values()) == [5.0, 10.0]
        assert {(action.kind, action.stage, action.direction) for action in ready} == {
            (Kind.F, 0, first)
        }
    assert pace.inputs_ready(schedule, 1) == EVEN.inputs_ready(schedule, 0) == {}


def test_waiting_for_input_is_told_from_idling() -> None:
    """GPipe, 2 ranks, 2 micro-batches, inputs at 3 and 6: rank 0 waits 3 and, behind F0, 2 more."""
    schedule = lower(generate("gpipe", 2, 2))
    costs = uniform(2, 2)
    pace = Pace(input=3.0)
    played = simulate(schedule, costs, pace=pace)
    first, last = rank_times(schedule, costs, played, pace=pace)
    assert (first.input, last.input) == (5.0, 0.0)
    assert played.span == 6 + 2 + 2 * 2 + 2
    for time in (first, last):
        assert time.useful + time.idle + time.input == pytest.approx(played.span)

"""Waiting: never too short, always with polls, and not for ever."""

from __future__ import annotations

import os
import time
from itertools import pairwise

import pytest

from gems.engine.transport.links import LONGEST_GROWN_S, SLEEP_S, Links
from gems.engine.transport.polling import (
    SPIN_MARGIN_S,
    Waiter,
    poll_interval_s,
    realtime_priority,
    reduce_timer_slack,
    spin_time_s,
)
from gems.errors import StalledError


class Clock:
    """A clock that only sleeping and looking at it moves."""

    def __init__(self, monkeypatch) -> None:
        self.now_ns = 0
        self.sleeps: list[float] = []
        monkeypatch.setattr(time, "perf_counter_ns", self.read)
        monkeypatch.setattr(time, "sleep", self.sleep)

    def read(self) -> int:
        self.now_ns += 500
        return self.now_ns

    def sleep(self, seconds: float) -> None:
        self.sleeps.append(seconds)
        self.now_ns += round(seconds * 1e9)


def test_a_time_is_waited_for_in_short_sleeps_with_polls_and_spins_at_the_end(monkeypatch):
    clock = Clock(monkeypatch)
    polls = []
    waiter = Waiter(lambda: polls.append(clock.now_ns), 0.0001, 10.0)
    waiter.wait_until_time(5_000_000)
    assert 5_000_000 <= clock.now_ns < 5_002_000
    assert max(clock.sleeps) <= 0.0008 and sum(clock.sleeps) < 0.005 - SPIN_MARGIN_S / 2
    assert max(later - earlier for earlier, later in pairwise(polls)) < 900_000
    assert 5_000_000 - polls[-1] < 2_000, "the last poll sees what came just before"


def test_a_time_that_has_passed_costs_one_poll():
    polls: list[int] = []
    Waiter(lambda: polls.append(1), 10.0, 10.0).wait_until_time(time.perf_counter_ns() - 1)
    assert polls == [1]


def test_a_condition_is_made_true_by_polls():
    polls: list[int] = []
    waiter = Waiter(lambda: polls.append(1), 0.0, 10.0)
    waiter.wait_until(lambda: len(polls) >= 5, "five")
    assert len(polls) == 5
    waiter.wait_until(lambda: True, "nothing")
    assert len(polls) == 5


@pytest.mark.timeout(30)
def test_what_never_comes_ends_the_wait():
    with pytest.raises(StalledError, match=r"waited 0\.05 s for 1RECV_F3"):
        Waiter(lambda: None, 0.001, 0.05).wait_until(lambda: False, "1RECV_F3")


def test_looks_of_many_ranks_are_as_many_as_those_of_few(monkeypatch):
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: {0, 1})
    assert poll_interval_s(1) == poll_interval_s(4) == 0.00005
    assert poll_interval_s(128) / 128 == pytest.approx(poll_interval_s(16) / 16)


def test_sleeps_are_sharp_on_linux_and_the_same_elsewhere(monkeypatch):
    reduce_timer_slack()
    monkeypatch.setattr("sys.platform", "darwin")
    monkeypatch.setattr("ctypes.CDLL", None)
    reduce_timer_slack()


def test_promptness_ends_with_the_block(monkeypatch):
    policies: list[int] = []
    monkeypatch.setattr("os.sched_getscheduler", lambda pid: os.SCHED_OTHER)
    monkeypatch.setattr("os.sched_setscheduler", lambda pid, policy, param: policies.append(policy))
    with pytest.raises(ValueError, match="inside"), realtime_priority():
        assert policies == [os.SCHED_RR]
        raise ValueError("inside")
    assert policies == [os.SCHED_RR, os.SCHED_OTHER]


def test_who_may_not_go_first_goes_on_all_the_same(monkeypatch):
    def refuse(*words: object) -> None:
        raise PermissionError

    monkeypatch.setattr("os.sched_setscheduler", refuse)
    with realtime_priority():
        done = True
    assert done


def test_only_a_rank_on_a_gpu_and_with_a_core_of_its_own_spins_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 2, 3})
    assert spin_time_s(1, True) == spin_time_s(4, True) > 10 * spin_time_s(5, True)
    assert spin_time_s(5, True) == spin_time_s(64, True) == spin_time_s(1, False) > 0


class Messages(Links):
    """Links without messages."""

    max_tag = 1

    def send(self, tensor: object, rank: int, tag: int, done: object = None) -> None:
        raise NotImplementedError

    receive = close = send


def sleeps_of_a_wait(monkeypatch: pytest.MonkeyPatch, sleep_s: float | None = None) -> list[float]:
    """Return the sleeps of a wait that never spins and ends at the fortieth look."""
    sleeps: list[float] = []
    looks = iter(range(40))
    waiting = Messages(0, 600.0, spin_s=0.0)
    monkeypatch.setattr(waiting, "_sleep", sleeps.append)
    waiting.wait_until(lambda: next(looks) == 39, "data", sleep_s=sleep_s)
    return sleeps


def test_short_sleeps_of_a_wait_grow_by_its_length_up_to_a_limit(monkeypatch):
    sleeps = sleeps_of_a_wait(monkeypatch)
    assert sleeps[0] == SLEEP_S and sleeps[-1] == sleeps[-2] == LONGEST_GROWN_S > SLEEP_S
    for i, sleep in enumerate(sleeps):
        assert sleep <= 1.001 * (SLEEP_S + sum(sleeps[:i]) / 8)
    assert sleeps == sorted(sleeps)


def test_long_sleeps_of_a_wait_stay_as_they_are(monkeypatch):
    assert set(sleeps_of_a_wait(monkeypatch, 0.01)) == {0.01}

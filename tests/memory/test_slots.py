"""gems.memory.slots: slots of CUDA graphs along a rank's list."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems.memory.plan import Choice, MemoryPlan, Segment, add_memory
from gems.memory.slots import assign_slots, grown_slots
from gems.schedule import FAMILIES, generate
from gems.schedule.action import COMPUTE_KINDS, Action, Kind
from gems.schedule.families.given_placement import forward_only
from gems.schedule.lower import lower
from gems.schedule.placement import linear
from gems.schedule.schedule import Schedule

GENERATED = sorted(name for name, family in FAMILIES.items() if not family.is_searched)
Interval = tuple[int, int, tuple[object, ...]]  # first and last position, and what lives


def intervals(actions: tuple[Action, ...]) -> list[Interval]:
    """Return the lives of values by their definition, found by looking back from the last action."""
    position = {action: index for index, action in enumerate(actions)}
    found: list[Interval] = []
    for action in actions:
        place = action[1:]
        if action.kind is Kind.F:
            others = {kind for kind in Kind if Action(kind, *place) in position}
            born = next(
                kind for kind in (Kind.R, Kind.PREFETCH, Kind.F) if kind in others or kind is Kind.F
            )
            died = Kind.W if Kind.W in others else Kind.B
            begin, end = position[Action(born, *place)], position[Action(died, *place)]
            found.append((begin, end, place))
            if born is not Kind.F:
                found.append((position[action], position[action], place))
    return found


def check(schedule: Schedule, rank: int) -> None:
    actions = schedule.rank_schedules[rank]
    slots = assign_slots(schedule, rank)
    assert set(slots.of_action) == {each for each in actions if each.kind in COMPUTE_KINDS}
    most = Counter[tuple[int, int]]()
    live: dict[tuple[int, int, int], tuple[object, ...]] = {}
    lives = intervals(actions)
    for index, action in enumerate(actions):
        now = [place for begin, end, place in lives if begin <= index <= end]
        for (direction, stage), number in Counter((p[2], p[0]) for p in now).items():
            most[direction, stage] = max(most[direction, stage], number)
        live = {key: place for key, place in live.items() if place in now}
        if action in slots.of_action:
            key = (action.direction, action.stage, slots.of_action[action])
            assert live.setdefault(key, action[1:]) == action[1:], f"{action} shares slot {key}"
    assert dict(slots.counts) == dict(most)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(GENERATED),
    st.integers(1, 4),
    st.integers(1, 4),
    st.lists(st.sampled_from(Choice), min_size=1, max_size=3),
    st.integers(0, 3),
    st.integers(0, 3),
)
def test_no_two_live_values_share_a_slot_and_none_is_spare(
    name: str, ranks: int, parts: int, choices: list[Choice], free_after: int, ahead: int
) -> None:
    compute = generate(name, ranks, 4 * ranks * parts, parts)
    segments = tuple(
        Segment(number, number + 1, choice, free_after, ahead)
        for number, choice in enumerate(choices)
    )
    plan = MemoryPlan("test", (segments,) * compute.num_stages)
    for schedule in (compute, lower(compute), lower(add_memory(compute, plan))):
        for rank in range(ranks):
            check(schedule, rank)


@pytest.mark.parametrize("name", GENERATED)
def test_every_schedule_has_slots_for_all_stages(name: str) -> None:
    schedule = lower(generate(name, 4, 8))
    for rank in range(4):
        check(schedule, rank)
        assert all(assign_slots(schedule, rank).counts.values())


def test_1f1b_needs_fewer_slots_towards_its_end() -> None:
    schedule = lower(generate("1f1b", 4, 8))
    counts = [assign_slots(schedule, rank).counts for rank in range(4)]
    assert counts == [{(0, rank): 4 - rank} for rank in range(4)]


def test_weight_gradients_hold_the_slot() -> None:
    rows = ("0F0", "0I0", "0F1", "0W0", "0F2", "0I1", "0W1", "0I2", "0W2")
    actions = tuple(map(Action.parse, rows))
    slots = assign_slots(Schedule("test", 3, linear(1), (actions,)), 0)
    assert [slots.of_action[each] for each in actions] == [0, 0, 1, 0, 0, 1, 1, 0, 0]


def test_a_forward_without_backward_gives_its_slot_back() -> None:
    schedule = forward_only(linear(2), 6)
    for rank in range(2):
        assert assign_slots(schedule, rank).counts == {(0, rank): 1}


def test_recomputed_stages_need_one_slot_however_many_are_in_flight() -> None:
    compute = generate("gpipe", 2, 6)
    plan = MemoryPlan("test", tuple((Segment(n, n + 1, Choice.RECOMPUTE),) for n in range(2)))
    schedule = lower(add_memory(compute, plan))
    kept, recomputed = (
        [assign_slots(each, rank).counts[0, rank] for rank in range(2)]
        for each in (lower(compute), schedule)
    )
    assert (kept, recomputed) == ([6, 6], [1, 1])
    lifetimes = [end - begin for begin, end, _ in intervals(schedule.rank_schedules[0])]
    assert all(a >= 0 for a in lifetimes) and any(
        b.kind is Kind.B and a.kind is Kind.R for a, b in pairwise(schedule.rank_schedules[0])
    )


def test_first_micro_batches_run_eagerly() -> None:
    actions = [*map(Action.parse, ("0F0", "0F1", "0B0", "0F2", "0B1", "0B2"))]
    changes = [(each, 10 if each.kind is Kind.F else -10) for each in actions]
    # two eager ones hold 20, the second with the first slot 10 + 8; in the next step there are two
    assert grown_slots(changes, {(0, 0): 8}) == (16, 20)


def test_the_first_strip_of_an_image_takes_the_slot_and_its_backward_gives_it_back() -> None:
    actions = [*map(Action.parse, ("0F0", "0F1", "0B1", "0B0", "0F2", "0F3", "0B3", "0B2"))]
    changes = [(each, 5 if each.kind is Kind.F else -5) for each in actions]
    assert grown_slots(changes, {(0, 0): 8}, num_strips=2) == (8, 10)
    # the weight gradients of an image may begin with its first strip
    late = ("0F0", "0F1", "0I1", "0I0", "0W0", "0F2", "0W1", "0F3", "0I3", "0I2", "0W2", "0W3")
    by_kind = {Kind.F: 5, Kind.I: 0, Kind.W: -5}
    changes = [(each, by_kind[each.kind]) for each in map(Action.parse, late)]
    assert grown_slots(changes, {(0, 0): 8}, num_strips=2) == (16, 16)

"""Random edits of valid lists.

The validator accepts exactly those that an independent reading of the rules does.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import event, given, settings
from hypothesis import strategies as st

from gems.errors import ConfigError, ScheduleError
from gems.schedule import generate, published
from gems.schedule.action import COMPUTE_KINDS, Action, Kind
from gems.schedule.formats.grid import fault_grid
from gems.schedule.lower import lower
from gems.schedule.placement import Placement, v
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation
from gems.schedule.validate import validate
from tests.helpers.drawings import play, with_rows

LOOPED = with_rows(
    Schedule("looped", 2, Placement(2, ((0, 1, 1, 0),)), ((), ())),
    ["0F0 0F1 3F0 3B0 3F1 3B1 0B0 0B1", "1F0 2F0 1F1 2F1 2B0 1B0 2B1 1B1"],
)
# One micro-batch is recomputed, one goes to host memory and back, and one backward is whole beside
# a split one.
MEMORY = with_rows(
    Schedule("memory", 2, v(2), ((), ())),
    [
        "0F0 0F1 3F0 3OFFLOAD0 3PREFETCH0 3I0 3W0 3F1 3B1 0I0 0W0 0R1 0I1 0W1",
        "1F0 2F0 1F1 1OFFLOAD1 2F1 2R0 2I0 2W0 1I0 2I1 2W1 1PREFETCH1 1I1 1W1 1W0",
    ],
)


@cache
def bases() -> list[Schedule]:
    found = [lower(LOOPED), lower(MEMORY)]
    for name in published():
        for num_ranks in (1, 2, 3, 4):
            for n in (2, 4):
                try:
                    found.append(lower(generate(name, num_ranks, n, n // 2)))
                except (
                    ConfigError
                ):  # a family that needs more micro-batches, or an even number of ranks
                    continue
    return found


Rows = list[list[Action]]


class Player:
    """Run the lists by the rules of the design alone, without the code under test.

    Posting is free. A forward or backward waits until its own activations are there (by its
    forward, or where these are in the list by the recomputation or the copy back), and until the
    neighbour's result is there: in the memory of the same rank, or by a send and a receive that are
    both posted. A send needs its result. The reduction waits for all ranks that hold the same
    stages.
    """

    def __init__(self, schedule: Schedule) -> None:
        self.rank_schedules = schedule.rank_schedules
        self.stages = schedule.placement.ranks
        self.at = [0] * schedule.placement.num_ranks
        self.done: set[tuple[str, int, int | None, int]] = set()
        self.listed = {
            (a.kind.value, a.stage, a.micro_batch, a.direction)
            for row in self.rank_schedules
            for a in row
        }

    def runs_to_its_end(self) -> bool:
        moved = True
        while moved:
            moved = False
            for rank, row in enumerate(self.rank_schedules):
                while self.at[rank] < len(row) and self.is_ready(row[self.at[rank]], rank):
                    action = row[self.at[rank]]
                    self.done.add((action.kind.value, *action[1:4]))
                    self.at[rank] += 1
                    moved = True
        return self.at == [len(row) for row in self.rank_schedules]

    def is_ready(self, action: Action, rank: int) -> bool:
        kind, stage, *place = action.kind.value, *action[1:4]
        if kind.startswith("RECV") or kind in ("STEP", "START_REDUCE"):
            return True
        if kind.startswith("SEND"):
            return self.is_made("F" if kind[-1] == "F" else "BI", stage, *place)
        if kind == "REDUCE_GRAD":
            mine = {s for row in self.stages for s, r in enumerate(row) if r == rank}
            peers = {r for row in self.stages for s, r in enumerate(row) if s in mine}
            return all(
                any(str(a.kind) == kind for a in self.rank_schedules[peer][: self.at[peer] + 1])
                for peer in peers
            )
        before = {"W": "I", "R": "F", "OFFLOAD": "F", "PREFETCH": "OFFLOAD"}.get(kind)
        if before is not None:
            return self.is_made([before], stage, *place)
        if kind in "BI":
            again = (k for k in ("R", "PREFETCH") if (k, stage, *place) in self.listed)
            if not self.is_made([next(again, "F")], stage, *place):
                return False
        other = stage - 1 if kind == "F" else stage + 1
        ranks = self.stages[action.direction]
        if not 0 <= other < len(ranks):
            return True
        if ranks[other] == rank:
            return self.is_made("F" if kind == "F" else "BI", other, *place)
        sent = "F" if kind == "F" else "B"
        return {(f"SEND_{sent}", other, *place), (f"RECV_{sent}", stage, *place)} <= self.done

    def is_made(self, kinds: Iterable[str], *place: int | None) -> bool:
        return any((kind, *place) in self.done for kind in kinds)


def is_in_order_at_the_end(row: tuple[Action, ...]) -> bool:
    """Reduction after the last compute action, and the step after the reduction."""
    kinds = [action.kind.value for action in row]
    last_compute = max(i for i, kind in enumerate(kinds) if kind in ("F", "B", "I", "W", "R"))
    return last_compute < kinds.index("REDUCE_GRAD") < kinds.index("STEP")


def starts_sums_of_what_is_done(row: tuple[Action, ...]) -> bool:
    """Whether each sum that is started is of a stage that is done, once, and ahead of the reduction."""
    kinds = [action.kind.value for action in row]
    for i, action in enumerate(row):
        if action.kind.value == "START_REDUCE":
            last = [
                j for j, a in enumerate(row) if a.kind in COMPUTE_KINDS and a.stage == action.stage
            ]
            is_whole = (action.micro_batch, action.direction, action.segment) == (None, 0, None)
            if (
                not last
                or not is_whole
                or not max(last) < i < kinds.index("REDUCE_GRAD")
                or row.count(action) > 1
            ):
                return False
    return True


def needed(row: tuple[Action, ...]) -> Counter[Action]:
    return Counter(action for action in row if action.kind.value != "START_REDUCE")


def keeps_the_order_of_micro_batches(row: tuple[Action, ...]) -> bool:
    """Whether the forwards of each stage and direction come in the order of the micro-batches."""
    forwards = [(a.stage, a.direction, a.micro_batch) for a in row if a.kind.value == "F"]
    return sorted(forwards) == sorted(forwards, key=lambda each: each[:2])


def is_valid(edited: Schedule, base: Schedule) -> bool:
    """A list with other actions than a whole step's is broken.

    One with the same actions is, if it cannot run.
    Sums need not start before the reduction.
    """
    same = all(
        needed(a) == needed(b)
        for a, b in zip(edited.rank_schedules, base.rank_schedules, strict=True)
    )
    if not same or not all(map(is_in_order_at_the_end, edited.rank_schedules)):
        return False
    if not all(map(starts_sums_of_what_is_done, edited.rank_schedules)):
        return False
    return (
        all(map(keeps_the_order_of_micro_batches, edited.rank_schedules))
        and Player(edited).runs_to_its_end()
    )


def check_times(schedule: Schedule, played: Simulation, link: float) -> None:
    """No compute action starts before what it needs has ended, with the link's time between two ranks."""
    when = {
        (a.kind, a.direction, a.stage, a.micro_batch): (rank, start, end)
        for rank, row in enumerate(schedule.rank_schedules)
        for a, start, end in zip(row, played.start[rank], played.end[rank], strict=True)
    }
    for (kind, way, stage, m), (rank, start, _) in when.items():
        needs = []
        if kind is Kind.F and stage:
            needs = [(Kind.F, way, stage - 1, m)]
        if kind in (Kind.B, Kind.I):
            needs = [(k, way, stage, m) for k in (Kind.F, Kind.R, Kind.PREFETCH)]
            needs += [(k, way, stage + 1, m) for k in (Kind.B, Kind.I)]
        if kind is Kind.W:
            needs = [(Kind.I, way, stage, m)]
        for need in needs:
            if need in when:
                their_rank, _, their_end = when[need]
                assert start >= their_end + (link if their_rank != rank else 0)


def swap(draw: st.DrawFn, rows: Rows) -> None:
    row = rows[draw(st.integers(0, len(rows) - 1))]
    i = draw(st.integers(0, len(row) - 1))
    j = draw(st.integers(0, len(row) - 1))
    row[i], row[j] = row[j], row[i]


def swap_neighbours(draw: st.DrawFn, rows: Rows) -> None:
    row = rows[draw(st.integers(0, len(rows) - 1))]
    i = draw(st.integers(0, len(row) - 2))
    row[i], row[i + 1] = row[i + 1], row[i]


def move(draw: st.DrawFn, rows: Rows) -> None:
    row = rows[draw(st.integers(0, len(rows) - 1))]
    action = row.pop(draw(st.integers(0, len(row) - 1)))
    row.insert(draw(st.integers(0, len(row))), action)


def remove(draw: st.DrawFn, rows: Rows) -> None:
    row = rows[draw(st.integers(0, len(rows) - 1))]
    row.pop(draw(st.integers(0, len(row) - 1)))


def double(draw: st.DrawFn, rows: Rows) -> None:
    row = rows[draw(st.integers(0, len(rows) - 1))]
    row.insert(draw(st.integers(0, len(row))), row[draw(st.integers(0, len(row) - 1))])


def hand_to_another_rank(draw: st.DrawFn, rows: Rows) -> None:
    row, other = (rows[draw(st.integers(0, len(rows) - 1))] for _ in range(2))
    action = row.pop(draw(st.integers(0, len(row) - 1)))
    other.insert(draw(st.integers(0, len(other))), action)


def rename(draw: st.DrawFn, rows: Rows) -> None:
    row = rows[draw(st.integers(0, len(rows) - 1))]
    i = draw(st.integers(0, len(row) - 1))
    field = draw(st.sampled_from(["stage", "micro_batch", "direction"]))
    row[i] = row[i]._replace(**{field: draw(st.integers(0, 4))})


EDITS = [swap, swap_neighbours, move, remove, double, hand_to_another_rank, rename]


@st.composite
def edited_schedules(
    draw: st.DrawFn, edits: list[Callable[..., None]]
) -> tuple[Schedule, Schedule]:
    base: Schedule = draw(st.sampled_from(bases()))
    rows = [list(row) for row in base.rank_schedules]
    for edit in draw(st.lists(st.sampled_from(edits), min_size=1, max_size=3)):
        edit(draw, rows)
    return replace(base, rank_schedules=tuple(map(tuple, rows))), base


def check(pair: tuple[Schedule, Schedule]) -> None:
    edited, base = pair
    if is_valid(edited, base):
        event("still valid")
        validate(edited)
        check_times(edited, play(edited, lambda action: 1 + len(str(action)) % 3, 0.5), 0.5)
        return
    event("broken")
    with pytest.raises(ScheduleError) as error:
        validate(edited)
    assert 0 <= error.value.rank < edited.num_ranks
    assert isinstance(error.value.action, Action)
    assert error.value.schedule is edited
    assert fault_grid(edited, error.value).count(f"!{error.value.action}!") == 1


@given(edited_schedules(edits=EDITS))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_any_edit(pair: tuple[Schedule, Schedule]) -> None:
    check(pair)


@given(edited_schedules(edits=[swap, swap_neighbours, move]))
@settings(max_examples=400, deadline=None, derandomize=True)
def test_other_orders_of_the_same_actions(pair: tuple[Schedule, Schedule]) -> None:
    check(pair)


def test_the_oracle_tells_good_from_bad() -> None:
    """Both answers occur: every generator's list is valid, and each kind of edit can break one."""
    assert {base.name for base in bases()} >= {"looped", "memory", *published()}
    for base in bases():
        assert is_valid(base, base), base.name
        validate(base)
        for rank, row in enumerate(base.rank_schedules):
            turned = replace(
                base,
                rank_schedules=(
                    *base.rank_schedules[:rank],
                    row[::-1],
                    *base.rank_schedules[rank + 1 :],
                ),
            )
            assert not is_valid(turned, base)
            shorter = replace(
                base,
                rank_schedules=(
                    *base.rank_schedules[:rank],
                    row[1:],
                    *base.rank_schedules[rank + 1 :],
                ),
            )
            assert not is_valid(shorter, base)

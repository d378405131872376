"""Schedules as text, for the tests of this folder: rows of action words, and pictures over time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

from gems.schedule.action import COMPUTE_KINDS, Action, Kind
from gems.schedule.costs import Network, StageCosts
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate

Drawn = list[list[tuple[str, int, int]]]


def text_of(schedule: Schedule) -> list[str]:
    """Return the rows as words."""
    return [" ".join(map(str, row)) for row in schedule.rank_schedules]


def with_rows(schedule: Schedule, texts: list[str]) -> Schedule:
    """Return the schedule with other rows, read from words."""
    return replace(
        schedule, rank_schedules=tuple(tuple(map(Action.parse, text.split())) for text in texts)
    )


def edited(schedule: Schedule, rank: int, old: str, new: str) -> Schedule:
    """Return the schedule with the words `old` of a rank's row put in the place of `new`.

    They stand there once.
    """
    texts = [f" {text} " for text in text_of(schedule)]
    assert texts[rank].count(f" {old} ") == 1, (old, texts[rank])
    texts[rank] = texts[rank].replace(f" {old} ", f" {new} ")
    return with_rows(schedule, texts)


def lines(text: str) -> list[str]:
    """Return the lines of an indented text, without the empty ones."""
    return [" ".join(line.split()) for line in text.splitlines() if line.strip()]


def drawn(picture: str, placement: Placement) -> Drawn:
    """Read a picture: one line a rank, one word a unit of time, as (action, start, end).

    `F3` (or `F3-`) begins forward 3 in direction 0 and `f3` in direction 1, `--` goes on, `..` is
    idle. Where a rank holds several stages of a direction a letter says which: `F3b` is of the
    second.
    """
    return [
        _drawn_row(
            rank,
            line.split(),
            {d: [s for way, s in placement.stages_on(rank) if way == d] for d in (0, 1)},
        )
        for rank, line in enumerate(lines(picture))
    ]


def _drawn_row(
    rank: int, words: list[str], stages: dict[int, list[int]]
) -> list[tuple[str, int, int]]:
    found: list[tuple[str, int, int]] = []
    for now, word in enumerate(words):
        if set(word) == {"."}:
            continue
        if set(word) == {"-"}:
            action, start, _ = found.pop()
            found.append((action, start, now + 1))
            continue
        direction = int(word[0].islower())
        number = word[1:].rstrip("-").rstrip("abcdefgh")
        letter = word[1 + len(number) :].rstrip("-") or "a"
        stage = stages[direction]["abcdefgh".index(letter)]
        action = Action(Kind(word[0].upper()), stage, int(number), direction)
        found.append((str(action), now, now + 1))
    return found


def played_rows(schedule: Schedule, played: Simulation) -> Drawn:
    """Return the compute actions of a replay in the same form."""
    return [
        [
            (str(action), round(start), round(end))
            for action, start, end in zip(row, starts, ends, strict=True)
            if action.kind in COMPUTE_KINDS
        ]
        for row, starts, ends in zip(schedule.rank_schedules, played.start, played.end, strict=True)
    ]


Cost = Callable[[Action], float]


def uniform_cost(forward: float, backward: float) -> Cost:
    """Return the same cost to every forward and to every backward, and none to the rest."""
    costs = {Kind.F: forward, Kind.B: backward}
    return lambda action: costs.get(action.kind, 0.0)


@dataclass(frozen=True)
class _CostOfEach(StageCosts):
    """Stage costs that ask a function for the time of each action."""

    cost: Cost = field(default=lambda action: 0.0)

    def time(self, action: Action) -> float:
        return self.cost(action)


def play(schedule: Schedule, cost: Cost, link: float = 0.0) -> Simulation:
    """Simulate with a function's time for each action and one delay for every message."""
    each = (1.0,) * schedule.num_stages
    return simulate(schedule, _CostOfEach(each, each, each, each, cost=cost), Network(latency=link))

"""A schedule as text: over time, or, if it is invalid, action by action as far as it runs."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest

from gems.errors import ScheduleError
from gems.schedule.action import COMPUTE_KINDS, RECV_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation

MAX_COLUMNS = 400
MAX_RANKS = 32
MAX_STEPS = 16
IDLE = "."


def grid(schedule: Schedule, result: Simulation, unit: float = 1.0) -> str:
    """Draw the compute actions over time; `unit` is the time of one column.

    `F3` is the forward of micro-batch 3 in direction 0, `f4` one in direction 1; `--` continues the
    action to its left and `.` is idle. If a rank holds several stages of a direction, a letter
    distinguishes them: `F3a`, `F3b`. A step longer than 400 columns is cut, and a last line counts
    the rest.
    """
    columns = max(1, round(result.span / unit))
    chunk_of = _chunks(schedule)
    width = _cell_chars(schedule, chunk_of)
    shown = min(columns, MAX_COLUMNS)
    lines = []
    for rank, actions in enumerate(schedule.rank_schedules):
        cells = ["." * width] * shown
        free = 0
        for action, start, end in zip(actions, result.start[rank], result.end[rank], strict=True):
            if action.kind not in COMPUTE_KINDS:
                continue
            first = max(round(start / unit), free if end > start else 0)
            free = first + 1
            letter = action.kind.value.lower() if action.direction else action.kind.value
            chunk = chunk_of[action.direction, action.stage]
            text = f"{letter}{action.micro_batch}{chunk}".ljust(width, "-")
            for column in range(first, min(shown, max(first + 1, round(end / unit)))):
                cells[column] = text if column == first else "-" * width
        lines.append(_head(rank) + " ".join(cells))
    if columns > shown:
        lines.append(f"({columns - shown} more columns)")
    return "\n".join(lines)


def unit_to_fit(schedule: Schedule, result: Simulation, chars: int) -> float | None:
    """Return the time of a column such that lines have `chars` characters.

    Return None if a rank has more actions than columns.
    """
    columns = (chars - len(_head(0))) // (_cell_chars(schedule, _chunks(schedule)) + 1)
    most = max(
        sum(action.kind in COMPUTE_KINDS for action in actions)
        for actions in schedule.rank_schedules
    )
    return result.span / columns if columns >= most else None


def _head(rank: int) -> str:
    return f"rank {rank:>4} | "


def _chunks(schedule: Schedule) -> dict[tuple[int, int], str]:
    """Return the letter of each (direction, stage); empty for the only stage of a rank."""
    letters: dict[tuple[int, int], str] = {}
    for rank in range(schedule.num_ranks):
        for direction in range(schedule.num_directions):
            places = [
                place for place in schedule.placement.stages_on(rank) if place[0] == direction
            ]
            letters |= {
                place: chr(ord("a") + i % 26) if len(places) > 1 else ""
                for i, place in enumerate(places)
            }
    return letters


def _cell_chars(schedule: Schedule, chunk_of: dict[tuple[int, int], str]) -> int:
    return max(map(len, chunk_of.values())) + 1 + len(str(max(0, schedule.num_micro_batches - 1)))


def fault_grid(schedule: Schedule, error: ScheduleError) -> str:
    """Draw each rank's schedule, one action per step, up to the actions that never run.

    The fault is marked as `!0B0!`, other actions that never run as `0B1?`. In each step, every rank
    runs its next action if its dependencies are done. The rank of the fault is shown up to the
    fault, even if it is stuck before; a fault that is not in the schedule comes last. If there are
    many ranks or steps, those around the fault are shown.
    """
    cells = _cells(schedule, error)
    ranks = range(len(cells))
    fault = error.rank if error.rank in ranks else 0
    shown = ranks[max(0, min(fault - MAX_RANKS // 2, len(cells) - MAX_RANKS)) :][:MAX_RANKS]
    marked = next(
        (step for step, cell in enumerate(cells[fault]) if cell.startswith("!")), len(cells[fault])
    )
    end = marked + MAX_STEPS // 4 + 1
    columns = list(enumerate(zip_longest(*(cells[rank] for rank in shown), fillvalue="")))
    first = max(0, end - 1 - MAX_STEPS)
    columns = columns[first:end]
    widths = [max(map(len, (str(step), *texts))) for step, texts in columns]

    def line(head: str, texts: Iterable[object]) -> str:
        padded = (f"{text!s:<{width}}" for text, width in zip(texts, widths, strict=True))
        return f"{head} | {'... ' if first else ''}" + " ".join(padded)

    lines = [line("step     ", (step for step, _ in columns))]
    for place, rank in enumerate(shown):
        lines.append(line(f"rank {rank:>4}", (texts[place] for _, texts in columns)))
    if len(shown) < len(cells):
        lines.append(f"(ranks {shown.start} to {shown.stop - 1} of {len(cells)})")
    return "\n".join(line.rstrip() for line in lines)


def _cells(schedule: Schedule, error: ScheduleError) -> list[list[str]]:
    """Return the cells of each rank; a stuck rank ends with the action that never runs."""
    rank_schedules = schedule.rank_schedules
    fault = None
    if (
        0 <= error.rank < len(rank_schedules) and error.action in rank_schedules[error.rank]
    ):  # the second, if it is in the list twice
        fault = (
            error.rank,
            max(i for i, action in enumerate(rank_schedules[error.rank]) if action == error.action),
        )
    cells: list[list[str]] = [[] for _ in rank_schedules]
    at = [0] * len(rank_schedules)
    done: set[Action] = set()
    while True:
        ready = [
            rank
            for rank, actions in enumerate(rank_schedules)
            if at[rank] < len(actions)
            and (rank, at[rank]) != fault
            and _is_ready(rank, actions[at[rank]], at, done, schedule)
        ]
        if not ready:
            break
        for rank, actions in enumerate(rank_schedules):
            if at[rank] < len(actions):
                cells[rank].append(str(actions[at[rank]]) if rank in ready else IDLE)
        for rank in ready:
            done.add(rank_schedules[rank][at[rank]])
            at[rank] += 1
    for rank, actions in enumerate(rank_schedules):
        while cells[rank] and cells[rank][-1] == IDLE:
            cells[rank].pop()
        stop = at[rank] + 1
        if rank == error.rank and isinstance(error.action, Action):
            stop = len(actions) if fault is None else fault[1]
        cells[rank] += [f"{action}?" for action in actions[at[rank] : stop]]
        if rank == error.rank and isinstance(error.action, Action):
            cells[rank].append(f"!{error.action}!")
    return cells


def _is_ready(
    rank: int, action: Action, at: list[int], done: set[Action], schedule: Schedule
) -> bool:
    placement = schedule.placement
    if action.kind is Kind.REDUCE_GRAD:
        peers = (peer for peer in placement.peers_of(rank) if peer < len(schedule.rank_schedules))
        return all(
            any(
                other.kind is Kind.REDUCE_GRAD
                for other in schedule.rank_schedules[peer][: at[peer] + 1]
            )
            for peer in peers
        )
    if action.kind in (Kind.STEP, Kind.START_REDUCE) or action.kind in RECV_KINDS:
        return True
    is_known = (
        0 <= action.direction < schedule.num_directions and 0 <= action.stage < schedule.num_stages
    )
    if not is_known or schedule.rank_of(action) != rank:
        return False
    for need in dependencies(action, schedule):
        if need not in done or (
            need.kind in RECV_KINDS and dependencies(need, schedule)[0] not in done
        ):
            return False
    return True

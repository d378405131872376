"""A schedule as text: one line a rank, one column a unit of time."""

from __future__ import annotations

from gems.schedule.action import COMPUTE_KINDS
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation

MAX_COLUMNS = 400


def grid(schedule: Schedule, played: Simulation, unit: float = 1.0) -> str:
    """Draw the compute actions over time; `unit` is the time of one column.

    `F3` is the forward of micro-batch 3 in direction 0, `f4` one in direction 1; `--` goes on with the action to
    its left and `.` is idle. Where a rank holds several stages of a direction, a letter names which: `F3a`, `F3b`.
    A step longer than 400 columns is cut, with a line that says so.
    """
    columns = max(1, round(played.span / unit))
    chunk_of = _chunks(schedule)
    width = max(map(len, chunk_of.values())) + 1 + len(str(max(0, schedule.num_micro_batches - 1)))
    shown = min(columns, MAX_COLUMNS)
    lines = []
    for rank, row in enumerate(schedule.rows):
        cells = ["." * width] * shown
        for action, start, end in zip(row, played.start[rank], played.end[rank], strict=True):
            if action.kind not in COMPUTE_KINDS:
                continue
            first = round(start / unit)
            letter = action.kind.value.lower() if action.direction else action.kind.value
            chunk = chunk_of[action.direction, action.stage]
            text = f"{letter}{action.micro_batch}{chunk}".ljust(width, "-")
            for column in range(first, min(shown, max(first + 1, round(end / unit)))):
                cells[column] = text if column == first else "-" * width
        lines.append(f"rank {rank:>4} | " + " ".join(cells))
    if columns > shown:
        lines.append(f"({columns - shown} more columns)")
    return "\n".join(lines)


def _chunks(schedule: Schedule) -> dict[tuple[int, int], str]:
    """Return the letter of each (direction, stage) among those that its rank holds; none where there is but one."""
    letters: dict[tuple[int, int], str] = {}
    for rank in range(schedule.num_ranks):
        held = schedule.placement.stages_on(rank)
        for way in range(schedule.num_directions):
            mine = [place for place in held if place[0] == way]
            letters |= {place: chr(ord("a") + i % 26) if len(mine) > 1 else "" for i, place in enumerate(mine)}
    return letters

"""A schedule as text: one line a rank, one column a unit of time."""

from __future__ import annotations

from gems.schedule.action import COMPUTE_KINDS
from gems.schedule.replay import Replay
from gems.schedule.schedule import Schedule

MAX_COLUMNS = 400


def grid(schedule: Schedule, played: Replay, unit: float = 1.0) -> str:
    """Draws the compute actions over time; `unit` is the time of one column.

    `F3` is the forward of micro-batch 3 in direction 0, `f4` one in direction 1; `--` goes on with the action to
    its left and `.` is idle. A step longer than 400 columns is cut, with a line that says so.
    """
    columns = max(1, round(played.span / unit))
    width = 1 + len(str(max(0, schedule.num_micro_batches - 1)))
    shown = min(columns, MAX_COLUMNS)
    lines = []
    for rank, row in enumerate(schedule.rows):
        cells = ["." * width] * shown
        for action, start, end in zip(row, played.start[rank], played.end[rank], strict=True):
            if action.kind not in COMPUTE_KINDS:
                continue
            first = round(start / unit)
            letter = action.kind.value.lower() if action.direction else action.kind.value
            text = f"{letter}{action.micro_batch}".ljust(width, "-")
            for column in range(first, min(shown, max(first + 1, round(end / unit)))):
                cells[column] = text if column == first else "-" * width
        lines.append(f"rank {rank:>4} | " + " ".join(cells))
    if columns > shown:
        lines.append(f"({columns - shown} more columns)")
    return "\n".join(lines)

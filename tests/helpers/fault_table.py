"""The table of faults that the tests of this folder bring about, and what became of each run."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Fault:
    """A fault, and what a user then has.

    States and exit code, seconds to the end, the diagnosis, and whole steps.
    """

    name: str
    state: str
    exit_code: int | None
    slurm_state: str
    seconds: float | None
    trace_steps: int | None
    diagnosis: str


ROWS: list[Fault] = []


def note(fault: str, state: str, said: str = "", code: int | None = None) -> None:
    """Add a row for a fault that befell a command; the last line that it said is shown."""
    ROWS.append(Fault(fault, state, code, "-", None, None, (said.splitlines() or [""])[-1]))


def table(rows: Iterable[Fault]) -> list[str]:
    """Return the table, a line each."""
    head = (
        f"{'fault':<34} {'state':<10} {'code':>4} {'SLURM':<11} {'s':>6} {'steps':>5}  what"
        " diagnose says"
    )
    return [
        head,
        *(
            f"{row.name:<34} {row.state:<10} {'-' if row.exit_code is None else row.exit_code:>4} "
            f"{row.slurm_state:<11} {'-' if row.seconds is None else f'{row.seconds:.1f}':>6} "
            f"{'-' if row.trace_steps is None else row.trace_steps:>5}  {row.diagnosis}"
            for row in rows
        ),
    ]

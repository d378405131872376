"""SLURM's record of one job: sacct's where it works, else what scontrol still knows."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass
from datetime import UTC, datetime

from jobs.slurm.command import hear
from jobs.slurm.jobs import is_job_number

FIELDS = "JobIDRaw,State,ExitCode,Reason,NodeList,End,Elapsed,Timelimit,MaxRSS"
SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


@dataclass(frozen=True, slots=True)
class JobRecord:
    """How a job stands or ended, in SLURM's words; `nodes` is its list of nodes, `step_states` those of its steps."""

    source: str
    state: str
    exit_code: str = ""
    reason: str = ""
    nodes: str = ""
    end_utc: datetime | None = None
    elapsed: str = ""
    time_limit: str = ""
    max_rss_bytes: int | None = None
    step_states: tuple[str, ...] = ()

    def line(self) -> str:
        """Describe the record in one line, without what is not known."""
        words = [f"state {self.state}"]
        words += [
            f"{name} {value}"
            for name, value in (
                ("exit code", self.exit_code), ("reason", self.reason), ("nodes", self.nodes),
                ("elapsed", self.elapsed), ("time limit", self.time_limit),
            )
            if value
        ]  # fmt: skip
        return ", ".join(words)


def ask_record(job_id: str) -> tuple[JobRecord | None, tuple[str, ...]]:
    """Ask sacct, and scontrol where that has no answer; gives the record, and what could not be asked.

    Each is asked for `jobs.slurm.command.HEAR_LIMIT_S` at most.
    """
    if not is_job_number(job_id):
        return None, ()
    said = hear(["sacct", "--noheader", "--parsable2", f"--format={FIELDS}", f"--jobs={job_id}"])
    record = of_sacct(job_id, said.lines) if said.trouble is None else None
    if record is not None:
        return record, ()
    troubles = [said.trouble or f"sacct does not know job {job_id}"]
    said = hear(["scontrol", "--oneliner", "show", "job", job_id])
    if said.trouble is None and said.lines:
        return of_scontrol(said.lines[0]), tuple(troubles)
    return None, (*troubles, said.trouble or f"scontrol does not know job {job_id}")


def of_sacct(job_id: str, lines: tuple[str, ...]) -> JobRecord | None:
    """Read sacct's rows of a job and its steps; of a job that was started again the last start counts."""
    rows = [line.split("|") for line in lines]
    rows = [row for row in rows if len(row) == len(FIELDS.split(","))]
    jobs = [row for row in rows if row[0] == job_id]
    if not jobs:
        return None
    _, state, exit_code, reason, nodes, end, elapsed, time_limit, _ = jobs[-1]
    steps = [row for row in rows if row[0].startswith(f"{job_id}.")]
    sizes = [size for row in steps if (size := _size(row[8])) is not None]
    return JobRecord(
        "sacct", _first(state), exit_code, _word(reason), _word(nodes), _utc(end), elapsed, time_limit,
        max(sizes, default=None), tuple(_first(row[1]) for row in steps),
    )  # fmt: skip


def of_scontrol(line: str) -> JobRecord:
    """Read the line of `scontrol --oneliner show job`."""
    values = fields_of(line)
    return JobRecord(
        "scontrol",
        values.get("JobState", "UNKNOWN"),
        values.get("ExitCode", ""),
        _word(values.get("Reason", "")),
        _word(values.get("NodeList", "")),
        _utc(values.get("EndTime", "")),
        values.get("RunTime", ""),
        values.get("TimeLimit", ""),
    )


def fields_of(line: str) -> dict[str, str]:
    """Read `NAME=value NAME=value` as scontrol prints them; a value may hold spaces."""
    return dict(re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", line.strip()))


def _first(state: str) -> str:
    """Return a state without who brought it about: CANCELLED by 1000."""
    return state.split()[0] if state.split() else "UNKNOWN"


def _word(text: str) -> str:
    return "" if text in ("None", "(null)", "None assigned", "N/A") else text


def _size(text: str) -> int | None:
    found = re.fullmatch(r"([0-9.]+)([KMGT]?)", text)
    with contextlib.suppress(ValueError):
        return round(float(found[1]) * SIZES[found[2]]) if found else None
    return None


def _utc(text: str) -> datetime | None:
    with contextlib.suppress(ValueError):
        return datetime.fromisoformat(text).astimezone(UTC)
    return None

"""Evidence: all that a run's end has left, in its folder, its logs, SLURM's records and its trace."""

from __future__ import annotations

import contextlib
import json
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.launch.local_launcher import TAIL_LINES, Ended
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Beat
from gems.schedule.schedule import Schedule
from gems.utils.atomic_io import read_json
from jobs.diagnosis.judge import Finding
from jobs.diagnosis.log_patterns import findings_in, lines_of
from jobs.diagnosis.launcher_output import LauncherWords
from jobs.diagnosis.root_cause import Failure, blame, read_beats, read_records, read_stall
from jobs.slurm.job_record import JobRecord, ask_record
from jobs.status.run_status import Condition, conditions

TRACE_LIMIT_S = 60.0
BATCH_LOGS = "*_log.out"


@dataclass(frozen=True, slots=True)
class Evidence:
    """What is known of a run; empty or None where there is nothing, and `troubles` says what could not be asked.

    `failure` is the rank at fault by the launcher's words, records and heartbeats; `trace_steps` the number of whole
    steps in the trace; `resume_step` the one before which the newest checkpoint stands.
    """

    condition: Condition
    spec: RunSpec | None
    job: JobRecord | None
    records: tuple[Mapping[str, Any], ...]
    beats: Mapping[int, Beat]
    stall: Mapping[str, Any]
    stop: Mapping[str, Any]
    stopped: Mapping[str, Any]
    cancelled: Mapping[str, Any]
    signs: tuple[Finding, ...]
    failure: Failure
    trace_steps: int | None
    resume_step: int | None
    troubles: tuple[str, ...]

    @property
    def folder(self) -> RunFolder:
        """The run's folder."""
        return self.condition.folder

    @property
    def status(self) -> Mapping[str, Any]:
        """What status.json says."""
        return self.condition.facts.status

    @property
    def is_batch(self) -> bool:
        """Whether the run was a job of SLURM's, so that its nodes are not this machine."""
        return self.condition.facts.job_id is not None


def gather(folder: RunFolder, *, with_trace: bool = True) -> Evidence:
    """Read all that there is, and asks SLURM about the job; every question has a limit of time.

    `with_trace` opens the trace too, in a process of its own.
    """
    seen = conditions([folder])
    (condition,) = seen.runs
    job_id = condition.facts.job_id
    job, troubles = ask_record(job_id) if job_id is not None else (None, ())
    words, tail = LauncherWords(), []
    signs: list[Finding] = []
    for log in logs_of(folder):
        lines = [line.strip() for line in lines_of(log) if line.strip()]
        signs += findings_in(lines, f"logs/{log.name}")
        if log.name == "ranks.log":
            tail = lines[-TAIL_LINES:]
            for line in lines:
                words.hear(line)
    code = condition.facts.status.get("exit_code")
    ended = Ended(code if isinstance(code, int) and 0 < code <= 128 else 1, tuple(tail))
    return Evidence(
        condition=condition,
        spec=read_spec(folder),
        job=job,
        records=tuple(read_records(folder)),
        beats=read_beats(folder),
        stall=read_stall(folder),
        stop=_read(folder.path / "stop.json"),
        stopped=_read(folder.path / "stopped.json"),
        cancelled=_read(folder.cancelled_json),
        signs=tuple(signs),
        failure=blame(folder, words, ended),
        trace_steps=trace_steps(folder) if with_trace else None,
        resume_step=newest_checkpoint(folder),
        troubles=(*seen.troubles, *troubles),
    )


def logs_of(folder: RunFolder) -> list[Path]:
    """Return the log of the ranks and the newest of SLURM's own, those that are there."""
    batch = sorted(folder.logs.glob(BATCH_LOGS), key=_time_of)
    return [path for path in (folder.logs / "ranks.log", *batch[-1:]) if path.is_file()]


def read_spec(folder: RunFolder) -> RunSpec | None:
    """Read the run's configuration; None where it is damaged."""
    with contextlib.suppress(ConfigError, TypeError):
        return folder.read_spec()
    return None


def read_schedule(folder: RunFolder) -> Schedule | None:
    """Read the run's schedule; None where there is none, or a damaged one."""
    with contextlib.suppress(ConfigError, KeyError, TypeError, IndexError):
        return folder.read_schedule()
    return None


def newest_checkpoint(folder: RunFolder) -> int | None:
    """Return the step before which the newest whole checkpoint stands; one without a manifest is none."""
    steps = []
    for manifest in (folder.path / "checkpoints").glob("step*/manifest.json"):
        found = re.fullmatch(r"step(\d+)", manifest.parent.name)
        if found:
            steps.append(int(found[1]))
    return max(steps, default=None)


def trace_steps(folder: RunFolder) -> int | None:
    """Return the number of steps that every rank finished by the run's trace; None where none is readable."""
    if not folder.trace_h5.exists() and not any((folder.path / "trace").glob("rank*.h5")):
        return None
    words = [sys.executable, "-m", "analysis", "summary", str(folder.path), "--json"]
    try:
        said = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRACE_LIMIT_S)
        summary = json.loads(said.stdout) if said.returncode == 0 else {}
        return int(summary["num_steps"]) + int(summary["num_warmup_steps"])
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return None


def utc_ns(value: object) -> int | None:
    """Read a time from a file, in ns; None where it is none."""
    with contextlib.suppress(ValueError, OverflowError):
        return int(datetime.fromisoformat(str(value)).timestamp() * 1e9)
    return None


def whole(value: object) -> int | None:
    """Return a whole number from a file; None where it is none."""
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return read_json(path)
    return {}


def _time_of(path: Path) -> int:
    with contextlib.suppress(OSError):
        return path.stat().st_mtime_ns
    return 0

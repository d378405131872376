"""What a run folder alone tells of its run: state, step, images/s, loss, and the last sign of life."""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json
from gems.utils.process_tree import is_alive
from jobs.diagnosis.root_cause import FINISHED as RANK_FINISHED
from jobs.diagnosis.root_cause import SIGNAL_BASE, read_beats
from jobs.slurm.jobs import is_job_number

MISSING, UNREADABLE = "missing", "unreadable"
WAITING = ("submitted", "requeued")
GOING_ON = (*WAITING, "running")
STALLED_AFTER_S = 120.0  # an action of a step takes less; loading, saving and starting may take as long as they are let
SLOW = ("start", "load", "begin", "checkpoint")


@dataclass(frozen=True, slots=True)
class Facts:
    """A run folder's own words; None where it has none. `sources` says where a figure comes from that was guessed."""

    folder: RunFolder
    status: Mapping[str, Any]
    step: int | None = None
    steps: int | None = None
    images_per_s: float | None = None
    loss: float | None = None
    sign_ns: int | None = None
    action: str | None = None
    has_ranks: bool = False
    are_ranks_done: bool = False
    hang_timeout_s: float = math.inf
    sources: Mapping[str, str] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """The state as status.json has it."""
        return str(self.status.get("state", MISSING))

    @property
    def job_id(self) -> str | None:
        """The job's number; None where there is no job, or the file holds something else."""
        number = self.status.get("job_id")
        return str(number) if is_job_number(number) else None

    @property
    def cause(self) -> str:
        """Why the run ended."""
        return " ".join(str(self.status.get("cause", "")).split())

    @property
    def may_be_queued(self) -> bool:
        """Whether SLURM may have the job still, or again: one that was stopped may have been put back."""
        code = self.status.get("exit_code")
        is_stopped = self.state == "failed" and isinstance(code, int) and code > SIGNAL_BASE
        return self.job_id is not None and (self.state in GOING_ON or is_stopped)

    def age_s(self, now_ns: int) -> float | None:
        """Return the seconds since the last sign of life; clocks of nodes differ, so never less than 0."""
        return None if self.sign_ns is None else max(0.0, (now_ns - self.sign_ns) / 1e9)

    def is_stalled(self, now_ns: int) -> bool:
        """Return whether the run has been still for too long: ranks in an action, or all of it before and behind."""
        age_s = self.age_s(now_ns)
        return age_s is not None and not self.are_ranks_done and age_s > self.hang_timeout_s


def read_facts(folder: RunFolder) -> Facts:
    """Read what a run folder tells; a damaged file is a fact too, and raises nothing."""
    status = read_status(folder)
    if status.get("state") == UNREADABLE:
        return Facts(folder, status)
    is_going_on = status.get("state") in (*GOING_ON, "prepared")
    spec = _spec(folder) if is_going_on else None
    progress, result = _read(folder.progress_json), _read(folder.result_json)
    sources = {}
    step, steps = _whole(progress.get("step")), _whole(progress.get("steps"))
    signs = [_whole(progress.get("time_ns"))]
    beats = read_beats(folder) if is_going_on else {}
    newest = max(beats.values(), key=lambda beat: beat.time_ns, default=None)
    if newest is not None:
        signs.append(newest.time_ns)
    if step is None and newest is not None and newest.step >= 0:
        step, sources["step"] = max(beat.step for beat in beats.values()), "heartbeats"
    if step is None and (step := _whole(result.get("num_steps"))) is not None:
        steps, sources["step"] = step, "result.json"
    if steps is None and spec is not None:
        steps = spec.train.steps
    if not beats and is_going_on:
        signs.append(_utc_ns(status.get("updated_utc")))
    is_slow = newest is None or newest.step < 0 or newest.action in SLOW
    engine_s = spec.train.hang_timeout_s if spec is not None else STALLED_AFTER_S
    return Facts(
        folder=folder,
        status=status,
        step=step,
        steps=steps,
        images_per_s=_number(progress.get("images_per_s", result.get("images_per_s"))),
        loss=_number(progress.get("loss", result.get("last_loss"))),
        sign_ns=max((sign for sign in signs if sign is not None), default=None),
        action=newest.action if newest is not None else None,
        has_ranks=bool(beats),
        are_ranks_done=bool(beats) and all(beat.action == RANK_FINISHED for beat in beats.values()),
        hang_timeout_s=engine_s if is_slow else min(STALLED_AFTER_S, engine_s),
        sources=sources,
    )


def read_status(folder: RunFolder) -> Mapping[str, Any]:
    """Read status.json, which also may be damaged or forbidden."""
    try:
        return folder.read_status()
    except (ConfigError, OSError) as error:
        return {"state": UNREADABLE, "cause": str(error)}


def lives_here(status: Mapping[str, Any]) -> bool | None:
    """Return whether the process that a file names by pid, its start and host is there; None on another host."""
    if status.get("host") != os.uname().nodename:
        return None
    pid, started = status.get("pid"), status.get("pid_started")
    if not isinstance(pid, int) or pid <= 0:
        return False
    return is_alive(pid, str(started)) if started else Path(f"/proc/{pid}").exists()


def now_ns() -> int:
    """Return the time that heartbeats are stamped with, in ns."""
    return time.time_ns()


def _spec(folder: RunFolder) -> RunSpec | None:
    with contextlib.suppress(ConfigError, TypeError):
        return folder.read_spec()
    return None


def _read(path: Path) -> dict[str, Any]:
    with contextlib.suppress(OSError, ValueError):
        return read_json(path)
    return {}


def _whole(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _number(value: object) -> float | None:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and math.isfinite(value) else None  # type: ignore[arg-type]


def _utc_ns(text: object) -> int | None:
    with contextlib.suppress(ValueError):
        return int(datetime.fromisoformat(str(text)).timestamp() * 1e9)
    return None

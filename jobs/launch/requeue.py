"""Starting again: what SLURM says of this process's own job, and how a saved run gets back into the queue."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gems.config.schema import ClusterConfig, RunSpec
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json, write_json
from jobs.slurm.command import hear
from jobs.slurm.job_record import fields_of
from jobs.slurm.jobs import is_job_number
from jobs.slurm.resources import JobSpec

REQUEUES_JSON = "requeues.json"
LAUNCHER, SLURM = "launcher", "SLURM"
PREEMPTED, OUT_OF_TIME, NODE_FAILED, CANCELLED, PUT_BACK = (
    "preempted", "time limit", "node failure", "cancelled", "requeued",
)  # fmt: skip
ASK_LIMIT_S = 3.0  # SLURM kills KillWait seconds after its SIGTERM, and the answer is wanted before
ORDER_LIMIT_S = 20.0
TICK_S = 60  # SLURM sends a signal before the end up to so many seconds early
TAIL_BYTES = 1 << 14
JOB_ENDS = re.compile(r"\*\*\* JOB (?P<job>\d+) ON \S+ CANCELLED AT \S+(?: DUE TO (?P<why>[A-Z ]+))?")
NODE_FAILURE = re.compile(r"Node failure on (?P<node>\S+)")
WORDS = (
    ("PREEMPTION", PREEMPTED), ("TIME LIMIT", OUT_OF_TIME), ("NODE FAILURE", NODE_FAILED), ("JOB REQUEUE", PUT_BACK),
)  # fmt: skip


def _own_restarts() -> int:
    return int(os.environ.get("SLURM_RESTART_COUNT") or 0)


def _stderr() -> Path:
    return Path(f"/proc/{os.getpid()}/fd/2").resolve()


def _begun_at() -> int:
    try:
        return _stderr().stat().st_size
    except OSError:
        return 0


BEGUN_AT = _begun_at()  # a job that starts again adds to the log of its earlier attempts


@dataclass(frozen=True, slots=True)
class OwnJob:
    """This process's job as SLURM has it: how often it was started again, whether it is being preempted, its seconds left.

    It is not `is_running` any more once SLURM has begun to end it.
    """

    job_id: str
    is_running: bool
    restarts: int
    is_preempted: bool
    left_s: float | None

    @property
    def is_put_back(self) -> bool:
        """Whether SLURM is to start the job once more after this attempt."""
        return self.restarts > _own_restarts()


def own_job() -> OwnJob | None:
    """Ask SLURM for the job that this process is in; None outside of one, or when SLURM does not answer."""
    job_id = os.environ.get("SLURM_JOB_ID")
    if not is_job_number(job_id):
        return None
    said = hear(["scontrol", "show", "job", str(job_id), "--oneliner"], ASK_LIMIT_S)
    if said.trouble is not None:
        return None
    fields = fields_of(" ".join(said.lines))
    left_s = None
    with contextlib.suppress(KeyError, ValueError):
        left_s = (datetime.fromisoformat(fields["EndTime"]) - datetime.now()).total_seconds()
    restarts = fields.get("Restarts", "")
    return OwnJob(
        str(job_id),
        fields.get("JobState") == "RUNNING",
        int(restarts) if restarts.isdecimal() else 0,
        fields.get("PreemptTime", "None") not in ("None", "Unknown", ""),
        left_s,
    )


def why_killed(log: Path | None = None) -> str | None:
    """Read from the job's own output why SLURM ends it; None where it says nothing of this job.

    `log` is what this process has added to its stderr unless told: in a batch script SLURM writes its words there before
    it sends SIGTERM.
    """
    job_id = os.environ.get("SLURM_JOB_ID")
    log, since = (_stderr(), BEGUN_AT) if log is None else (log, 0)
    try:
        with log.open("rb") as file:
            if not file.seekable():
                return None
            size = file.seek(0, os.SEEK_END)
            file.seek(max(since if since <= size else 0, size - TAIL_BYTES))
            text = file.read(TAIL_BYTES).decode(errors="replace")
    except OSError:
        return None
    found = [match for match in JOB_ENDS.finditer(text) if match["job"] == job_id]
    if not found:
        return None
    why = (found[-1]["why"] or "").strip()
    if not why:
        return CANCELLED
    return next((known for word, known in WORDS if why.startswith(word)), why.lower())


def failed_node(lines: tuple[str, ...]) -> str | None:
    """Return the node that srun says has failed."""
    return next((found["node"] for line in lines if (found := NODE_FAILURE.search(line))), None)


def why_stopped(job: OwnJob | None, cluster: ClusterConfig, reason: str) -> str | None:
    """Report why SLURM made a run save and stop, preempted or time limit; None where a person did, or nobody knows.

    `reason` is what the ranks agreed on: SIGTERM reaches ranks alone at a preemption.
    """
    if job is None:
        return PREEMPTED if reason == "SIGTERM" else OUT_OF_TIME if "SLURM_JOB_ID" in os.environ else None
    if job.is_preempted:
        return PREEMPTED
    is_near = job.left_s is not None and job.left_s <= cluster.signal_before_end_s + TICK_S
    return OUT_OF_TIME if is_near else None


def requeues(folder: RunFolder) -> list[dict[str, Any]]:
    """Return how often the run's job was put back into the queue, the earliest first: utc, why, by, job_id, step."""
    with contextlib.suppress(OSError, ValueError):
        rows = read_json(folder.path / REQUEUES_JSON).get("requeues", [])
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []
    return []


def note_requeue(folder: RunFolder, why: str, by: str, step: int | None) -> int:
    """Add to requeues.json, which all attempts share; gives how many there are now."""
    now = datetime.now(UTC).isoformat(timespec="seconds")
    row = {"utc": now, "why": why, "by": by, "job_id": os.environ.get("SLURM_JOB_ID"), "step": step}
    rows = [*requeues(folder), row]
    _write(folder, rows)
    return len(rows)


def refusal(folder: RunFolder, cluster: ClusterConfig, why: str) -> str | None:
    """Report why a saved run is not to start again by itself; None where it is.

    The bound is on attempts that used up their time. Preemption is SLURM's own, and costs the run no attempt.
    """
    free = {str(name).lstrip("-").replace("_", "-"): value for name, value in cluster.sbatch.items()}
    if free.get("no-requeue"):
        return "the job was submitted with no-requeue"
    if cluster.max_requeues == 0:
        return "cluster.max_requeues=0"
    used = sum(row.get("why") == OUT_OF_TIME and row.get("by") == LAUNCHER for row in requeues(folder))
    if why == OUT_OF_TIME and used >= cluster.max_requeues:
        return f"it has started again {used} times, which is cluster.max_requeues"
    return None


def put_back(
    folder: RunFolder, spec: RunSpec, job: JobSpec, facts: dict[str, Any], why: str, step: int | None
) -> str | None:
    """Put this process's job back into the queue, or submits the run as a new job where SLURM refuses; says why neither.

    requeues.json and status.json, which `facts` go to, say "requeued" before SLURM knows: it may end this process at
    once, and ends the command that asked before that has its answer. A new job waits until status.json has its number,
    so the two never run at once.
    """
    job_id = str(os.environ["SLURM_JOB_ID"])
    facts = facts | {"requeue_count": note_requeue(folder, why, LAUNCHER, step)}
    folder.write_status("requeued", **facts | {"job_id": job_id})
    trouble = hear(["scontrol", "requeue", job_id], ORDER_LIMIT_S).trouble
    if trouble is None or why_killed() == PUT_BACK:
        return None
    from jobs.slurm.executor import submit_job

    try:
        new_id = submit_job(spec, job, folder)
    except (ConfigError, OSError) as error:
        _write(folder, requeues(folder)[:-1])
        return f"no requeue, {trouble}; {error}"
    folder.write_status("requeued", **facts | {"job_id": new_id})
    print(f"jobs: no requeue, {trouble}; it goes on as job {new_id}", file=sys.stderr, flush=True)
    return None


def successor(folder: RunFolder) -> str | None:
    """Return the job that the run has gone on as, where SLURM starts this one again all the same; None where there is none."""
    own, noted = os.environ.get("SLURM_JOB_ID"), folder.read_status().get("job_id")
    if _own_restarts() and is_job_number(own) and is_job_number(noted) and int(str(noted)) > int(str(own)):
        return str(noted)
    return None


def _write(folder: RunFolder, rows: list[dict[str, Any]]) -> None:
    write_json(folder.path / REQUEUES_JSON, {"requeues": rows})

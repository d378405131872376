"""Query SLURM's jobs by squeue, sacct or scontrol, and parse its messages of their end in logs.

A site may have only some of these commands.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from gems.runs.failure_cause import FailureCause
from jobs.batch.command import SchedulerUnavailableError, run_command
from jobs.batch.job import Job, JobId, JobQuery, script_path

# Held by its user, who may release it; only an administrator releases what an administrator holds.
HELD = "JobHeldUser"
NEVER_SATISFIED = "DependencyNeverSatisfied"  # the reason of a job that stays pending forever
LISTED = {"%i": "JOBID", "%T": "STATE", "%o": "COMMAND"}
SQUEUE = "squeue"
SACCT = "sacct"
SCONTROL = "scontrol"
SQUEUE_FIELDS = {"%i": "JobID", "%T": "State", "%S": "Start", "%r": "Reason", "%j": "Name"}
SACCT_FIELDS = (
    "JobID",
    "State",
    "Reason",
    "Start",
    "ExitCode",
    "NodeList",
    "End",
    "Elapsed",
    "Timelimit",
    "MaxRSS",
)
JOB_NUMBER = "[0-9]{1,18}(_[0-9]{1,9})?"  # 41, or 41_7 for a task of a job array
# 41@serial for a job of a cluster that is not the default
JOB_ID = JOB_NUMBER + "(@[A-Za-z0-9][A-Za-z0-9_.-]*)?"
STATE = "[A-Z][A-Z_]+"
UNKNOWN = ("", "None", "(null)", "None assigned", "N/A", "Unknown")
SIZES = {"": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

REQUEUED = "requeued"  # by `scontrol requeue`; not a failure
CANCELLED = re.compile(
    r"\*\*\* (?P<what>JOB|STEP) (?P<job>\d+)?\S* .*?CANCELLED AT (?P<time>\S+)"
    r"(?: DUE TO (?P<why>[A-Z ]+))?"
)
NODE_FAILURE = re.compile(r"[Nn]ode failure on (?P<node>[A-Za-z0-9][A-Za-z0-9._-]*)")
REASONS: dict[str, str] = {
    "PREEMPTION": FailureCause.PREEMPTED,
    "TIME LIMIT": FailureCause.TIME_LIMIT,
    "NODE FAILURE": FailureCause.NODE,
    "JOB REQUEUE": REQUEUED,
}


def is_job_number(value: object) -> bool:
    """Return whether a value is a SLURM job number.

    A task of a job array, and a number with a cluster, count as well.
    """
    return isinstance(value, str | int) and re.fullmatch(JOB_ID, str(value)) is not None


def job_order(job_id: str) -> tuple[int, ...]:
    """Return the key that sorts jobs by submission time, and the tasks of an array by index."""
    return tuple(map(int, JobId.parse(job_id).local.split("_")))


def by_cluster(job_ids: Iterable[str]) -> dict[str, list[str]]:
    """Group job numbers by cluster; the key "" is the default cluster."""
    groups: dict[str, list[str]] = {}
    for job_id in map(JobId.parse, job_ids):
        groups.setdefault(job_id.cluster, []).append(job_id.local)
    return {cluster: sorted({*numbers}, key=job_order) for cluster, numbers in groups.items()}


def on(cluster: str) -> list[str]:
    """Return the option that queries `cluster` instead of the default one.

    `cluster` may be several names, separated by commas.
    """
    return [f"--clusters={cluster}"] if cluster else []


def query_jobs(
    job_ids: Iterable[str], source: str, *, steps: bool = False, limit_s: float | None = None
) -> JobQuery:
    """Query squeue or sacct once for all jobs of a cluster, or scontrol for one job.

    A job array is queried as a whole, and all its tasks are returned. squeue also knows jobs that
    ended some minutes ago. For a job that SLURM restarted, sacct returns the last start. With
    `steps`, sacct also reads the steps, for their states and their memory. `limit_s` bounds the
    wait.
    """
    known: dict[str, Job] = {}
    errors = []
    for cluster, numbers in by_cluster(job_ids).items():
        whole = dict.fromkeys(JobId.parse(number).number for number in numbers)
        chosen, (argv, read) = f"--jobs={','.join(whole)}", QUERIES[source]
        allocations = ["--allocations"] if source == SACCT and not steps else []
        options = [numbers[0], "--oneliner"] if source == SCONTROL else [*allocations, chosen]
        result = run_command([argv[0], *on(cluster), *argv[1:], *options], limit_s=limit_s)
        if result.error is not None and "Invalid job id" not in result.error.reason:
            errors.append(str(result.error))
            continue
        jobs = read(result.lines)
        if source == SCONTROL:
            jobs = dict(zip(numbers, jobs.values(), strict=False))
        known |= {
            str(JobId.parse(number)._replace(cluster=cluster)): job for number, job in jobs.items()
        }
    return JobQuery(known, "; ".join(errors) or None)


def list_jobs(chosen: str, clusters: str = "") -> list[Job]:
    """List the jobs that a squeue option selects, including those that ended some minutes ago.

    A job that is missing from the list does not exist: squeue prints its header even if there are
    no jobs, so output without a header is no answer. With several clusters, each has its own
    header. Lines after a job that are not rows are the rest of its arguments, which may hold line
    breaks.

    Raises:
        SchedulerUnavailableError: squeue is not available, or printed no list.
        SchedulerRefusedError: squeue failed.
    """
    format_ = f"--format={'|'.join(LISTED)}"
    result = run_command(["squeue", *on(clusters), "--array", "--states=all", format_, chosen])
    if result.error is not None:
        if "Invalid job id" in result.error.reason:
            return []
        raise result.error
    cluster = clusters
    has_header = False
    jobs = []
    for row in ([*map(str.strip, line.split("|", 2))] for line in result.lines):
        if (
            clusters
            and len(row) == 1
            and (named := re.fullmatch(r"CLUSTER: (\S+)", row[0])) is not None
        ):
            cluster = named[1]
        elif row == [*LISTED.values()]:
            has_header = True
        elif has_header and _is_row(row, len(LISTED)):
            job_id = str(JobId.parse(row[0])._replace(cluster=cluster))
            jobs.append(Job(row[1], job_id=job_id, script=row[2]))
        elif not jobs and has_header and row != [""]:
            raise SchedulerUnavailableError(
                "squeue", f"printed {'|'.join(row)[:80]!r}, which is no job"
            )
    if not has_header:
        raise SchedulerUnavailableError("squeue", "printed no list of jobs")
    return jobs


def _is_row(row: Sequence[str], size: int) -> bool:
    """Return whether the cells of a line describe a job; the first two are its number and state."""
    return len(row) == size and bool(
        re.fullmatch(JOB_NUMBER, row[0]) and re.fullmatch(STATE, row[1])
    )


def find_submitted(tokens: Iterable[str], clusters: str = "") -> dict[str, Job]:
    """Find this user's jobs of some submissions, by token, with one squeue.

    Of an array, prefer an active task. Raises the errors of `list_jobs`.
    """
    jobs = sorted(list_jobs(f"--user={os.getuid()}", clusters), key=lambda job: job.is_active)
    named = (
        (token, job)
        for token in tokens
        for job in jobs
        if script_path(Path(), token).name in job.script
    )
    return dict(named)


def find_job(job_id: str) -> tuple[Job | None, tuple[str, ...]]:
    """Return a job from sacct, or else from scontrol, and the errors of the queries that failed."""
    errors: list[str] = []
    for source in (SACCT, SCONTROL):
        query = query_jobs([job_id], source, steps=True)
        if job_id in query.jobs:
            return query.jobs[job_id], tuple(errors)
        errors.append(query.error or f"{source} does not know job {job_id}")
    return None, tuple(errors)


def scontrol_fields(lines: Sequence[str]) -> dict[str, str]:
    """Parse `NAME=value NAME=value` as scontrol prints them; a value may hold spaces."""
    text = " ".join(lines).strip()
    return dict(re.findall(r"(?:^|\s)([A-Z][\w/:]*)=(.*?)(?=\s+[A-Z][\w/:]*=|\s*$)", text))


def num_queued(
    partition: str | None = None, qos: str | None = None, clusters: str = ""
) -> int | None:
    """Count this user's queued and running jobs in a partition and a qos.

    Return None if squeue does not answer.
    """
    chosen = [
        f"--{key}={value}" for key, value in (("partition", partition), ("qos", qos)) if value
    ]
    user = f"--user={os.getuid()}"
    result = run_command(
        ["squeue", *on(clusters), "--noheader", "--array", "--format=%i", user, *chosen]
    )
    return (
        None
        if result.error is not None
        else sum(not line.startswith("CLUSTER:") for line in result.lines)
    )


def cancel_jobs(job_ids: Sequence[str]) -> str | None:
    """Cancel jobs with one scancel per cluster; return the error, or None."""
    failures = (
        run_command(["scancel", *on(cluster), *numbers]).failure
        for cluster, numbers in by_cluster(job_ids).items()
    )
    return "; ".join(filter(None, failures)) or None


def _read_squeue(lines: Sequence[str]) -> dict[str, Job]:
    rows = ([*map(str.strip, line.split("|", len(SQUEUE_FIELDS) - 1))] for line in lines)
    named = (
        dict(zip(SQUEUE_FIELDS.values(), row, strict=True))
        for row in rows
        if _is_row(row, len(SQUEUE_FIELDS))
    )
    return {row["JobID"]: _job(row, SQUEUE) for row in named}


def _read_sacct(lines: Sequence[str]) -> dict[str, Job]:
    """Read the rows of jobs and of their steps; steps follow their job."""
    jobs: dict[str, Job] = {}
    rows = [
        dict(zip(SACCT_FIELDS, map(str.strip, line.split("|")), strict=False)) for line in lines
    ]
    rows = [row for row in rows if re.match(STATE, row.get("State", ""))]
    for row in rows:
        number = row["JobID"]
        if is_job_number(number):
            steps = [step for step in rows if step["JobID"].startswith(f"{number}.")]
            sizes = [
                re.fullmatch(r"([0-9]+(?:\.[0-9]*)?)([KMGT]?)", step.get("MaxRSS", ""))
                for step in steps
            ]
            rss_bytes = max(
                (round(float(size[1]) * SIZES[size[2]]) for size in sizes if size), default=None
            )
            jobs[number] = _job(
                row, SACCT, rss_bytes, tuple(_first(step["State"]) for step in steps)
            )
    return jobs


def _read_scontrol(lines: Sequence[str]) -> dict[str, Job]:
    row = scontrol_fields(lines)
    names = {
        "State": "JobState",
        "Name": "JobName",
        "Start": "StartTime",
        "End": "EndTime",
        "Elapsed": "RunTime",
        "Timelimit": "TimeLimit",
    }
    row |= {name: row[other] for name, other in names.items() if other in row}
    return {row["JobId"]: _job(row, SCONTROL)} if is_job_number(row.get("JobId")) else {}


def _job(
    row: Mapping[str, str], source: str, max_rss: int | None = None, steps: tuple[str, ...] = ()
) -> Job:
    known = defaultdict(str, {name: value for name, value in row.items() if value not in UNKNOWN})
    restarts = known["Restarts"]
    return Job(
        _first(known["State"]),
        source,
        known["Reason"],
        _utc(known["Start"]),
        row.get("Name"),
        known["ExitCode"],
        known["NodeList"],
        _utc(known["End"]),
        known["Elapsed"],
        known["Timelimit"],
        max_rss,
        steps,
        int(restarts) if restarts.isdecimal() else 0,
        bool(known["PreemptTime"]),
    )


def _first(state: str) -> str:
    """Return the first word of a state: CANCELLED for `CANCELLED by 1000`."""
    return state.split()[0] if state.split() else "UNKNOWN"


def _utc(text: str) -> datetime | None:
    with contextlib.suppress(ValueError):  # SLURM's local time
        return datetime.fromisoformat(text).astimezone(UTC)
    return None


@dataclass(frozen=True, slots=True)
class Cancellation:
    """SLURM's message that it ended a job or a step.

    `reason` is the text after DUE TO; it is empty if a user cancelled the job.
    """

    is_job: bool
    job_id: str | None
    reason: str
    time_ns: int | None

    @property
    def cause(self) -> str:
        """The FailureCause of a known reason, REQUEUED, or else the reason in lower case."""
        if not self.reason:
            return FailureCause.CANCELLED
        return next(
            (cause for text, cause in REASONS.items() if self.reason.startswith(text)),
            self.reason.lower(),
        )


def parse_cancellation(line: str) -> Cancellation | None:
    """Parse a message such as `*** STEP 7.0 ON n1 CANCELLED AT 2026-11-20T12:00:00 DUE TO ... ***`.

    The time in the message is local time.
    """
    message = CANCELLED.search(line)
    if message is None:
        return None
    time_ns = None
    with contextlib.suppress(ValueError):
        time_ns = int(datetime.fromisoformat(message["time"]).timestamp() * 1e9)
    return Cancellation(
        message["what"] == "JOB", message["job"], (message["why"] or "").strip(), time_ns
    )


def failed_node(lines: Iterable[str]) -> str | None:
    """Return the first node that srun reports as failed."""
    return next((failure["node"] for line in lines if (failure := NODE_FAILURE.search(line))), None)


QUERIES: dict[str, tuple[list[str], Callable[[Sequence[str]], dict[str, Job]]]] = {
    SQUEUE: (
        ["squeue", "--noheader", "--array", "--states=all", f"--format={'|'.join(SQUEUE_FIELDS)}"],
        _read_squeue,
    ),
    SACCT: (
        ["sacct", "--noheader", "--parsable2", f"--format={','.join(SACCT_FIELDS)}"],
        _read_sacct,
    ),
    SCONTROL: (["scontrol", "show", "job"], _read_scontrol),
}

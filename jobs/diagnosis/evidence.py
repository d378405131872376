"""Gather the evidence of a run's end from its folder, logs and trace, and from SLURM's records."""

from __future__ import annotations

import contextlib
import json
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from gems.errors import SIGNAL_BASE, StalledError
from gems.launch.local_launcher import TAIL_LINES, Ended
from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import FINISHED
from gems.utils.run_module import RUN_MODULE
from jobs.batch.job import Job, JobId
from jobs.diagnosis.causes import (
    BEHIND_KILLS,
    CONSEQUENCE,
    GONE,
    JOB_STATES,
    MOVED,
    START_CAUSES,
    Finding,
    read_lines,
    scan_lines,
)
from jobs.diagnosis.launcher_output import LauncherOutput
from jobs.diagnosis.root_cause import RankEvidence, classify_record, is_consequence
from jobs.schedulers.scheduler import system_of
from jobs.status.job_record import read_or_empty
from jobs.status.run_status import WAITING, read_spec, run_statuses, utc_ns

TRACE_LIMIT_S = 60.0
SECOND_NS = 10**9
KILL_WAIT_S = 35.0  # between SLURM's order and the end of a job that it records
NODE_WAIT_S = 300.0  # how long SLURM waits for a node that does not answer
NEAR_LIMIT_S = 90.0  # SLURM checks time limits every half minute, and may end a job early
LAUNCH_REASONS = ("JobLaunchFailure", "launch failed requeued held", "launch_failed_requeued_held")
PROLOG = "Prolog"
OUTPUT, EXEC = "#SBATCH --output=", "exec "
SCRIPT_LINE = re.compile(f"^({OUTPUT}|{EXEC})(.*)$", re.MULTILINE)
BATCH_LOGS = ("*_log.out", "*.OU")  # the second is PBS's
# signals by which a launcher, a scheduler or a user ends ranks; the process itself causes others
BY_OTHERS = (9, 15)


class Evidence(RankEvidence):
    """The evidence of the launcher and all other sources; missing parts are empty or None.

    SLURM's commands have a time limit. `trace_steps` is the number of complete steps in the trace;
    it is read only `with_trace`, in a separate process. `resume_step` is the step at which the
    newest checkpoint resumes. `errors` are the errors of failed queries.
    """

    def __init__(self, folder: RunFolder, *, with_trace: bool = True) -> None:
        seen = run_statuses([folder])
        (self.run,) = seen.runs
        self.status = self.run.status
        job_id = self.run.job_id
        self.is_batch = job_id is not None  # its nodes are not this machine
        self.job: Job | None = None
        errors: tuple[str, ...] = ()
        if job_id is not None:
            self.job, errors = system_of(job_id).find_job(job_id)
        self.errors = (*seen.errors, *errors)
        self.spec = read_spec(folder)
        self.stop = read_or_empty(folder.stop_json)
        self.stopped = read_or_empty(folder.stopped_json)
        self.cancelled = read_or_empty(folder.cancelled_json)
        self.log_findings: list[Finding] = []
        output = LauncherOutput()
        tail = []
        for log in log_paths(folder):
            lines = [line.strip() for line in read_lines(log) if line.strip()]
            self.log_findings += scan_lines(lines, f"logs/{log.name}")
            if log.name == "ranks.log":
                tail = lines[-TAIL_LINES:]
                for line in lines:
                    output.feed_line(line)
        code = self.status.get("exit_code")
        number = self.status.get("signal")
        if number and code is not None and 0 < code <= SIGNAL_BASE and "node" not in self.status:
            code = -number  # the launcher itself was killed
        ended = Ended(code if code is not None and code and code <= SIGNAL_BASE else 1, tuple(tail))
        super().__init__(folder, output, ended)
        self.trace_steps = trace_steps(folder) if with_trace else None
        self.resume_step = newest_checkpoint(folder)

    def findings(self) -> list[Finding]:
        """Return the findings of all sources about a run that has ended."""
        sources = (
            _from_records,
            _from_script,
            _from_job,
            _from_orders,
            _from_failure,
            _from_silence,
            _from_status,
        )
        findings = [finding for source in sources for finding in source(self)]
        has_record = bool(self.records)
        has_begun = self.has_trained
        for finding in self.log_findings:
            if finding.cause in START_CAUSES and has_begun:
                findings.append(replace(finding, cause=FailureCause.KILLED, may_follow=True))
            elif finding.cause is not FailureCause.EXCEPTION:
                findings.append(finding)
            elif not has_record:  # otherwise it is the traceback of a record
                findings.append(replace(finding, may_follow=True))
        if not self.is_killed:
            return findings
        return [
            replace(each, is_consequence=True) if each.cause not in BEHIND_KILLS else each
            for each in findings
        ]

    @property
    def is_killed(self) -> bool:
        """Whether the rank at fault was killed.

        If so, the errors of the other ranks are a consequence.
        """
        return self.failure.cause_class in (
            FailureCause.KILLED,
            FailureCause.HOST_MEMORY,
        ) and not any(record.get("rank") == self.failure.rank for record in self.records)


def log_paths(folder: RunFolder) -> list[Path]:
    """Return the log of the ranks and the newest one of the batch system, if they exist."""
    logs = (path for pattern in BATCH_LOGS for path in folder.logs.glob(pattern))
    batch = sorted((path.stat().st_mtime_ns, path) for path in logs if path.is_file())
    return [
        path
        for path in (folder.logs / "ranks.log", *(path for _, path in batch[-1:]))
        if path.is_file()
    ]


def newest_checkpoint(folder: RunFolder) -> int | None:
    """Return the step at which the newest complete checkpoint resumes.

    A checkpoint without a manifest does not count.
    """
    names = [path.parent.name for path in folder.checkpoints.glob("step*/manifest.json")]
    return max((int(name[4:]) for name in names if re.fullmatch(r"step\d+", name)), default=None)


def trace_steps(folder: RunFolder) -> int | None:
    """Return the number of steps that every rank finished, by the run's trace.

    Return None if no trace is readable.
    """
    if not folder.trace_h5.exists() and not any((folder.path / "trace").glob("rank*.h5")):
        return None
    words = [sys.executable, *RUN_MODULE, "analysis", "summary", str(folder.path), "--json"]
    try:
        ended = subprocess.run(
            words, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=TRACE_LIMIT_S
        )
        summary = json.loads(ended.stdout) if ended.returncode == 0 else {}
        return int(summary["num_steps"]) + int(summary["num_warmup_steps"])
    except (OSError, subprocess.TimeoutExpired, ValueError, KeyError, TypeError):
        return None


def _from_records(evidence: Evidence) -> Iterator[Finding]:
    for record in evidence.records:
        cause = classify_record(record)
        follows = is_consequence(record)
        # a rank that found a stall is not its cause: see the failure
        if cause is FailureCause.STALLED and not evidence.is_killed:
            continue
        rank = record.get("rank")
        words = " ".join(str(record.get("cause") or "no reason given").split())
        source = f"FAILED.rank{rank:04d}.json" if rank is not None else "FAILED.rank*.json"
        follows = follows or CONSEQUENCE.search(words) is not None
        yield Finding(
            cause, source, words, utc_ns(record.get("utc")), rank, record.get("node"), follows
        )


def _from_job(evidence: Evidence) -> Iterator[Finding]:
    job = evidence.job
    if job is None:
        return
    end_ns = None if job.end_utc is None else int(job.end_utc.timestamp()) * SECOND_NS
    for state in dict.fromkeys((job.state, *job.step_states)):
        cause = JOB_STATES.get(state)
        is_memory = cause is FailureCause.HOST_MEMORY
        if cause is None or (state != job.state and not is_memory):
            continue  # steps are cancelled with their job, for any reason
        waited_s = NODE_WAIT_S if cause is FailureCause.NODE else KILL_WAIT_S
        time_ns = None if end_ns is None or is_memory else end_ns - int(waited_s * SECOND_NS)
        yield Finding(cause, job.source, job.describe(), time_ns)
    if PROLOG in job.reason or job.reason in LAUNCH_REASONS:
        cause = FailureCause.NODE if PROLOG in job.reason else FailureCause.LAUNCHER
        yield Finding(cause, job.source, job.describe(), end_ns)


def _from_script(evidence: Evidence) -> Iterator[Finding]:
    """Yield the missing paths of a job's script, if the job never started its ranks."""
    job = evidence.job
    folder = evidence.folder
    if (
        job is None
        or job.is_active
        or evidence.run.recorded_state not in WAITING
        or evidence.run.job_id is None
    ):
        return
    script = folder.logs / f"{JobId.parse(evidence.run.job_id).local}_submission.sh"
    lines = {line[1]: line[2] for line in SCRIPT_LINE.finditer("\n".join(read_lines(script)))}
    with contextlib.suppress(ValueError):
        output, program = (
            next(iter(shlex.split(lines.get(name, ""))), "") for name in (OUTPUT, EXEC)
        )
        before = Path(output).parent
        if output and before != folder.logs and not before.is_dir():
            words = (
                f"{MOVED} while its job waited, from {before.parent}: SLURM could not write there"
            )
            yield Finding(FailureCause.LAUNCHER, script.name, words)
        if program.startswith("/") and not Path(program).exists():
            yield Finding(
                FailureCause.LAUNCHER,
                script.name,
                f"{GONE} {program} is gone, which the job's script calls",
            )


def _from_orders(evidence: Evidence) -> Iterator[Finding]:
    cancelled = evidence.cancelled
    status = evidence.status
    spec = evidence.spec
    if cancelled:
        who = f"cancelled by user {cancelled.get('uid', '?')} on {cancelled.get('host', '?')}"
        source = evidence.folder.cancelled_json.name
        yield Finding(FailureCause.CANCELLED, source, who, utc_ns(cancelled.get("utc")))
        return
    began = utc_ns(status.get("started_utc"))
    ended = utc_ns(status.get("updated_utc"))
    is_stopped = status.get("signal") == 15 and evidence.is_batch
    if not is_stopped or spec is None or began is None or ended is None:
        return
    ran_s = (ended - began) / SECOND_NS
    limit_s = 60.0 * spec.cluster.minutes
    if ran_s > max(limit_s - NEAR_LIMIT_S, limit_s / 2):
        words = f"stopped after {ran_s / 60:.1f} of cluster.minutes={spec.cluster.minutes} minutes"
        yield Finding(FailureCause.TIME_LIMIT, "status.json", words, ended)


def _from_failure(evidence: Evidence) -> Iterator[Finding]:
    """Yield the failure of the first rank that ended, by the launcher's output and heartbeats."""
    failure = evidence.failure
    if failure.rank is None and failure.node is None:
        return
    words = f"{failure.what}: {failure.cause}" if failure.cause else failure.what
    finding = Finding(
        failure.cause_class, "logs/ranks.log", words, None, failure.rank, failure.node
    )
    if failure.exit_code == StalledError.exit_code:
        times = (utc_ns(record.get("utc")) for record in evidence.records)
        first_ns = min((time for time in times if time is not None), default=None)
        source = "STALLED.json" if evidence.stall else "heartbeats"
        yield replace(finding, source=source, time_ns=utc_ns(evidence.stall.get("utc")) or first_ns)
    elif evidence.is_killed:
        yield replace(
            finding, may_follow=failure.signal in BY_OTHERS and finding.cause is FailureCause.KILLED
        )
    elif not evidence.records:
        yield replace(finding, may_follow=finding.cause is FailureCause.EXCEPTION)


def _from_silence(evidence: Evidence) -> Iterator[Finding]:
    """Yield the only node whose ranks all ended without a record.

    This applies only if the ranks of the other nodes merely lost their messages.
    """
    records = evidence.records
    if not evidence.is_batch or not records or evidence.is_killed or evidence.stall:
        return
    if any(
        record.get("exit_code") == StalledError.exit_code or not is_consequence(record)
        for record in records
    ):
        return
    known = {record.get("node") for record in records}
    known |= {beat.node for beat in evidence.beats.values() if beat.action == FINISHED}
    silent = {beat.node for beat in evidence.beats.values()} - known
    if len(silent) == 1:
        (node,) = silent
        rank = min(rank for rank, beat in evidence.beats.items() if beat.node == node)
        words = "no rank of this node left a record, and those of the others lost their messages"
        yield Finding(FailureCause.KILLED, "heartbeats", words, None, rank, node)


def _from_status(evidence: Evidence) -> Iterator[Finding]:
    """Yield the record of the launching process; other sources know more about a failed rank."""
    run = evidence.run
    status = evidence.status
    words = run.cause
    time_ns = utc_ns(status.get("updated_utc"))
    if run.state == "failed" and words and status.get("rank") is None:
        cause = classify_record(status)
        is_vague = cause in (FailureCause.EXCEPTION, FailureCause.KILLED, FailureCause.UNKNOWN)
        if is_vague:
            cause = FailureCause.KILLED if status.get("signal") else FailureCause.UNKNOWN
        yield Finding(cause, "status.json", words, time_ns, may_follow=is_vague)
    elif run.state == "cancelled":
        yield Finding(FailureCause.CANCELLED, run.source, run.note or words, time_ns)
    elif run.state == "lost":
        yield Finding(FailureCause.KILLED, run.source, run.note, may_follow=True)

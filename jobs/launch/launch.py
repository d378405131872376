"""The launch of a prepared run, the same here and in a SLURM job: start the ranks, watch, find the failure, collect."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from gems.config.schema import RunSpec
from gems.launch.local_launcher import GRACE_S, Ended, rank_environment, remove_stale_shared_memory, run_ranks
from gems.runs.failure_cause import classify_error
from gems.runs.folder import CANCELLED_JSON, RunFolder
from gems.utils.process_tree import start_time
from jobs.diagnosis.launcher_output import LauncherOutput
from jobs.diagnosis.root_cause import RANK_CODES, Failure, find_failure, has_failed_rank, read_records
from jobs.launch.collect import collect
from jobs.launch.launchers import command, sweep_by_srun
from jobs.launch.mpi_probe import probe_in_job
from jobs.launch.requeue import REQUEUES_JSON, SLURM, add_requeue, own_job_id, read_requeues
from jobs.launch.slurm_json import record_end, record_start
from jobs.launch.termination import CANCELLED_CODE, StopRequest, describe_killed_run, end_saved_run, read_stopped
from jobs.slurm.resources import SIMULATED, JobSpec, job_spec

# The batch script's own rank. srun gives each task one; ranks of another launcher would all take these for theirs.
BATCH_SCRIPT_VARIABLES = ("SLURM_LOCALID", "SLURM_PROCID", "SLURM_NODEID")
JOB_FILES = ("provenance.json", "provenance", "status.json", CANCELLED_JSON, REQUEUES_JSON, "logs")
SWEEP_LIMIT_S = 120.0
POLL_S = 1.0
ABORT_LIMIT_S = 10.0
BATCH_GRACE_S = 2.0  # SLURM has signalled the ranks itself, and leaves this process its KillWait to record the end
DEATH_LIMIT_S = 2.0  # srun reports dead ranks at once; ranks that ignore one SIGTERM live for KillWait more


@dataclass(frozen=True, slots=True)
class _Launch:
    """A launch under way: what is started, and what goes to status.json; `work` is the batch script's callable."""

    folder: RunFolder
    spec: RunSpec
    job: JobSpec
    facts: dict[str, Any]
    output: LauncherOutput
    table_on_stderr: bool
    is_quiet: bool
    work: Callable[[], None] | None

    def close(self, ended: Ended) -> int:
        """Report how the ranks have ended, in status.json and on stderr, and return the exit code."""
        folder, job, facts, is_killed = self.folder, self.job, self.facts, ended.stopped_by is not None
        stopped = read_stopped(folder)
        if stopped is not None:
            state = end_saved_run(folder, self.spec, job, facts, stopped, is_killed, self.work)
            if state == "stopped" and not is_killed:
                self._collect()
            return CANCELLED_CODE if state == "cancelled" else 0
        if ended.returncode == 0 and not is_killed and not read_records(folder):
            is_complete = self.is_quiet and job.launcher == SIMULATED  # its trace is, and nobody asks for the rest
            code = 0 if is_complete else self._collect()
            folder.write_status("finished", **facts, exit_code=code, collected=code == 0)
            return code
        state, failure = "failed", find_failure(folder, self.output, ended)
        if job.launcher == SIMULATED and ended.returncode in RANK_CODES:
            failure = replace(failure, exit_code=ended.returncode)  # no rank: the process's own code tells
        if is_killed:
            state, failure = describe_killed_run(folder, job, failure, ended)
        if state == "requeued":
            facts = facts | {"requeue_count": add_requeue(folder, failure.what, SLURM, None)}
        folder.write_status(state, **facts, **failure.to_dict())
        _report(folder, failure)
        if not is_killed and _has_traces(folder):
            self._collect()
        return failure.exit_code

    def _collect(self) -> int:
        return collect(self.folder, table_on_stderr=self.table_on_stderr, is_quiet=self.is_quiet)


def launch(
    folder: RunFolder,
    spec: RunSpec,
    *,
    echo: bool = True,
    table_on_stderr: bool = False,
    is_quiet: bool = False,
    request: StopRequest | None = None,
    work: Callable[[], None] | None = None,
) -> int:
    """Run all ranks of a prepared run and return the run's exit code.

    A failed run is reported in one line, recorded in status.json, and its traces are collected as far as they go.

    Args:
        folder: the run's.
        spec: its configuration.
        echo: show the ranks' output on stderr too, beside logs/ranks.log.
        table_on_stderr: keep stdout free.
        is_quiet: write the closing table to logs/, and neither table nor pictures of a simulated run.
        request: notes SIGUSR2, which makes the ranks save and stop.
        work: the callable of the batch script, which a new job calls if SLURM refuses to requeue this one.

    Raises:
        ConfigError: the launcher is missing.
        KeyboardInterrupt: after the ranks have ended.
    """
    job = job_spec(spec)
    argv = command(job, folder)
    environment = _environment(job, spec, echo)
    facts = _facts(job, argv, folder)
    folder.write_status("running", **facts)
    output = LauncherOutput()
    with request or StopRequest() as stop_request:
        try:
            # SLURM may have requeued the job
            folder.archive(keep=JOB_FILES, also=[folder.logs / "ranks.log"])
            record_start(folder, job.snapshot)
            _sweep(job, environment, folder)
            probe_in_job(spec, job, folder, environment)
            watch = _AbortWatch(folder, job, output, stop_request)
            ended = run_ranks(
                argv, environment, folder.logs / "ranks.log",
                on_line=output.feed_line, give_up=watch.is_overdue, echo=echo,
                grace_s=BATCH_GRACE_S if job.is_batch else GRACE_S,
            )  # fmt: skip
            if ended.stopped_by is None:
                record_end(folder)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            code = 130 if interrupted else getattr(error, "exit_code", 1)
            cause = "interrupted" if interrupted else f"{type(error).__name__}: {error}"
            cause_class = str(classify_error(error).cause)
            folder.write_status("failed", **facts, exit_code=code, cause=cause, cause_class=cause_class)
            raise
        return _Launch(folder, spec, job, facts, output, table_on_stderr, is_quiet, work).close(ended)


class _AbortWatch:
    """Watches for ranks that have failed while the others wait: a rank's end before MPI starts ends nobody else.

    It is polled all the time, so it also passes a stop request on to the ranks.
    """

    def __init__(self, folder: RunFolder, job: JobSpec, output: LauncherOutput, request: StopRequest) -> None:
        self._folder = folder
        self._output = output
        self._reports_deaths = job.launcher == "srun"
        self._request = request
        self._limit_s = ABORT_LIMIT_S
        self._polled_s = 0.0
        self._failed_s: float | None = None

    def is_overdue(self) -> bool:
        """Return whether a rank's failure has been known for too long.

        The limit is ABORT_LIMIT_S, or DEATH_LIMIT_S if srun reported the failure.
        """
        self._request.pass_on(self._folder)
        now_s = time.monotonic()
        if self._failed_s is not None:
            return now_s - self._failed_s > self._limit_s
        if now_s - self._polled_s > POLL_S:
            self._polled_s = now_s
            is_dead = self._reports_deaths and bool(self._output.deaths)
            if is_dead or has_failed_rank(self._folder):
                self._failed_s = now_s
                self._limit_s = DEATH_LIMIT_S if is_dead else ABORT_LIMIT_S
        return False


def _environment(job: JobSpec, spec: RunSpec, echo: bool) -> dict[str, str]:
    environment = rank_environment(spec.machine.threads_per_rank, keep_slurm=job.is_batch)
    if echo and sys.stderr.isatty():
        environment["GEMS_PROGRESS"] = "bar"
    if job.is_batch:
        environment["SLURM_EXPORT_ENV"] = "ALL"  # after `sbatch --export=NONE` ranks would get nothing of this
    if job.launcher == "ibrun":
        for name in BATCH_SCRIPT_VARIABLES:
            environment.pop(name, None)
    return environment | {key: str(value) for key, value in spec.cluster.environment.items()}


def _facts(job: JobSpec, argv: list[str], folder: RunFolder) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "pid": os.getpid(),
        "pid_started": start_time(os.getpid()),
        "host": os.uname().nodename,
        "launcher": job.launcher,
        "command": argv,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if job.is_batch and own_job_id() is not None:
        facts["job_id"] = own_job_id()
    if count := len(read_requeues(folder)):
        facts["requeue_count"] = count
    return facts


def _sweep(job: JobSpec, environment: dict[str, str], folder: RunFolder) -> None:
    """Remove stale shared memory here, and on all nodes when SLURM restarts a job under its old number."""
    remove_stale_shared_memory()
    if job.launcher == "srun" and "SLURM_RESTART_COUNT" in os.environ:
        run_ranks(sweep_by_srun(job, folder), environment, timeout_s=SWEEP_LIMIT_S)


def _report(folder: RunFolder, failure: Failure) -> None:
    where = f"traces up to the last finished step are in {folder.path / 'trace'}"
    if not _has_traces(folder):
        where = f"the ranks' output is in {folder.logs / 'ranks.log'}"
    print(f"jobs: {failure.describe()}; {where}", file=sys.stderr, flush=True)


def _has_traces(folder: RunFolder) -> bool:
    return any((folder.path / "trace").glob("rank*.h5"))

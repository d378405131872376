"""The launch of a prepared run, the same here and in a SLURM job: start the ranks, watch, judge, collect."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from gems.config.schema import RunSpec
from gems.launch.local_launcher import GRACE_S, Ended, rank_environment, remove_stale_shared_memory, run_ranks
from gems.runs.folder import CANCELLED_JSON, RunFolder
from gems.utils.process_tree import start_time
from jobs.cli.collect import collect
from jobs.diagnosis.launcher_output import LauncherWords
from jobs.launch.launchers import command, sweep_by_srun
from jobs.launch.mpi_probe import probe_in_job
from jobs.launch.requeue import REQUEUES_JSON, SLURM, note_requeue, requeues
from jobs.diagnosis.root_cause import RANK_CODES, Failure, blame, has_failed_rank, read_records
from jobs.launch.stop_request import StopRequest
from jobs.launch.termination import CANCELLED_CODE, go_on, of_killed, read_stopped
from jobs.slurm.resources import SIMULATED, JobSpec, job_spec
from jobs.launch.slurm_json import record_end, record_start

# The batch script's own place. srun gives each task one; ranks of another launcher would all take these for theirs.
OF_THE_BATCH_SCRIPT = ("SLURM_LOCALID", "SLURM_PROCID", "SLURM_NODEID")
OF_THE_JOB = ("provenance.json", "provenance", "status.json", CANCELLED_JSON, REQUEUES_JSON, "logs")
SWEEP_LIMIT_S = 120.0
LOOK_S = 1.0
ABORT_LIMIT_S = 10.0
BATCH_GRACE_S = (
    2.0  # SLURM has told the ranks itself, and leaves this process no longer than its KillWait to note the end
)
DEATH_LIMIT_S = 2.0  # srun names the dead at once; ranks that spare one SIGTERM live for KillWait more


def launch(
    folder: RunFolder,
    spec: RunSpec,
    *,
    echo: bool = True,
    table_on_stderr: bool = False,
    is_quiet: bool = False,
    request: StopRequest | None = None,
) -> int:
    """Run all ranks of a prepared run and gives the run's exit code.

    `echo` shows the ranks' output on stderr beside logs/ranks.log. `is_quiet` keeps the closing table in logs/ too, and
    makes neither table nor pictures of a simulated run. `request` notes SIGUSR2, which makes the ranks save and stop.
    A failed run is said in one line, kept in status.json, and its traces are collected as far as they go.

    Raises:
        ConfigError: the launcher is not there.
        KeyboardInterrupt: after the ranks have ended.
    """
    job = job_spec(spec)
    argv = command(job, folder)
    environment = _environment(job, spec, echo)
    facts = _facts(job, argv, folder)
    folder.write_status("running", **facts)
    words = LauncherWords()
    with request or StopRequest() as asked:
        try:
            # SLURM may have requeued the job
            folder.archive(keep=OF_THE_JOB, also=[folder.logs / "ranks.log"])
            record_start(folder, job.snapshot)
            _sweep(job, environment, folder)
            probe_in_job(spec, job, folder, environment)
            watch = _AbortWatch(folder, job, words, asked)
            ended = run_ranks(
                argv, environment, folder.logs / "ranks.log",
                on_line=words.hear, give_up=watch.is_overdue, echo=echo,
                grace_s=BATCH_GRACE_S if job.is_batch else GRACE_S,
            )  # fmt: skip
            if ended.stopped_by is None:
                record_end(folder)
        except BaseException as error:
            interrupted = isinstance(error, KeyboardInterrupt)
            code = 130 if interrupted else getattr(error, "exit_code", 1)
            cause = "interrupted" if interrupted else f"{type(error).__name__}: {error}"
            folder.write_status("failed", **facts, exit_code=code, cause=cause)
            raise
        return _close(folder, spec, job, facts, words, ended, table_on_stderr, is_quiet)


def _close(
    folder: RunFolder, spec: RunSpec, job: JobSpec, facts: dict[str, Any], words: LauncherWords, ended: Ended,
    table_on_stderr: bool, is_quiet: bool,
) -> int:  # fmt: skip
    """Judge how the ranks have ended, says it, and gives the exit code."""
    stopped = read_stopped(folder)
    if stopped is not None:
        state = go_on(folder, spec, job, facts, stopped, ended.stopped_by is not None)
        if state == "stopped" and ended.stopped_by is None:
            collect(folder, table_on_stderr=table_on_stderr, is_quiet=is_quiet)
        return CANCELLED_CODE if state == "cancelled" else 0
    if ended.returncode == 0 and ended.stopped_by is None and not read_records(folder):
        is_whole = is_quiet and job.launcher == SIMULATED  # its trace is, and nobody asks for the rest
        code = 0 if is_whole else collect(folder, table_on_stderr=table_on_stderr, is_quiet=is_quiet)
        folder.write_status("finished", **facts, exit_code=code, collected=code == 0)
        return code
    failure = blame(folder, words, ended)
    if job.launcher == SIMULATED and ended.returncode in RANK_CODES:
        failure = replace(failure, exit_code=ended.returncode)  # no rank: the process's own code says why
    state = "failed"
    if ended.stopped_by is not None:
        state, failure = of_killed(folder, job, failure, ended)
    if state == "requeued":
        facts = facts | {"requeue_count": note_requeue(folder, failure.what, SLURM, None)}
    folder.write_status(state, **facts, **failure.to_dict())
    _say(folder, failure)
    if ended.stopped_by is None and _has_traces(folder):
        collect(folder, table_on_stderr=table_on_stderr, is_quiet=is_quiet)
    return failure.exit_code


class _AbortWatch:
    """Watches for ranks that have failed while the others wait: a rank's end before MPI starts ends nobody else.

    It is asked all the time, so it also passes a request to stop on to the ranks.
    """

    def __init__(self, folder: RunFolder, job: JobSpec, words: LauncherWords, asked: StopRequest) -> None:
        self._folder = folder
        self._words = words
        self._hears_deaths = job.launcher == "srun"
        self._asked = asked
        self._limit_s = ABORT_LIMIT_S
        self._looked_s = 0.0
        self._failed_s: float | None = None

    def is_overdue(self) -> bool:
        """Return whether a rank's failure has been known for long: ABORT_LIMIT_S, or DEATH_LIMIT_S where srun told it."""
        self._asked.pass_on(self._folder)
        now_s = time.monotonic()
        if self._failed_s is not None:
            return now_s - self._failed_s > self._limit_s
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            is_dead = self._hears_deaths and bool(self._words.deaths)
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
        for name in OF_THE_BATCH_SCRIPT:
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
    if job.is_batch and "SLURM_JOB_ID" in os.environ:
        facts["job_id"] = os.environ["SLURM_JOB_ID"]
    if count := len(requeues(folder)):
        facts["requeue_count"] = count
    return facts


def _sweep(job: JobSpec, environment: dict[str, str], folder: RunFolder) -> None:
    """Remove stale shared memory here, and on all nodes when SLURM restarts a job under its old number."""
    remove_stale_shared_memory()
    if job.launcher == "srun" and "SLURM_RESTART_COUNT" in os.environ:
        run_ranks(sweep_by_srun(job, folder), environment, timeout_s=SWEEP_LIMIT_S)


def _say(folder: RunFolder, failure: Failure) -> None:
    where = f"traces up to the last finished step are in {folder.path / 'trace'}"
    if not _has_traces(folder):
        where = f"the ranks' output is in {folder.logs / 'ranks.log'}"
    print(f"jobs: {failure.line()}; {where}", file=sys.stderr, flush=True)


def _has_traces(folder: RunFolder) -> bool:
    return any((folder.path / "trace").glob("rank*.h5"))

"""The launch of a prepared run, the same here and in a SLURM job: start the ranks, watch, judge, collect."""

from __future__ import annotations

import os
import sys
import time
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from gems.config import RunSpec
from gems.ranks import rank_environment, remove_stale_shared_memory, run_ranks
from gems.runfolder import RunFolder
from jobs.blame import RANK_CODES, Failure, blame, has_failed_rank, read_records
from jobs.collect import collect
from jobs.launchers import command, sweep_by_srun
from jobs.spec import SIMULATED, JobSpec, job_spec
from jobs.words import LauncherWords

OF_THE_JOB = ("provenance.json", "status.json", "logs")
SWEEP_LIMIT_S = 120.0
LOOK_S = 1.0
ABORT_LIMIT_S = 10.0


def launch(
    folder: RunFolder,
    spec: RunSpec,
    *,
    echo: bool = True,
    table_on_stderr: bool = False,
    is_quiet: bool = False,
) -> int:
    """Runs all ranks of a prepared run and gives the run's exit code.

    `echo` shows the ranks' output on stderr beside logs/ranks.log. `is_quiet` keeps the closing table in logs/ too, and
    makes neither table nor pictures of a simulated run.
    A failed run is said in one line, kept in status.json, and its traces are collected as far as they go.

    Raises:
        ConfigError: the launcher is not there.
        KeyboardInterrupt: after the ranks have ended.
    """
    job = job_spec(spec)
    argv = command(job, folder)
    environment = _environment(job, spec, echo)
    facts = _facts(job, argv)
    folder.write_status("running", **facts)
    words = LauncherWords()
    try:
        folder.archive(keep=OF_THE_JOB, also=[folder.logs / "ranks.log"])  # SLURM may have requeued the job
        _sweep(job, environment)
        ended = run_ranks(
            argv, environment, folder.logs / "ranks.log",
            on_line=words.hear, give_up=_AbortWatch(folder).is_overdue, echo=echo,
        )  # fmt: skip
    except BaseException as error:
        interrupted = isinstance(error, KeyboardInterrupt)
        code = 130 if interrupted else getattr(error, "exit_code", 1)
        cause = "interrupted" if interrupted else f"{type(error).__name__}: {error}"
        folder.write_status("failed", **facts, exit_code=code, cause=cause)
        raise
    if ended.returncode == 0 and ended.stopped_by is None and not read_records(folder):
        is_whole = is_quiet and job.launcher == SIMULATED  # its trace is, and nobody asks for the rest
        code = 0 if is_whole else collect(folder, table_on_stderr=table_on_stderr, is_quiet=is_quiet)
        folder.write_status("finished", **facts, exit_code=code, collected=code == 0)
        return code
    failure = blame(folder, words, ended)
    if job.launcher == SIMULATED and ended.returncode in RANK_CODES:
        failure = replace(failure, exit_code=ended.returncode)  # no rank: the process's own code says why
    folder.write_status("failed", **facts, **failure.to_dict())
    _say(folder, failure)
    if ended.stopped_by is None and _has_traces(folder):
        collect(folder, table_on_stderr=table_on_stderr, is_quiet=is_quiet)
    return failure.exit_code


class _AbortWatch:
    """Watches for ranks that have failed while the others wait: a rank's end before MPI starts ends nobody else."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._looked_s = 0.0
        self._failed_s: float | None = None

    def is_overdue(self) -> bool:
        """Tells whether a rank's failure has been known for ABORT_LIMIT_S."""
        now_s = time.monotonic()
        if self._failed_s is not None:
            return now_s - self._failed_s > ABORT_LIMIT_S
        if now_s - self._looked_s > LOOK_S:
            self._looked_s = now_s
            if has_failed_rank(self._folder):
                self._failed_s = now_s
        return False


def _environment(job: JobSpec, spec: RunSpec, echo: bool) -> dict[str, str]:
    environment = rank_environment(spec.machine.threads_per_rank, keep_slurm=job.launcher == "srun")
    if echo and sys.stderr.isatty():
        environment["GEMS_PROGRESS"] = "bar"
    if job.launcher == "srun":
        environment["SLURM_EXPORT_ENV"] = (
            "ALL"  # after `sbatch --export=NONE` ranks would get nothing of this
        )
    return environment | {key: str(value) for key, value in spec.cluster.environment.items()}


def _facts(job: JobSpec, argv: list[str]) -> dict[str, Any]:
    facts: dict[str, Any] = {
        "pid": os.getpid(),
        "host": os.uname().nodename,
        "launcher": job.launcher,
        "command": argv,
        "started_utc": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    if job.launcher == "srun" and "SLURM_JOB_ID" in os.environ:
        facts["job_id"] = os.environ["SLURM_JOB_ID"]
    return facts


def _sweep(job: JobSpec, environment: dict[str, str]) -> None:
    """Removes stale shared memory here, and on all nodes when SLURM restarts a job under its old number."""
    remove_stale_shared_memory()
    if job.launcher == "srun" and "SLURM_RESTART_COUNT" in os.environ:
        run_ranks(sweep_by_srun(job), environment, timeout_s=SWEEP_LIMIT_S)


def _say(folder: RunFolder, failure: Failure) -> None:
    where = f"traces up to the last finished step are in {folder.path / 'trace'}"
    if not _has_traces(folder):
        where = f"the ranks' output is in {folder.logs / 'ranks.log'}"
    print(f"jobs: {failure.line()}; {where}", file=sys.stderr, flush=True)


def _has_traces(folder: RunFolder) -> bool:
    return any((folder.path / "trace").glob("rank*.h5"))

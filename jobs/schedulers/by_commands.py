"""Batch systems that run the script without submitit.

One query of such a system returns everything known about a user's jobs. A submission's token is in
the job's environment, and the system's query shows it. The script itself has no token, so a dry run
prints exactly what is submitted.
"""

from __future__ import annotations

import os
import shlex
import sys
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from gems.errors import ConfigError, TryLaterError
from gems.launch.local_launcher import without_leftovers
from gems.runs.folder import RunFolder
from gems.utils.run_module import RUN_MODULE
from jobs.batch.command import CommandResult, SchedulerError, run_command
from jobs.batch.job import Job, JobQuery
from jobs.batch.resources import TOKEN_VARIABLE, JobSpec, Work
from jobs.schedulers.scheduler import Scheduler

PROGRAM = "jobs.launch.batch"


class ByCommands(Scheduler):
    """A batch system whose subclass knows the directives, the commands and their output."""

    full: ClassVar[tuple[str, ...]] = ()  # messages of a full queue

    ended: ClassVar[tuple[str, ...]]  # messages about a job that has ended

    @abstractmethod
    def fetch(
        self, job_ids: Sequence[str] | None = None, limit_s: float | None = None
    ) -> list[Job]:
        """Return this user's jobs, or the known ones of some; raise SchedulerError without a list."""

    def cancel_argv(self) -> list[str]:
        """Return the command that cancels jobs, without their IDs."""
        return [self.cancel_program]

    def command_environment(self) -> dict[str, str] | None:
        """Return the environment of other commands, or None for the default of `run_command`."""
        return None

    def error_of(self, result: CommandResult) -> SchedulerError | None:
        """Return the error of a command, unless it only means that all its jobs have ended."""
        lines = [line for line in result.stderr.splitlines() if line.strip()]
        has_ended = bool(lines) and all(any(text in line for text in self.ended) for line in lines)
        return None if has_ended else result.error

    def cancel(self, job_ids: Sequence[str]) -> str | None:
        """Cancel jobs with one command."""
        argv = [*self.cancel_argv(), *job_ids]
        error = self.error_of(run_command(argv, environment=self.command_environment()))
        return None if error is None else str(error)

    def environment(self) -> dict[str, str]:
        """Return the environment of a command that submits."""
        return without_leftovers(os.environ)

    def submission_environment(self, script: str, token: str) -> dict[str, str]:
        """Return the environment of a command that submits, with the token."""
        return self.environment() | {TOKEN_VARIABLE: token}

    def script(
        self,
        job: JobSpec,
        folder: RunFolder,
        works: Sequence[Work] = (),
        command: str | None = None,
    ) -> str:
        """Return the batch script, in which the queue and the account are not quoted."""
        for key, text in (
            ("cluster.partition", job.cluster.partition),
            ("cluster.account", job.cluster.full_account),
        ):
            if text is not None and (not text.isprintable() or len(text.split()) != 1):
                raise ConfigError(key, repr(text), "must be one word")
        return super().script(job, folder, works, command)

    def launch_command(self, job: JobSpec, folder: RunFolder, works: Sequence[Work]) -> str:
        """Return the line that starts `jobs.launch.batch`."""
        runs = works[0].run_folders if works else (str(folder.path),)
        code = [str(RunFolder(Path(runs[0])).code_zip)] if job.snapshot else RUN_MODULE
        return f"exec {shlex.join([sys.executable, '-u', *code, PROGRAM, *runs])}"

    def refusal(self, cluster: str, reason: str) -> ConfigError:
        """Return the error for a job that is refused."""
        is_full = any(text in reason for text in self.full)
        kind = TryLaterError if is_full else ConfigError
        text = f"{self.program} refuses the job: {reason}"
        advice = "see cluster.partition, cluster.account and cluster.minutes"
        return kind("cluster", cluster, text, advice)

    def find_submitted(self, tokens: Iterable[str], clusters: str = "") -> dict[str, Job]:
        """Find the jobs of submissions by token; prefer an active job if a token has several."""
        wanted = set(tokens)
        jobs = sorted(self.fetch(), key=lambda job: job.is_active)
        return {job.token: job for job in jobs if job.token in wanted}

    def list_jobs(self, job_ids: Iterable[str]) -> list[Job]:
        """List the known ones of some jobs."""
        return self._list(job_ids)

    def query_queue(self, job_ids: Iterable[str]) -> JobQuery:
        """Query some jobs, including ended ones that the system still remembers."""
        return self._query(job_ids)

    def find_job(self, job_id: str) -> tuple[Job | None, tuple[str, ...]]:
        """Return the job as the system describes it."""
        query = self._query([job_id])
        if job_id in query.jobs:
            return query.jobs[job_id], ()
        return None, (query.error or f"{self.title} does not know job {job_id}",)

    def own_job(self, job_id: str, limit_s: float) -> Job | None:
        """Query the job that this process is in."""
        return self._query([job_id], limit_s).jobs.get(job_id)

    def record(self, job_id: str) -> dict[str, Any] | None:
        """Return the known fields of a job as text."""
        job = self._query([job_id]).jobs.get(job_id)
        return (
            None
            if job is None
            else {name: str(value) for name, value in asdict(job).items() if value}
        )

    def num_queued(
        self, partition: str | None = None, qos: str | None = None, clusters: str = ""
    ) -> int | None:
        """Count this user's jobs that wait or run in a queue, or in all."""
        try:
            jobs = self.fetch()
        except SchedulerError:
            return None
        return sum(job.is_active and partition in (None, job.queue) for job in jobs)

    def _query(self, job_ids: Iterable[str], limit_s: float | None = None) -> JobQuery:
        try:
            return JobQuery({job.job_id: job for job in self._list(job_ids, limit_s)})
        except SchedulerError as error:
            return JobQuery(error=str(error))

    def _list(self, job_ids: Iterable[str], limit_s: float | None = None) -> list[Job]:
        wanted = dict.fromkeys(job_ids)
        return (
            [job for job in self.fetch([*wanted], limit_s) if job.job_id in wanted]
            if wanted
            else []
        )

"""Support batch systems that run our script as it is.

One query of such a system returns everything known about a user's jobs. A submission's token is in
the job's environment, and the system's query shows it. The script itself has no token, so a dry run
prints exactly what is submitted.
"""

from __future__ import annotations

import os
import shlex
import sys
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, ClassVar

from gems.config.schema import ClusterConfig, RunSpec
from gems.errors import ConfigError, TryLaterError
from gems.launch.local_launcher import without_leftovers
from gems.runs.folder import RunFolder
from gems.utils.run_module import RUN_MODULE
from jobs.batch.command import CommandResult, SchedulerError, run_command
from jobs.batch.job import Job, JobQuery, UnclearSubmissionError, script_path
from jobs.batch.resources import TOKEN_VARIABLE, JobSpec, Work
from jobs.batch.script import (
    call_submit,
    check_path,
    export_lines,
    module_lines,
    render,
    report_short_job,
)
from jobs.schedulers.scheduler import Scheduler

PROGRAM = "jobs.launch.batch"


class ByCommands(Scheduler):
    """A batch system whose subclass knows the directives, the commands and their output."""

    sentinel: ClassVar[str]
    forbidden: ClassVar[Mapping[str, str]]  # in paths, with the words for them
    full: ClassVar[tuple[str, ...]] = ()  # what the system says if the queue takes no more jobs now

    ended: ClassVar[tuple[str, ...]]  # what the system says of a job that has ended

    @abstractmethod
    def directives(self, spec: RunSpec, job: JobSpec, folder: RunFolder) -> list[str]:
        """Return the options of a job, one or more words of a line each."""

    def blocks(self, job: JobSpec) -> dict[str, list[str]]:
        """Return the lines of the template's other blocks, by name."""
        return {}

    @abstractmethod
    def submit_argv(self, spec: RunSpec, token: str) -> list[str]:
        """Return the command that submits a script, without the script."""

    @abstractmethod
    def read_id(self, text: str) -> str | None:
        """Return the job's ID in what the command that submits prints; None if there is none."""

    @abstractmethod
    def fetch(
        self, job_ids: Sequence[str] | None = None, limit_s: float | None = None
    ) -> list[Job]:
        """Return this user's jobs, or those of some that are known.

        Raise SchedulerError if there is no list.
        """

    def cancel_argv(self) -> list[str]:
        """Return the command that cancels jobs, without their IDs."""
        return [self.cancel_program]

    def command_environment(self) -> dict[str, str] | None:
        """Return the environment of the other commands; None for that of `run_command`."""
        return None

    def error_of(self, result: CommandResult) -> SchedulerError | None:
        """Return why a command failed, unless all its jobs have ended."""
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

    def script(self, spec: RunSpec, job: JobSpec, folder: RunFolder) -> str:
        """Return the batch script of a run."""
        return self._script(spec, job, folder, (str(folder.path),))

    def _script(self, spec: RunSpec, job: JobSpec, folder: RunFolder, runs: Sequence[str]) -> str:
        cluster = spec.cluster
        for path in dict.fromkeys((str(folder.path), *runs)):
            check_path(spec, job, RunFolder(Path(path)), self.title, self.forbidden)
        for key, text in (
            ("cluster.partition", cluster.partition),
            ("cluster.account", cluster.full_account),
        ):
            if text is not None and (not text.isprintable() or len(text.split()) != 1):
                raise ConfigError(key, repr(text), "must be one word")
        code = (
            [str(RunFolder(Path(runs[0])).code_zip), PROGRAM]
            if job.snapshot
            else [*RUN_MODULE, PROGRAM]
        )
        # exec: signals and the exit code are then the launching process's, not the shell's
        return render(
            self.name,
            command=f"exec {shlex.join([sys.executable, '-u', *code, *runs])}",
            directives=[f"{self.sentinel} {line}" for line in self.directives(spec, job, folder)],
            setup=[*module_lines(cluster), *cluster.setup, *export_lines(cluster.environment)],
            **self.blocks(job),
        )

    def submit(
        self, spec: RunSpec, job: JobSpec, folder: RunFolder, works: Sequence[Work], token: str
    ) -> str:
        """Submit one job for prepared runs; there are no arrays."""
        (work,) = works
        folder.logs.mkdir(parents=True, exist_ok=True)
        script = script_path(folder.logs, token)
        text = self._script(spec, job, folder, work.run_folders)
        for path in work.run_folders:
            RunFolder(Path(path)).job_sh.write_text(text)
        script.write_text(text)
        argv = [*self.submit_argv(spec, token), str(script)]
        environment = self.environment() | {TOKEN_VARIABLE: token}
        try:
            job_id = call_submit(
                argv,
                environment,
                spec.cluster,
                self.title,
                self.read_id,
                lambda reason: self._refusal(spec.cluster, reason),
                lambda: self.find_submitted([token]).get(token),
            )
        except UnclearSubmissionError:
            raise
        except ConfigError:
            script.unlink()
            raise
        report_short_job(job)
        return job_id

    def _refusal(self, cluster: ClusterConfig, reason: str) -> ConfigError:
        is_full = any(text in reason for text in self.full)
        kind = TryLaterError if is_full else ConfigError
        text = f"{self.program} refuses the job: {reason}"
        return kind(
            "cluster",
            cluster.name,
            text,
            "see cluster.partition, cluster.account and cluster.minutes",
        )

    def find_submitted(self, tokens: Iterable[str], clusters: str = "") -> dict[str, Job]:
        """Find the jobs of submissions by token; prefer an active job if a token has several."""
        wanted = set(tokens)
        found = sorted(self.fetch(), key=lambda job: job.is_active)
        return {job.token: job for job in found if job.token in wanted}

    def list_jobs(self, job_ids: Iterable[str]) -> list[Job]:
        """List those of some jobs that the system knows."""
        return self._list(job_ids)

    def query_queue(self, job_ids: Iterable[str]) -> JobQuery:
        """Query some jobs, those that have ended too as long as the system remembers them."""
        return self._query(job_ids)

    def find_job(self, job_id: str) -> tuple[Job | None, tuple[str, ...]]:
        """Return what the system knows of a job."""
        query = self._query([job_id])
        if job_id in query.jobs:
            return query.jobs[job_id], ()
        return None, (query.error or f"{self.title} does not know job {job_id}",)

    def own_job(self, job_id: str, limit_s: float) -> Job | None:
        """Query the job that this process is in."""
        return self._query([job_id], limit_s).jobs.get(job_id)

    def record(self, job_id: str) -> dict[str, Any] | None:
        """Return what the system knows of a job."""
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
            found = self.fetch()
        except SchedulerError:
            return None
        return sum(job.is_active and partition in (None, job.queue) for job in found)

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

"""The interface of a batch system, and queries about jobs to each job's system.

The form of a job's ID tells its system: 41, 41_7 and 41_7@serial are SLURM's, 41.server is PBS
Pro's, f2kPq7 is Flux's.
"""

from __future__ import annotations

import contextlib
import re
import shutil
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from gems.config import registries
from gems.config.cluster_presets import host_names
from gems.config.schema import ClusterConfig
from gems.errors import ConfigError, TryLaterError
from gems.runs.folder import RunFolder
from gems.utils.registry import Registry
from jobs.batch.command import (
    SchedulerError,
    SchedulerRefusedError,
    SchedulerUnavailableError,
    run_command,
)
from jobs.batch.job import Job, JobQuery, UnclearSubmissionError, script_path
from jobs.batch.output import report
from jobs.batch.preset_limits import is_on_site
from jobs.batch.resources import JobSpec, Work
from jobs.batch.script import check_path, export_lines, module_lines, render, report_short_job

SUBMIT_LIMIT_S = 180.0  # sbatch tries again for two minutes by itself
# Errors after which the system may have the job, as opposed to those of a connection that never
# came about.
UNCLEAR = (
    "did not answer within",
    "was ended by signal",
    "Socket timed out",
    "Zero Bytes were transmitted",
)
Outcome = tuple[bool | None, str] | str  # of a check; a text alone is one that passed


class Scheduler(ABC):
    """A batch system: how a job is written, submitted, found, queried and cancelled.

    Methods raise SchedulerError if a command gives no answer: a slow, strange or failed answer
    never means "there is no such job".
    """

    name: ClassVar[str]
    title: ClassVar[str]
    program: ClassVar[str]  # the command that submits
    queue_program: ClassVar[str]  # the command that lists jobs
    cancel_program: ClassVar[str]
    job_id_form: ClassVar[re.Pattern[str]]
    sentinel: ClassVar[str]  # the start of an option's line in a script
    forbidden: ClassVar[Mapping[str, str]]  # in paths, with the words for them
    has_arrays: ClassVar[bool] = False
    has_probe_jobs: ClassVar[bool] = False

    def check_here(self) -> None:
        """Raise ConfigError if the system's commands are not on this machine."""
        if shutil.which(self.program) is None:
            text = f"needs {self.program}, which is not on PATH"
            advice = (
                "submit from a login node, show the script with --dry-run, or run here with"
                " cluster=local"
            )
            raise ConfigError("cluster.scheduler", self.name, text, advice)

    def check_submission(self, cluster: ClusterConfig) -> None:
        """Raise ConfigError on a machine of another site, or if a required setting is missing.

        A submission needs these settings; a script may be shown without them.
        """
        if not is_on_site(cluster):
            here = f"is not submitted from {host_names()[0]}"
            text = f"{here}, which is none of its hosts ({', '.join(cluster.hosts)})"
            advice = (
                "submit it there, show it here with --dry-run, or set cluster.hosts=[] if this is"
                " its login node"
            )
            raise ConfigError("cluster", cluster.name, text, advice)
        if cluster.account_required and cluster.account is None and not self.account_of_user():
            text = f"cluster {cluster.name} takes no job without an account"
            advice = "give the one that your project is charged to"
            raise ConfigError("cluster.account", "null", text, advice)
        passes_nothing = str(cluster.sbatch.get("export", "")).upper() == "NONE"
        has_setup = cluster.modules or cluster.setup or cluster.container_image is not None
        if passes_nothing and not has_setup:
            no_environment = "passes no environment on to jobs (cluster.sbatch.export=NONE)"
            text = f"cluster {cluster.name} {no_environment}"
            advice = "name those of the MPI and the CUDA that you use"
            raise ConfigError("cluster.modules", "[]", text, advice)

    def account_of_user(self) -> str | None:
        """Return the account that the user's environment names."""
        return None

    def job_name(self, name: str) -> str:
        """Return the name of a run's job."""
        return name

    @abstractmethod
    def directives(self, job: JobSpec, folder: RunFolder, num_tasks: int) -> list[str]:
        """Return the options of a job, one or more words of a line each.

        `num_tasks` is the size of a job array, at most 1 for a plain job.
        """

    @abstractmethod
    def launch_command(self, job: JobSpec, folder: RunFolder, works: Sequence[Work]) -> str:
        """Return the last line of a script, which starts its works.

        It is an exec: signals and the exit code are then the launching process's, not the shell's.
        """

    def exports(self, job: JobSpec) -> list[str]:
        """Return the lines of a script that set variables."""
        return export_lines(job.cluster.environment)

    def blocks(
        self, job: JobSpec, folder: RunFolder, works: Sequence[Work]
    ) -> dict[str, list[str]]:
        """Return the lines of the blocks that only this system's template has, by name."""
        return {}

    def script(
        self,
        job: JobSpec,
        folder: RunFolder,
        works: Sequence[Work] = (),
        command: str | None = None,
    ) -> str:
        """Return the batch script of a run, of several `works`, or with another `command` in it.

        Several works make an array, whose output goes to the logs of `folder`.

        Raises:
            ConfigError: The system would misread an option or path.
        """
        for run in dict.fromkeys((folder, *_run_folders(works))):
            check_path(job, run, self.title, self.forbidden)
        options = self.directives(job, folder, len(works))
        return render(
            self.name,
            directives=[f"{self.sentinel} {option}" for option in options],
            setup=[*module_lines(job.cluster), *job.cluster.setup, *self.exports(job)],
            command=command or self.launch_command(job, folder, works),
            **self.blocks(job, folder, works),
        )

    def submit(self, job: JobSpec, folder: RunFolder, works: Sequence[Work], token: str) -> str:
        """Submit prepared runs and return the job's ID.

        Several works become an array with a task for each; a single work becomes one job. `folder`
        is the run's folder, or for an array the folder of the script and the output. The names of
        the script and of the other files that the job reads hold the token until `name_submission`
        renames them.

        Raises the errors of `call`.
        """
        text = self.script(job, folder, works)
        folder.logs.mkdir(parents=True, exist_ok=True)
        script = script_path(folder.logs, token)
        for path in (*(run.job_sh for run in _run_folders(works)), script):
            path.write_text(text)
        files = [script, *self.write_works(job, works, token)]
        try:
            job_id = self.call(job, script, token)
        except UnclearSubmissionError:
            raise
        except ConfigError:
            for path in files:
                path.unlink()
            raise
        if f"{self.sentinel} --signal=" not in text:
            report_short_job(job)
        return job_id

    def write_works(self, job: JobSpec, works: Sequence[Work], token: str) -> list[Path]:
        """Write the files that a job reads beside its script, and return them."""
        return []

    def call(self, job: JobSpec, script: Path, token: str) -> str:
        """Call the command that submits a script, and return the job's ID.

        Raises:
            UnclearSubmissionError: It is not known whether the system has the job.
            TryLaterError: The queue takes no more jobs now, or the system cannot be reached.
            ConfigError: The system refuses the job.
            OSError: The script cannot be read.
        """
        cluster = job.cluster.name
        chosen = self.clusters(job.cluster)
        # inherit the script's fd from the fork on, before the command line changes, so that an
        # orphaned command can be found
        with script.open() as file:
            result = run_command(
                [*self.submit_argv(job, token), str(script)],
                limit_s=SUBMIT_LIMIT_S,
                environment=self.submission_environment(script.read_text(), token),
                pass_fds=(file.fileno(),),
            )
        job_id = self.read_id(result.stdout, chosen)
        if result.error is None and job_id is not None:
            return job_id
        if isinstance(result.error, SchedulerRefusedError):
            raise self.refusal(cluster, result.error.reason) from result.error
        if result.error is not None and not any(text in str(result.error) for text in UNCLEAR):
            text = f"{self.title} cannot be reached, and nothing is submitted ({result.error})"
            raise TryLaterError("cluster", cluster, text, "try again") from result.error
        with contextlib.suppress(SchedulerError):
            if (submitted := self.find_submitted([token], chosen).get(token)) is not None:
                return submitted.job_id
        what = result.error or f"{self.program} printed {result.stdout[:80]!r}"
        text = f"cannot determine whether {self.title} accepted the job ({what})"
        advice = (
            f"once {self.title} answers, `jobs status` shows whether the job exists; if not, submit"
            " again"
        )
        raise UnclearSubmissionError("cluster", cluster, text, advice)

    @abstractmethod
    def submit_argv(self, job: JobSpec, token: str) -> list[str]:
        """Return the command that submits a script, without the script."""

    @abstractmethod
    def submission_environment(self, script: str, token: str) -> dict[str, str]:
        """Return the environment of the command that submits a script of this text."""

    @abstractmethod
    def read_id(self, text: str, clusters: str = "") -> str | None:
        """Return the job's ID in the output of the command that submits; None if there is none.

        `clusters` are those of which one gets the job, as by the method of this name.
        """

    @abstractmethod
    def refusal(self, cluster: str, reason: str) -> ConfigError:
        """Return the error for a job that is refused: a TryLaterError if the queue is full."""

    def site_checks(self, job: JobSpec, script: str) -> dict[str, Callable[[], Outcome]]:
        """Return the checks of whether the site takes a job, by name; none if it tells nothing."""
        return {}

    def wait_h(self, script: str) -> float | None:
        """Return the hours until a script would start; None if that is unknown."""
        return None

    def left_nodes(self, cluster: ClusterConfig) -> tuple[set[str], set[str]]:
        """Return the names of a partition's nodes that are not excluded, and of those that are.

        Raises:
            SchedulerUnavailableError: They are not known.
        """
        raise SchedulerUnavailableError(self.queue_program, "names no nodes")

    def max_nodes(self, partition: str | None) -> int | None:
        """Return the most nodes that a job may have; None if that is unknown."""
        return None

    def clusters(self, cluster: ClusterConfig) -> str:
        """Return the clusters of which one gets a job, separated by commas; "" for the default."""
        return ""

    def notes(self, script: str) -> list[str]:
        """Return notes to the user about a script's submission."""
        return []

    @abstractmethod
    def find_submitted(self, tokens: Iterable[str], clusters: str = "") -> dict[str, Job]:
        """Find the jobs of submissions among this user's, by token.

        Raise SchedulerError if there is no list.
        """

    @abstractmethod
    def list_jobs(self, job_ids: Iterable[str]) -> list[Job]:
        """List those of some jobs that the system knows.

        Raise SchedulerError if there is no list of jobs.
        """

    @abstractmethod
    def query_queue(self, job_ids: Iterable[str]) -> JobQuery:
        """Query the jobs that wait, run or have ended recently."""

    def query_accounting(self, job_ids: Iterable[str]) -> JobQuery:
        """Query the jobs that are no longer in the queue."""
        return JobQuery()

    @abstractmethod
    def find_job(self, job_id: str) -> tuple[Job | None, tuple[str, ...]]:
        """Return the job with all known facts, and the errors of commands that did not answer."""

    def describe_wait(self, job_id: str, reason: str) -> str:
        """Describe why a job waits, by the system's reason, and what to do if it needs a user."""
        return reason

    @abstractmethod
    def own_job(self, job_id: str, limit_s: float) -> Job | None:
        """Query the job that this process is in; None if there is no answer in time."""

    @abstractmethod
    def cancel(self, job_ids: Sequence[str]) -> str | None:
        """Cancel jobs with one command; return its error, or None.

        A job that has already ended is no error.
        """

    @abstractmethod
    def num_queued(
        self, partition: str | None = None, qos: str | None = None, clusters: str = ""
    ) -> int | None:
        """Return how many jobs of this user wait or run; None if there is no answer."""

    def max_array_tasks(self) -> int:
        """Return how many tasks a job array may have."""
        return 1

    def num_restarts(self) -> int:
        """Return how often this process's job had been restarted when this attempt began."""
        return 0

    def requeue(self, job_id: str) -> str | None:
        """Requeue this process's job; return the error, or None."""
        return f"{self.title} lets no user put a job back into the queue"

    def kill_cause(self, text: str) -> str | None:
        """Read from a job's output why the system ends it: a FailureCause, its words, or None."""
        return None

    def record(self, job_id: str) -> dict[str, Any] | None:
        """Return the system's own record of a job for the run folder.

        Return None if there is no answer.
        """
        return None

    def record_steps(self, job_id: str) -> list[dict[str, str]] | None:
        """Return the accounting of a job's steps for the run folder; None if there is none."""
        return None


SCHEDULERS: Registry[Scheduler] = registries.SCHEDULERS


def scheduler_for(cluster: ClusterConfig) -> Scheduler:
    """Return the system that gets a cluster's jobs."""
    return SCHEDULERS[cluster.scheduler]


def write_script(job: JobSpec, folder: RunFolder) -> str:
    """Return a job's batch script, and report notes about its submission."""
    scheduler = scheduler_for(job.cluster)
    script = scheduler.script(job, folder)
    for note in scheduler.notes(script):
        report(note)
    return script


def _run_folders(works: Iterable[Work]) -> list[RunFolder]:
    return [RunFolder(Path(path)) for work in works for path in work.run_folders]


def scheduler_of(job_id: object) -> Scheduler | None:
    """Return the system of a job by the form of its ID, or None for a value that is no ID.

    Other values are rejected because a command could take them for an option.
    """
    if not isinstance(job_id, str | int) or isinstance(job_id, bool):
        return None
    return next(
        (
            scheduler
            for scheduler in SCHEDULERS.values()
            if scheduler.job_id_form.fullmatch(str(job_id))
        ),
        None,
    )


def system_of(job_id: str) -> Scheduler:
    """Return the system of a valid job ID."""
    scheduler = scheduler_of(job_id)
    assert scheduler is not None, job_id
    return scheduler


def place(cluster: ClusterConfig) -> str:
    """Return the system that gets a run's job, with its clusters if they are not the default.

    An example is slurm@serial.
    """
    return "@".join(filter(None, (cluster.scheduler, scheduler_for(cluster).clusters(cluster))))


def scheduler_at(at: str) -> Scheduler | None:
    """Return the system of a `place`; None if it is not known here."""
    scheduler: Scheduler | None = SCHEDULERS.get(at.partition("@")[0])
    return scheduler


def is_job_id(value: object) -> bool:
    """Return whether a value from a file names a job."""
    return scheduler_of(value) is not None


def title(job_id: str | None) -> str:
    """Return the name of a job's system for a message."""
    scheduler = scheduler_of(job_id)
    return scheduler.title if scheduler is not None else "the batch system"


def query_queue(job_ids: Iterable[str]) -> JobQuery:
    """Query the queues with one command per system; ignore values that are no IDs."""
    return _query(job_ids, lambda system, own: system.query_queue(own))


def query_accounting(job_ids: Iterable[str]) -> JobQuery:
    """Query the accounting of jobs that the queues do not know."""
    return _query(job_ids, lambda system, own: system.query_accounting(own))


def list_jobs(job_ids: Iterable[str]) -> list[Job]:
    """List those of some jobs that their systems know.

    Raises SchedulerError if one gives no list of jobs.
    """
    return [job for system, own in _by_system(job_ids) for job in system.list_jobs(own)]


def find_submitted(tokens: Mapping[str, str]) -> dict[str, Job]:
    """Find the jobs of submissions, each token with its `place`.

    Raises as `Scheduler.find_submitted`.
    """
    by_place: defaultdict[str, list[str]] = defaultdict(list)
    for token, at in tokens.items():
        by_place[at].append(token)
    submitted: dict[str, Job] = {}
    for at, own in by_place.items():
        if (system := scheduler_at(at)) is None:
            raise SchedulerError(at, "is no scheduler that is known here")
        submitted |= system.find_submitted(own, at.partition("@")[2])
    return submitted


def cancel_jobs(job_ids: Sequence[str]) -> str | None:
    """Cancel jobs, one command for all of a system; return the errors, or None."""
    errors = [
        error for system, own in _by_system(job_ids) if (error := system.cancel(own)) is not None
    ]
    return "; ".join(errors) or None


def _query(job_ids: Iterable[str], ask: Callable[[Scheduler, list[str]], JobQuery]) -> JobQuery:
    answer = JobQuery()
    for system, own in _by_system(job_ids):
        query = ask(system, own)
        jobs = {**answer.jobs, **query.jobs}
        answer = replace(answer, jobs=jobs, error=answer.error or query.error)
    return answer


def _by_system(job_ids: Iterable[str]) -> list[tuple[Scheduler, list[str]]]:
    groups: dict[str, tuple[Scheduler, list[str]]] = {}
    for job_id in dict.fromkeys(map(str, job_ids)):
        if (system := scheduler_of(job_id)) is not None:
            groups.setdefault(system.name, (system, []))[1].append(job_id)
    return list(groups.values())

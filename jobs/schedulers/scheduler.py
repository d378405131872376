"""Define the interface of a batch system, and send questions about jobs to each job's system.

The form of a job's ID tells its system: 41, 41_7 and 41_7@serial are SLURM's, 41.server is PBS
Pro's, f2kPq7 is Flux's.
"""

from __future__ import annotations

import re
import shutil
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, ClassVar

from gems.config import registries
from gems.config.cluster_presets import host_names
from gems.config.schema import ClusterConfig, RunSpec
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.utils.registry import Registry
from jobs.batch.command import SchedulerError
from jobs.batch.job import Job, JobQuery
from jobs.batch.resources import JobSpec, Work
from jobs.schedulers.slurm_client.limits import is_on_site


class Scheduler(ABC):
    """A batch system: how a job is written, submitted, found, queried and cancelled.

    Methods raise SchedulerError if a command gives no answer: a slow, strange or failed answer
    never means "there is no such job".
    """

    name: ClassVar[str]
    title: ClassVar[str]
    program: ClassVar[str]  # the command that submits
    queue_program: ClassVar[str]  # the one that tells of jobs
    cancel_program: ClassVar[str]
    job_id_form: ClassVar[re.Pattern[str]]
    has_arrays: ClassVar[bool] = False
    has_site_checks: ClassVar[bool] = False
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
        """Return the name that the job of a run gets."""
        return name

    @abstractmethod
    def script(self, spec: RunSpec, job: JobSpec, folder: RunFolder) -> str:
        """Return the batch script of a run.

        Raise ConfigError for an option or path that the system would misread.
        """

    @abstractmethod
    def submit(
        self, spec: RunSpec, job: JobSpec, folder: RunFolder, works: Sequence[Work], token: str
    ) -> str:
        """Submit prepared runs and return the job's ID.

        Raises the errors of `jobs.schedulers.slurm_client.sbatch.submit_job`.
        """

    def clusters(self, cluster: ClusterConfig) -> str:
        """Return the clusters, separated by commas, of which one gets a job.

        Empty for the default one.
        """
        return ""

    def notes(self, script: str) -> list[str]:
        """Return what a user should know of a script's submission, a line each."""
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
        """Query the jobs that wait, run or have ended lately."""

    def query_accounting(self, job_ids: Iterable[str]) -> JobQuery:
        """Query the jobs that the queue does not know any more."""
        return JobQuery()

    @abstractmethod
    def find_job(self, job_id: str) -> tuple[Job | None, tuple[str, ...]]:
        """Return all that is known of a job, and the errors of commands that did not answer."""

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
        """Put this process's job back into the queue; return why that cannot be done, or None."""
        return f"{self.title} lets no user put a job back into the queue"

    def kill_cause(self, text: str) -> str | None:
        """Read in a job's output why the system ends it: a FailureCause or its own words.

        None if unknown.
        """
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


def scheduler_for(spec: RunSpec) -> Scheduler:
    """Return the system that gets the job of a run."""
    return SCHEDULERS[spec.cluster.scheduler]


def scheduler_of(job_id: object) -> Scheduler | None:
    """Return the system of a job by the form of its ID; None for a value that is no ID.

    No other values are accepted, as a command could take them for an option.
    """
    if not isinstance(job_id, str | int) or isinstance(job_id, bool):
        return None
    return next(
        (each for each in SCHEDULERS.values() if each.job_id_form.fullmatch(str(job_id))), None
    )


def system_of(job_id: str) -> Scheduler:
    """Return the system of a job whose ID is one."""
    found = scheduler_of(job_id)
    assert found is not None, job_id
    return found


def place(cluster: ClusterConfig) -> str:
    """Return the system that gets a run's job, with its clusters if they are not the default.

    An example is slurm@serial.
    """
    return "@".join(
        filter(None, (cluster.scheduler, SCHEDULERS[cluster.scheduler].clusters(cluster)))
    )


def scheduler_at(at: str) -> Scheduler | None:
    """Return the system of a `place`; None if it is not known here."""
    found: Scheduler | None = SCHEDULERS.get(at.partition("@")[0])
    return found


def is_job_id(value: object) -> bool:
    """Return whether a value from a file names a job."""
    return scheduler_of(value) is not None


def title(job_id: str | None) -> str:
    """Return the name of a job's system for a message."""
    found = scheduler_of(job_id)
    return found.title if found is not None else "the batch system"


def query_queue(job_ids: Iterable[str]) -> JobQuery:
    """Query the queues, one command for all jobs of a system; what is no ID is left out."""
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
    found: dict[str, Job] = {}
    for at, own in by_place.items():
        if (system := scheduler_at(at)) is None:
            raise SchedulerError(at, "is no scheduler that is known here")
        found |= system.find_submitted(own, at.partition("@")[2])
    return found


def cancel_jobs(job_ids: Sequence[str]) -> str | None:
    """Cancel jobs, one command for all of a system; return the errors, or None."""
    errors = [
        error for system, own in _by_system(job_ids) if (error := system.cancel(own)) is not None
    ]
    return "; ".join(errors) or None


def _query(job_ids: Iterable[str], ask: Callable[[Scheduler, list[str]], JobQuery]) -> JobQuery:
    found = JobQuery()
    for system, own in _by_system(job_ids):
        query = ask(system, own)
        found = replace(found, jobs={**found.jobs, **query.jobs}, error=found.error or query.error)
    return found


def _by_system(job_ids: Iterable[str]) -> list[tuple[Scheduler, list[str]]]:
    groups: dict[str, tuple[Scheduler, list[str]]] = {}
    for job_id in dict.fromkeys(map(str, job_ids)):
        if (system := scheduler_of(job_id)) is not None:
            groups.setdefault(system.name, (system, []))[1].append(job_id)
    return list(groups.values())

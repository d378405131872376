"""Flux: `flux batch`, `flux jobs` and `flux cancel`.

A batch script runs as the initial program of a Flux instance of its own, in which `flux run` starts
the ranks. From in there the instance that has the job, and others of the user, is the parent. Job
IDs are the ASCII form of F58: f2kPq7.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, ClassVar

from gems.errors import ConfigError
from gems.launch.local_launcher import without_leftovers
from gems.runs.folder import RunFolder
from gems.runs.owner import FLUX_VARIABLE, ascii_flux_id
from jobs.batch.command import SchedulerUnavailableError, run_command
from jobs.batch.job import Job
from jobs.batch.resources import TOKEN_VARIABLE, JobSpec
from jobs.batch.script import FreeOptions
from jobs.schedulers.by_commands import ByCommands
from jobs.schedulers.scheduler import SCHEDULERS

JOB_ID = "f[1-9A-HJ-NP-Za-km-z]{1,12}"
OWN_KEYS = {
    "nodes": "cluster.nodes",
    "nslots": "parallel.partitions and parallel.replicas",
    "cores-per-slot": "cluster.cpus_per_rank",
    "gpus-per-slot": "cluster.gpus_per_node",
    "time-limit": "cluster.minutes",
    "queue": "cluster.partition",
    "bank": "cluster.account",
    "job-name": "name",
    "output": "runs_dir",
    "error": "runs_dir",
}
REPEATED = (
    "setattr",
    "setopt",
    "env",
    "env-remove",
    "requires",
    "dependency",
    "flags",
    "conf",
    "broker-opts",
)
# columns of `flux jobs` with their headings, which identify a list; the name is last because it may
# contain any character
COLUMNS = {
    "id.f58plain": "JOBID",
    "state": "STATE",
    "result": "RESULT",
    "returncode": "RC",
    "t_run": "T_RUN",
    "t_inactive": "T_INACTIVE",
    "expiration": "EXPIRATION",
    "nodelist": "NODELIST",
    "dependencies": "DEPENDENCIES",
    "exception.type": "EXCEPTION-TYPE",
    "queue": "QUEUE",
    "name": "NAME",
}
STATES = {
    "NEW": "PENDING",
    "DEPEND": "PENDING",
    "PRIORITY": "PENDING",
    "SCHED": "PENDING",
    "RUN": "RUNNING",
    "CLEANUP": "COMPLETING",
    "INACTIVE": "",
}
RESULTS = {
    "COMPLETED": "COMPLETED",
    "FAILED": "FAILED",
    "CANCELED": "CANCELLED",
    "TIMEOUT": "TIMEOUT",
}


OPTIONS = FreeOptions(
    "cluster.flux_batch",
    OWN_KEYS,
    r"[a-z][a-z0-9-]*",
    "the long name of an option of flux batch",
    "exclusive=true",
    REPEATED,
)


class Flux(ByCommands):
    """Flux, whose system instance may remember ended jobs for a while only."""

    name = "flux"
    title = "Flux"
    program = "flux"
    queue_program = "flux jobs"
    cancel_program = "flux cancel"
    job_id_form = re.compile(JOB_ID)
    sentinel = "# flux:"
    # the second of a job that Flux has purged
    ended = ("job is inactive", "unknown job id")
    forbidden: ClassVar[Mapping[str, str]] = {"{{": "'{{'", "\\": "'\\'"}

    def directives(self, job: JobSpec, folder: RunFolder, num_tasks: int) -> list[str]:
        """Return the options of `flux batch`: a slot for each node, with all that its ranks use."""
        cluster = job.cluster
        free = OPTIONS.checked(cluster.flux_batch)
        if any("\\" in str(value) for value in free.values()):
            raise ConfigError(
                "cluster.flux_batch", free, "must have no '\\', which Flux interprets"
            )
        if cluster.mail_to is not None:
            raise ConfigError(
                "cluster.notify",
                cluster.notify,
                "Flux sends no mail",
                "use command:WORDS or an address",
            )
        own: list[tuple[str, Any]] = [
            ("job-name", job.name),
            ("nodes", job.nodes),
            ("nslots", job.nodes),
            ("cores-per-slot", job.cpus_per_node),
        ]
        if job.gpu_option is not None:
            own.append(("gpus-per-slot", job.gpus_per_node))
        own.append(("time-limit", f"{job.minutes}m"))
        if cluster.partition is not None:
            own.append(("queue", cluster.partition))
        if cluster.full_account is not None:
            own.append(("bank", cluster.full_account))
        own.append(("output", f"{folder.logs}/{{{{id.f58plain}}}}_0_log.out"))
        if "signal" not in free and job.has_early_signal:
            own.append(("signal", f"SIGUSR2@{cluster.signal_before_end_s}s"))
        if job.after is not None:
            own.append(("dependency", f"afterany:{job.after}"))
        if cluster.exclude:
            own.append(("requires", f"-host:{','.join(dict.fromkeys(cluster.exclude))}"))
        values = [
            (name, item)
            for name, value in free.items()
            for item in (value if isinstance(value, list) else [value])
        ]
        return [
            f"--{name}" if value is True else f"--{name}={shlex.quote(str(value))}"
            for name, value in [*own, *values]
        ]

    def submit_argv(self, job: JobSpec, token: str) -> list[str]:
        """Return the command; the token ends the job's name, which `flux jobs` shows."""
        variables = [f"--env=-{FLUX_VARIABLE}", f"--env={TOKEN_VARIABLE}={token}"]
        return [*_flux("batch"), f"--job-name={job.name}.{token}", *variables]

    def read_id(self, text: str, clusters: str = "") -> str | None:
        """Return the ID that `flux batch` prints, in either form."""
        words = text.split()
        job_id = ascii_flux_id(words[-1]) if words else ""
        return job_id if self.job_id_form.fullmatch(job_id) else None

    def environment(self) -> dict[str, str]:
        """Return this process's environment, with the variables that locate its Flux instance."""
        own = {name: value for name, value in os.environ.items() if name.startswith("FLUX_")}
        return without_leftovers(os.environ) | own

    def fetch(
        self, job_ids: Sequence[str] | None = None, limit_s: float | None = None
    ) -> list[Job]:
        """Return all of this user's jobs: `flux jobs` fails if it is asked for a forgotten one."""
        columns = "|".join(f"{{{column}}}" for column in COLUMNS)
        argv = [*_flux("jobs"), "-a", "--count=0", "--color=never", f"--format={columns}"]
        result = run_command(
            argv, limit_s=limit_s, environment=self.environment() | {"LC_ALL": "C.UTF-8"}
        )
        if result.error is not None:
            raise result.error
        rows = [line.split("|", len(COLUMNS) - 1) for line in result.lines]
        if not rows or [*map(str.strip, rows[0])] != [*COLUMNS.values()]:
            raise SchedulerUnavailableError("flux jobs", "printed no list of jobs")
        return [_parse_job(row) for row in rows[1:]]

    def cancel_argv(self) -> list[str]:
        """Return `flux cancel`."""
        return _flux("cancel")

    def command_environment(self) -> dict[str, str]:
        """Return the environment with the variables that locate the Flux instance."""
        return self.environment()


def _flux(verb: str) -> list[str]:
    """Return a command of the instance with the user's jobs: inside a job, the parent."""
    return ["flux", *(["--parent"] if os.environ.get(FLUX_VARIABLE) else []), verb]


def _parse_job(row: Sequence[str]) -> Job:
    """Parse a line of `flux jobs`; raise SchedulerUnavailableError if it is not a job."""
    values = dict(zip(COLUMNS, map(str.strip, row), strict=False))
    word = values.get("state", "")
    state = STATES.get(word, word if word.isupper() else None)  # an unknown state counts as active
    if state == "":
        state = RESULTS.get(values.get("result", ""))
    if len(row) != len(COLUMNS) or state is None or not re.fullmatch(JOB_ID, values["id.f58plain"]):
        raise SchedulerUnavailableError(
            "flux jobs", f"printed {'|'.join(row)[:80]!r}, which is no job"
        )
    name, _, token = values["name"].rpartition(".")
    if not re.fullmatch(r"[0-9a-f]{16}", token):
        name = values["name"]
        token = ""
    end = values["expiration"] if state == "RUNNING" else values["t_inactive"]
    return Job(
        state,
        "flux jobs",
        values["dependencies"] or values["exception.type"],
        _utc(values["t_run"]),
        name,
        exit_code=values["returncode"],
        nodes=values["nodelist"],
        end_utc=_utc(end),
        job_id=values["id.f58plain"],
        token=token,
        queue=values["queue"],
    )


def _utc(text: str) -> datetime | None:
    """Parse a Flux time in seconds; 0 and "" are None."""
    try:
        seconds = float(text)
    except ValueError:
        return None
    return datetime.fromtimestamp(seconds, UTC) if seconds > 0 else None


SCHEDULERS.register(Flux.name, Flux())

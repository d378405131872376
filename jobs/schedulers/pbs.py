"""PBS Professional and OpenPBS: qsub, qselect, qstat and qdel.

PBS sends no signal before the end: the script does. Only an operator may put a job back into the
queue (qrerun), so a run that is to continue is submitted as a new job; PBS itself reruns a job
whose node has failed.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any, ClassVar

from gems.config.schema import ClusterConfig
from gems.errors import ConfigError
from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from jobs.batch.command import CommandResult, SchedulerUnavailableError, run_command, user_name
from jobs.batch.job import Job
from jobs.batch.resources import TOKEN_VARIABLE, JobSpec, Work
from jobs.batch.script import FreeOptions
from jobs.schedulers.by_commands import ByCommands
from jobs.schedulers.scheduler import SCHEDULERS

JOB_ID = r"[0-9]{1,18}\.[A-Za-z0-9][A-Za-z0-9.-]{0,200}"
MAX_NAME = 15  # characters that older releases take; OpenPBS takes 230
SPACE = "space"
OWN_KEYS = {
    "N": "name",
    "q": "cluster.partition",
    "A": "cluster.account",
    "j": "runs_dir",
    "o": "runs_dir",
    "e": "runs_dir",
    "m": "cluster.notify",
    "M": "cluster.notify",
    "v": "cluster.environment",
    "l": "the resource by its own name",
    "J": "study=, each point is a job of its own",
    "walltime": "cluster.minutes",
    "ncpus": "cluster.cpus_per_rank",
    "mpiprocs": "cluster.ranks_per_node",
    "ngpus": "cluster.gpus_per_node",
    "nodes": "cluster.nodes",
}
STATES = {
    "Q": "PENDING",
    "H": "PENDING",
    "W": "PENDING",
    "T": "PENDING",
    "R": "RUNNING",
    "B": "RUNNING",
    "E": "COMPLETING",
    "S": "SUSPENDED",
    "U": "SUSPENDED",
    "M": "PENDING",
    "F": "",
    "X": "",  # M: moved to another server
}
KILLED_BY_WALLTIME = "-29"
BY_SIGTERM = ("143", "271")  # 128 and 256 and the signal, by release
KILL = re.compile(r"=>> PBS: job killed: (?P<why>.*)")
NO_HISTORY = "not configured to maintain job history"
CHUNK = 200  # jobs of one command line


OPTIONS = FreeOptions(
    "cluster.qsub",
    OWN_KEYS,
    r"[A-Za-z]|[a-z][a-z0-9_]+",
    "an option of one letter, or a resource of -l",
    "filesystems=home",
    separator="_",
)


class Pbs(ByCommands):
    """PBS Professional or OpenPBS."""

    name = "pbs"
    title = "PBS"
    program = "qsub"
    queue_program = "qstat"
    cancel_program = "qdel"
    job_id_form = re.compile(JOB_ID)
    sentinel = "#PBS"
    ended = ("Unknown Job Id", "has finished")
    forbidden: ClassVar[Mapping[str, str]] = {
        " ": SPACE,
        ",": "','",
        ":": "':'",
        "'": "quote",
        '"': "quote",
        "\\": "'\\'",
        "^": "'^'",
        "$": "'$'",
    }
    full = ("Maximum number of jobs", "would exceed", "exceed limit")

    def job_name(self, name: str) -> str:
        """Return a name of characters and length that every release accepts."""
        plain = re.sub(r"[^A-Za-z0-9_.+-]", "_", name)
        return (plain if plain[:1].isalpha() else f"g{plain}")[:MAX_NAME]

    def directives(self, job: JobSpec, folder: RunFolder, num_tasks: int) -> list[str]:
        """Return the options of qsub: a chunk for each node, with all that its ranks use."""
        cluster, (free, resources, chunk) = job.cluster, _free(job.cluster)
        if cluster.exclude:
            text = "PBS has no option that leaves nodes out"
            raise ConfigError(
                "cluster.exclude",
                cluster.exclude,
                text,
                "ask the site for a resource of good nodes",
            )
        select = f"{job.nodes}:ncpus={job.cpus_per_node}:mpiprocs={job.tasks_per_node}"
        if job.gpu_option is not None:
            select += f":ngpus={job.gpus_per_node}"
        own = [f"-N {self.job_name(job.name)}", f"-l select={select}{chunk}"]
        resources = {"place": "scatter", **resources}
        own += [f"-l {name}={value}" for name, value in resources.items()]
        own.append(f"-l walltime={job.minutes // 60:02}:{job.minutes % 60:02}:00")
        if cluster.partition is not None:
            own.append(f"-q {cluster.partition}")
        if cluster.full_account is not None:
            own.append(f"-A {cluster.full_account}")
        own += ["-j oe", f"-o {folder.logs}/"]  # PBS names the file in a folder by the job
        if "r" not in free:
            own.append(f"-r {'y' if cluster.max_requeues else 'n'}")
        if cluster.mail_to is not None:
            own += ["-m ae", *([f"-M {cluster.mail_to}"] if cluster.mail_to else [])]
        if job.after is not None:
            own.append(f"-W depend=afterany:{job.after}")
        return [
            *own,
            *(f"-{name}" if value is True else f"-{name} {value}" for name, value in free.items()),
        ]

    def blocks(
        self, job: JobSpec, folder: RunFolder, works: Sequence[Work]
    ) -> dict[str, list[str]]:
        """Return the line that asks the run to save before its end, as PBS sends no signal."""
        if not job.has_early_signal:
            return {"signal": []}
        seconds = 60 * job.minutes - job.cluster.signal_before_end_s
        signal = f"{{ sleep {seconds} && kill -USR2 $$; }} </dev/null >/dev/null 2>&1 &"
        return {"signal": [f"{signal}  # PBS sends no signal"]}

    def submit_argv(self, job: JobSpec, token: str) -> list[str]:
        """Return the command; the token is among the job's variables, which qstat shows."""
        return ["qsub", "-v", f"{TOKEN_VARIABLE}={token}"]

    def read_id(self, text: str, clusters: str = "") -> str | None:
        """Return the ID that qsub prints."""
        words = text.split()
        return words[-1] if words and self.job_id_form.fullmatch(words[-1]) else None

    def fetch(
        self, job_ids: Sequence[str] | None = None, limit_s: float | None = None
    ) -> list[Job]:
        """Return jobs by qstat, those that have ended too if PBS keeps a history."""
        if job_ids is None:
            result = _with_history(["qselect"], ["-u", user_name("qselect")], limit_s)
            listed = result.check().split()
            if wrong := [word for word in listed if not re.match(r"[0-9]+(\[[0-9]*\])?\.", word)]:
                raise SchedulerUnavailableError(
                    "qselect", f"printed {wrong[0][:80]!r}, which is no job"
                )
            job_ids = [word for word in listed if self.job_id_form.fullmatch(word)]
        jobs = []
        for start in range(0, len(job_ids), CHUNK):
            jobs += self._qstat([*job_ids[start : start + CHUNK]], limit_s)
        return jobs

    def _qstat(self, job_ids: list[str], limit_s: float | None) -> list[Job]:
        """Query some jobs by qstat.

        Its JSON is not used: some releases leave out all jobs but the first, or print variables
        that are not JSON.

        Raises:
            SchedulerError: qstat does not report each job as known or unknown.
        """
        result = _with_history(["qstat"], ["-f", *job_ids], limit_s)
        if (error := self.error_of(result)) is not None:
            raise error
        over = [
            line for line in result.stderr.splitlines() if any(text in line for text in self.ended)
        ]
        forgotten = re.findall(r"\b([0-9]+)\.", "\n".join(over))
        rows = _rows(result.stdout)
        missing = [job_id for job_id in job_ids if _number(job_id) not in {*rows, *forgotten}]
        if missing:
            raise SchedulerUnavailableError("qstat", f"printed nothing of job {missing[0]}")
        known = (job_id for job_id in job_ids if _number(job_id) in rows)
        return [_parse_job(job_id, rows[_number(job_id)]) for job_id in known]

    def kill_cause(self, text: str) -> str | None:
        """Read the message that PBS writes into the job's output before it ends the job."""
        reasons = [line["why"].strip() for line in KILL.finditer(text)]
        if not reasons:
            return None
        if re.match(r"v?mem\b", reasons[-1]):
            return FailureCause.HOST_MEMORY
        return FailureCause.TIME_LIMIT if "walltime" in reasons[-1] else reasons[-1]


def _free(cluster: ClusterConfig) -> tuple[dict[str, Any], dict[str, Any], str]:
    """Return the options of `cluster.qsub`, its resources, and its additions to each chunk.

    The chunks are those of the select option.
    """
    options = OPTIONS.checked(cluster.qsub)
    if "depend" in str(options.get("W", "")):
        raise ConfigError(
            "cluster.qsub.W", options["W"], "must have no depend", "use --after RUN or --chain N"
        )
    if bad := [
        name
        for name, value in options.items()
        if len(name) > 1 and (value is True or " " in str(value))
    ]:
        raise ConfigError(
            f"cluster.qsub.{bad[0]}",
            options[bad[0]],
            "must be the resource's value, without spaces",
        )
    chunk = str(options.pop("select", ""))
    if chunk and not re.fullmatch(r"[a-z][a-z0-9_]*=[^:+]+(:[a-z][a-z0-9_]*=[^:+]+)*", chunk):
        text = "must be what each node needs besides CPUs and GPUs"
        raise ConfigError("cluster.qsub.select", chunk, text, "as in system=polaris")
    letters = {name: value for name, value in options.items() if len(name) == 1}
    resources = {name: value for name, value in options.items() if len(name) > 1}
    return letters, resources, f":{chunk}" if chunk else ""


def _with_history(command: list[str], words: list[str], limit_s: float | None) -> CommandResult:
    result = run_command([*command, "-x", *words], limit_s=limit_s)
    if result.error is not None and NO_HISTORY in result.error.reason:
        return run_command([*command, *words], limit_s=limit_s)
    return result


def _number(job_id: str) -> str:
    """Return the part of an ID that does not depend on the name of the server."""
    return job_id.partition(".")[0]


def _rows(text: str) -> dict[str, dict[str, str]]:
    """Read `qstat -f`: a block for each job, with one attribute per line.

    Continuation lines start with a tab.
    """
    rows: dict[str, dict[str, str]] = {}
    row: dict[str, str] = {}
    for line in text.replace("\n\t", "").splitlines():
        if head := re.fullmatch(r"Job Id:\s*(\S+)", line):
            row = rows.setdefault(_number(head[1]), {})
        elif attribute := re.fullmatch(r"    ([A-Za-z][\w.]*) = (.*)", line):
            row[attribute[1]] = attribute[2]
    return rows


def _parse_job(job_id: str, row: Mapping[str, str]) -> Job:
    letter = row.get("job_state", "")
    if not letter:
        raise SchedulerUnavailableError("qstat", f"printed job {job_id} without a state")
    state = STATES.get(letter, letter)  # an unknown letter counts as active
    code, used, limit = (
        row.get(name)
        for name in ("Exit_status", "resources_used.walltime", "Resource_List.walltime")
    )
    used_span = _span(used)
    limit_span = _span(limit)
    if state == "":
        is_late = used_span is not None and limit_span is not None and used_span >= limit_span
        state = _end_state(code, is_late=is_late)
    start = _utc(row.get("stime"))
    end = _utc(row.get("obittime"))
    if state == "RUNNING" and start is not None and limit_span is not None:
        end = start + limit_span
    nodes = dict.fromkeys(re.findall(r"(?:^|\+)([^/+]+)/", row.get("exec_host", "")))
    token = re.search(rf"(?:^|,){TOKEN_VARIABLE}=([0-9a-f]+)", row.get("Variable_List", ""))
    return Job(
        state,
        "qstat",
        row.get("comment", "") if state != "RUNNING" else "",
        _utc(row.get("estimated.start_time")) if state == "PENDING" else start,
        row.get("Job_Name"),
        exit_code=code or "",
        nodes=",".join(nodes),
        end_utc=end,
        elapsed=used or "",
        time_limit=limit or "",
        job_id=job_id,
        token=token[1] if token is not None else "",
        queue=row.get("queue", ""),
    )


def _end_state(code: str | None, *, is_late: bool) -> str:
    """Return how a job ended, by its exit status.

    A job that was deleted before it ran has no exit status.
    """
    if code == "0":
        return "COMPLETED"
    if code == KILLED_BY_WALLTIME or (code in BY_SIGTERM and is_late):
        return "TIMEOUT"
    return "CANCELLED" if code is None or code in BY_SIGTERM else "FAILED"


def _span(text: str | None) -> timedelta | None:
    span = re.fullmatch(r"(\d+):(\d+):(\d+)", text or "")
    if span is None:
        return None
    return timedelta(hours=int(span[1]), minutes=int(span[2]), seconds=int(span[3]))


def _utc(text: str | None) -> datetime | None:
    """Parse a PBS time, such as `Thu Nov 26 12:00:00 2026` in local time."""
    with contextlib.suppress(ValueError):
        return datetime.strptime(text or "", "%a %b %d %H:%M:%S %Y").astimezone(UTC)
    return None


SCHEDULERS.register(Pbs.name, Pbs())

"""SLURM behind the interface of a batch system, by `slurm_client`.

A job is one batch script. On the first node submitit's program calls what was pickled,
`jobs.launch.batch.BatchJob`, which launches all ranks with ONE srun step. This has four benefits: a
job leaves one log and three small files, not three per rank; post-processing happens outside of
MPI; the launch is the same as for a local run; and a failure is recorded in status.json without
SLURM's accounting, which not every site has.

Runs whose jobs are equal can share one submission, a job array. The script finds the run of its
task by the index. After that it uses only files from the run's own folder: its code, its callable
and its results.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from gems.config.schema import ClusterConfig
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.owner import CLUSTER_VARIABLE
from gems.utils.run_module import RUN_MODULE
from jobs.batch.command import run_command
from jobs.batch.job import Job, JobId, pickle_path
from jobs.batch.resources import JobSpec, Work
from jobs.batch.script import FreeOptions, export_lines
from jobs.schedulers.scheduler import SCHEDULERS, Outcome, Scheduler
from jobs.schedulers.slurm_client import environment as slurm_environment
from jobs.schedulers.slurm_client import jobs as slurm_jobs
from jobs.schedulers.slurm_client import limits, site
from jobs.schedulers.slurm_client.environment import OWN_KEYS, clusters
from jobs.schedulers.slurm_client.jobs import SACCT, SCONTROL, SQUEUE

# Output of sbatch, the second form with --parsable; a site may print more before or after it.
SUBMITTED = re.compile(
    r"^(?:.*\bSubmitted batch job )?(?P<number>[0-9]+)"
    r"(?:(?: on cluster |;)(?P<cluster>\S+))?[ \t]*$",
    re.MULTILINE,
)
SUBMITIT_PROGRAM = "submitit.core._submit"
MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
SBATCH_OPTIONS = FreeOptions(
    "cluster.sbatch", OWN_KEYS, r"[a-z][a-z0-9-]*", "the long name of an sbatch option", "qos=debug"
)
NEVER_STARTS = (
    "it never starts, as a job that it depends on did not end as it must; cancel it and submit it"
    " again"
)
REQUEUE_LIMIT_S = 20.0
STEP_FIELDS = (
    "JobID",
    "JobName",
    "State",
    "ExitCode",
    "Elapsed",
    "NTasks",
    "NodeList",
    "MaxRSS",
    "ConsumedEnergyRaw",
)
PERSONAL = ("UserId", "GroupId", "MailUser")


class Slurm(Scheduler):
    """SLURM, by sbatch, squeue, sacct, scontrol and scancel."""

    name = "slurm"
    title = "SLURM"
    program = "sbatch"
    queue_program = SQUEUE
    cancel_program = "scancel"
    job_id_form = re.compile(slurm_jobs.JOB_ID)
    sentinel = "#SBATCH"
    forbidden: ClassVar[Mapping[str, str]] = {"%": "'%'", "\\": "'\\'"}
    has_arrays = has_probe_jobs = True
    clusters = staticmethod(slurm_environment.clusters)
    notes = staticmethod(slurm_environment.notes)
    find_submitted = staticmethod(slurm_jobs.find_submitted)
    query_queue = staticmethod(partial(slurm_jobs.query_jobs, source=SQUEUE))
    query_accounting = staticmethod(partial(slurm_jobs.query_jobs, source=SACCT))
    find_job = staticmethod(slurm_jobs.find_job)
    cancel = staticmethod(slurm_jobs.cancel_jobs)
    num_queued = staticmethod(slurm_jobs.num_queued)
    refusal = staticmethod(limits.refusal)
    wait_h = staticmethod(limits.estimate_wait_h)
    left_nodes = staticmethod(site.left_nodes)
    max_nodes = staticmethod(site.max_nodes)
    max_array_tasks = staticmethod(site.max_array_tasks)

    def account_of_user(self) -> str | None:
        """Return the account of sbatch's variable."""
        return os.environ.get("SBATCH_ACCOUNT")

    def directives(self, job: JobSpec, folder: RunFolder, num_tasks: int) -> list[str]:
        """Return the sorted options of sbatch."""
        cluster = job.cluster
        is_array = num_tasks > 1
        number = "%A_%a" if is_array else "%j"
        options: dict[str, Any] = {
            "job-name": job.name,
            "nodes": job.allocated_nodes,
            "ntasks-per-node": job.allocated_tasks_per_node,
            "cpus-per-task": job.cpus_per_task,
            "time": job.minutes,
            "partition": cluster.partition,
            "account": cluster.full_account or self.account_of_user(),
            "array": f"0-{num_tasks - 1}%{cluster.max_parallel or num_tasks}" if is_array else None,
            "output": f"{folder.logs.absolute()}/{number}_0_log.out",
            "open-mode": "append",
            **_options(job),
        }
        return [
            f"--{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
            for name, value in sorted(options.items())
            if value is not None
        ]

    def blocks(
        self, job: JobSpec, folder: RunFolder, works: Sequence[Work]
    ) -> dict[str, list[str]]:
        """Return the lines by which an array task finds its run and links its output to it.

        A hard link survives the removal of the other name. Some file systems do not support hard
        links between folders.
        """
        if len(works) < 2:
            return {"task": []}
        name = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}_0_log.out"
        output = f"{shlex.quote(str(folder.logs))}/{name}"
        lines = [
            f"runs=({shlex.join(work.run_folders[0] for work in works)})",
            "run=${runs[SLURM_ARRAY_TASK_ID]}",
            f'{{ ln {output} "$run/logs/" || ln -s {output} "$run/logs/"; }} 2>/dev/null',
        ]
        return {"task": lines}

    def exports(self, job: JobSpec) -> list[str]:
        """Return the lines that set variables.

        One of them holds the cluster, so that the job computes the same ID for itself as its
        submission.
        """
        chosen = self.clusters(job.cluster)
        own = [f'export {CLUSTER_VARIABLE}="$SLURM_CLUSTER_NAME"'] if chosen else []
        if chosen and "," not in chosen:
            own = export_lines({CLUSTER_VARIABLE: chosen})
        cpus = {"SRUN_CPUS_PER_TASK": str(job.cpus_per_task)}
        return [*own, *export_lines({**cpus, **job.cluster.environment})]

    def launch_command(self, job: JobSpec, folder: RunFolder, works: Sequence[Work]) -> str:
        """Return the line that starts submitit's program; in an array it runs the run in `$run`."""
        quote: Callable[[str], str] = shlex.quote
        if len(works) > 1:
            folder = RunFolder(Path("$run"))
            quote = '"{}"'.format
        code = quote(str(folder.code_zip)) if job.snapshot else shlex.join(RUN_MODULE)
        python = shlex.quote(sys.executable)
        return f"exec {python} -u {code} {SUBMITIT_PROGRAM} {quote(str(folder.logs))}"

    def write_works(self, job: JobSpec, works: Sequence[Work], token: str) -> list[Path]:
        """Pickle each work in the logs of its first run."""
        # submitit is imported on demand: it is only needed here
        from jobs.schedulers.slurm_client.pickled_work import pickle_work

        paths = [pickle_path(RunFolder(Path(work.run_folders[0])).logs, token) for work in works]
        for path, work in zip(paths, works, strict=True):
            pickle_work(work, job.minutes, path)
        return paths

    def submit_argv(self, job: JobSpec, token: str) -> list[str]:
        """Return the command; the token is in the name of the script."""
        return ["sbatch"]

    def submission_environment(self, script: str, token: str) -> dict[str, str]:
        """Return the environment of sbatch, with the user's variables for options that are not set."""
        return slurm_environment.submission_environment(script)

    def read_id(self, text: str, clusters: str = "") -> str | None:
        """Return the job number in sbatch's output, with its cluster if some are chosen.

        Return None if the output is ambiguous. If it holds several numbers, squeue can tell which
        one is the job's, by the name of its script.
        """
        only = clusters if "," not in clusters else ""
        job_ids = {
            str(JobId(line["number"], "", line["cluster"] or only))
            for line in SUBMITTED.finditer(text)
        }
        is_sure = len(job_ids) == 1 and (clusters == only or "@" in "".join(job_ids))
        return job_ids.pop() if is_sure else None

    def site_checks(self, job: JobSpec, script: str) -> dict[str, Callable[[], Outcome]]:
        """Return the checks of the partition, the account and the script."""
        return limits.site_checks(job, script, self.clusters(job.cluster))

    def list_jobs(self, job_ids: Iterable[str]) -> list[Job]:
        """List jobs by squeue; arrays are asked for as a whole."""
        jobs = []
        for cluster, numbers in slurm_jobs.by_cluster(job_ids).items():
            wholes = dict.fromkeys(JobId.parse(number).number for number in numbers)
            jobs += slurm_jobs.list_jobs(f"--jobs={','.join(wholes)}", cluster)
        return jobs

    def describe_wait(self, job_id: str, reason: str) -> str:
        """Add advice for a job that its user holds or whose dependency can never be satisfied."""
        if reason == slurm_jobs.NEVER_SATISFIED:
            return f"{reason}: {NEVER_STARTS}"
        if reason != slurm_jobs.HELD:
            return reason
        number = JobId.parse(job_id)
        words = ["scontrol", *slurm_jobs.on(number.cluster), "release", number.local]
        return f"{reason}: `{' '.join(words)}` lets it go"

    def own_job(self, job_id: str, limit_s: float) -> Job | None:
        """Query scontrol."""
        local = JobId.parse(job_id).local  # in its own cluster, which is the default there
        return slurm_jobs.query_jobs([local], SCONTROL, limit_s=limit_s).jobs.get(local)

    def num_restarts(self) -> int:
        """Return the count that SLURM gives a job that starts again."""
        return int(os.environ.get("SLURM_RESTART_COUNT") or 0)

    def requeue(self, job_id: str) -> str | None:
        """Call `scontrol requeue`."""
        argv = ["scontrol", "requeue", JobId.parse(job_id).local]
        return run_command(argv, limit_s=REQUEUE_LIMIT_S).failure

    def kill_cause(self, text: str) -> str | None:
        """Read SLURM's message of the job's end."""
        messages = filter(None, map(slurm_jobs.parse_cancellation, text.splitlines()))
        # a cancelled task also has a message of its own
        number = os.environ.get("SLURM_JOB_ID")
        own = [message for message in messages if message.is_job and message.job_id == number]
        return own[-1].cause if own else None

    def record(self, job_id: str) -> dict[str, Any] | None:
        """Return the fields of `scontrol show job` except personal ones."""
        result = run_command(["scontrol", "--oneliner", "show", "job", JobId.parse(job_id).local])
        if result.error is not None:
            return None
        fields = slurm_jobs.scontrol_fields(result.lines)
        return {name: value for name, value in fields.items() if name not in PERSONAL}

    def record_steps(self, job_id: str) -> list[dict[str, str]] | None:
        """Return sacct's steps, if the site has accounting."""
        chosen = f"--jobs={JobId.parse(job_id).local}"
        words = ["--noheader", "--parsable2", f"--format={','.join(STEP_FIELDS)}", chosen]
        result = run_command(["sacct", *words])
        steps = [dict(zip(STEP_FIELDS, line.split("|"), strict=False)) for line in result.lines]
        return None if result.error else steps or None


def _options(job: JobSpec) -> dict[str, Any]:
    """Return the free options of the preset, and those that only some jobs have."""
    cluster = job.cluster
    free = SBATCH_OPTIONS.checked(cluster.sbatch)
    memory = [name for name in free if name in MEMORY]
    if not cluster.supports_mem_option and memory:
        text = f"cluster {cluster.name} refuses options of memory"
        advice = (
            "leave it out, or set cluster.supports_mem_option=true if the site has changed that"
        )
        raise ConfigError(f"cluster.sbatch.{memory[0]}", free[memory[0]], text, advice)
    own: dict[str, Any] = dict([job.gpu_option] if job.gpu_option else [])
    for name in own.keys() & free.keys():
        text = f"conflicts with cluster.gpu_request={cluster.gpu_request}"
        advice = "set cluster.gpu_request=none to ask for GPUs by hand"
        raise ConfigError(f"cluster.sbatch.{name}", free[name], text, advice)
    # signal only the batch process, which asks the ranks to save; SLURM may send the signal up to
    # half a minute early
    if "signal" not in free and job.has_early_signal:
        own["signal"] = f"B:USR2@{cluster.signal_before_end_s}"
    if cluster.max_requeues and not free.keys() & {"requeue", "no-requeue"}:
        own["requeue"] = True
    if cluster.outlives_nodes:
        own["no-kill"] = True
    if cluster.mail_to is not None:
        own |= {"mail-type": free.get("mail-type", "END,FAIL,REQUEUE")}
        own |= {"mail-user": cluster.mail_to} if cluster.mail_to else {}
    if job.after is not None:
        own["dependency"] = ",".join(
            filter(None, (str(free.get("dependency", "")), _after(cluster, job.after)))
        )
    # ibrun takes the number of tasks from the allocation, and its sites demand the option
    if job.launcher == "ibrun":
        own["ntasks"] = str(job.tasks)
    excluded = ",".join(dict.fromkeys(cluster.exclude))
    return {**free, **own, **({"exclude": excluded} if excluded else {})}


def _after(cluster: ClusterConfig, job_id: str) -> str:
    """Return the dependency on a job, which must be on the same cluster."""
    before = JobId.parse(job_id)
    chosen = clusters(cluster)
    if before.cluster != chosen and before.cluster not in chosen.split(","):
        where = [
            f"of cluster {name}" if name else "of the default cluster"
            for name in (before.cluster, chosen)
        ]
        raise ConfigError(
            "--after", job_id, f"is a job {where[0]}, and this one is {where[1]}", "use one cluster"
        )
    return f"afterany:{before.local}"


SCHEDULERS.register(Slurm.name, Slurm())

"""Submit jobs to SLURM, with submitit underneath.

A job is one batch script. On the first node it runs a callable, `jobs.launch.batch.BatchJob`, which
launches all ranks with ONE srun step (submitit's own srun is switched off). This has four benefits:
a job leaves one log and three small files, not three per rank; post-processing happens outside of
MPI; the launch is the same as for a local run; and a failure is recorded in status.json without
SLURM's accounting, which not every site has.

Runs whose jobs are equal can share one submission, a job array. The script finds the run of its
task by the index. After that it uses only files from the run's own folder: its code, its callable
and its results.

This is the only module that imports submitit, and it is imported only on demand.
"""

from __future__ import annotations

import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import submitit
from submitit.core.utils import DelayedSubmission

from gems.config.schema import ClusterConfig, RunSpec
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.runs.owner import CLUSTER_VARIABLE
from gems.utils.run_module import RUN_MODULE
from jobs.batch.job import JobId, UnclearSubmissionError, pickle_path, script_path
from jobs.batch.resources import JobSpec, Work
from jobs.batch.script import (
    FreeOptions,
    call_submit,
    check_path,
    export_lines,
    module_lines,
    render,
    report_short_job,
)
from jobs.schedulers.slurm_client.environment import OWN_KEYS, clusters, submission_environment
from jobs.schedulers.slurm_client.jobs import find_submitted
from jobs.schedulers.slurm_client.limits import refusal

# Output of sbatch, the second form with --parsable; a site may print more before or after it.
SUBMITTED = re.compile(
    r"^(?:.*\bSubmitted batch job )?(?P<number>[0-9]+)"
    r"(?:(?: on cluster |;)(?P<cluster>\S+))?[ \t]*$",
    re.MULTILINE,
)
SUBMITIT_PROGRAM = "submitit.core._submit"
MAX_TIMEOUTS = 3  # submitit's default: how often it may requeue a job itself
MEMORY = ("mem", "mem-per-cpu", "mem-per-gpu")
SBATCH_OPTIONS = FreeOptions(
    "cluster.sbatch", OWN_KEYS, r"[a-z][a-z0-9-]*", "the long name of an sbatch option", "qos=debug"
)


def sbatch_script(
    spec: RunSpec,
    job: JobSpec,
    folder: RunFolder,
    array: Sequence[RunFolder] = (),
    command: str | None = None,
) -> str:
    """Return the batch script of a run, of an `array` of runs, or with another `command` in it.

    The output of an array's tasks goes to the logs of `folder`, which belongs to none of them. Each
    output also has a name in the logs of its run.

    Raises:
        ConfigError: SLURM would misread a name, path or option.
    """
    for each in (folder, *array):
        check_path(spec, job, each, "SLURM", {"%": "'%'", "\\": "'\\'"})
    return render(
        "slurm",
        directives=_directives(spec, job, folder, len(array)),
        setup=[
            *_task_lines(folder, array),
            *module_lines(spec.cluster),
            *spec.cluster.setup,
            *_exports(spec, job),
        ],
        command=command or _launch_command(job, folder, is_array=bool(array)),
    )


def _launch_command(job: JobSpec, folder: RunFolder, *, is_array: bool) -> str:
    """Return the line that starts submitit's program; in an array it runs the run in `$run`.

    With exec, the program itself receives SLURM's SIGTERM and sets the job's exit code, not the
    shell.
    """
    quote: Callable[[str], str] = shlex.quote
    if is_array:
        folder = RunFolder(Path("$run"))
        quote = '"{}"'.format
    code = quote(str(folder.code_zip)) if job.snapshot else shlex.join(RUN_MODULE)
    python = shlex.quote(sys.executable)
    return f"exec {python} -u {code} {SUBMITIT_PROGRAM} {quote(str(folder.logs))}"


def _directives(spec: RunSpec, job: JobSpec, folder: RunFolder, num_tasks: int) -> list[str]:
    """Return the sorted lines of sbatch options; `num_tasks` is 0 unless the job is an array."""
    cluster = spec.cluster
    number = "%A_%a" if num_tasks else "%j"
    options: dict[str, Any] = {
        "job-name": spec.name,
        "nodes": job.allocated_nodes,
        "ntasks-per-node": job.allocated_tasks_per_node,
        "cpus-per-task": job.cpus_per_task,
        "time": job.minutes,
        "partition": cluster.partition,
        "account": cluster.full_account or os.environ.get("SBATCH_ACCOUNT"),
        "array": f"0-{num_tasks - 1}%{num_tasks}" if num_tasks else None,
        "output": f"{folder.logs.absolute()}/{number}_0_log.out",
        "open-mode": "append",
        **_options(cluster, job),
    }
    return [
        f"#SBATCH --{name}" + ("" if value is True else f"={shlex.quote(str(value))}")
        for name, value in sorted(options.items())
        if value is not None
    ]


def _pickle_work(work: Work, minutes: int, path: Path) -> None:
    """Write the file that submitit's program runs in the job; submitit has no public API for it."""
    if not hasattr(DelayedSubmission, "set_timeout") or not hasattr(DelayedSubmission, "dump"):
        text = "cannot pickle a submission as submitit 1.5 does"
        raise ConfigError("submitit", submitit.__version__, text, "install submitit>=1.5.2,<2")
    delayed = DelayedSubmission(work)
    delayed.set_timeout(minutes, MAX_TIMEOUTS)
    delayed.dump(path)


def _task_lines(folder: RunFolder, array: Sequence[RunFolder]) -> list[str]:
    """Return the lines by which an array task finds its run and links its output into the logs.

    A hard link survives the removal of the other name. Some file systems do not support hard links
    between folders.
    """
    if not array:
        return []
    name = "${SLURM_ARRAY_JOB_ID}_${SLURM_ARRAY_TASK_ID}_0_log.out"
    output = f"{shlex.quote(str(folder.logs))}/{name}"
    return [
        f"runs=({shlex.join(str(run.path) for run in array)})",
        "run=${runs[SLURM_ARRAY_TASK_ID]}",
        f'{{ ln {output} "$run/logs/" || ln -s {output} "$run/logs/"; }} 2>/dev/null',
    ]


def submit_job(
    spec: RunSpec, job: JobSpec, folder: RunFolder, works: Sequence[Work], token: str
) -> str:
    """Submit prepared runs and return the job's number.

    Several works become an array with a task for each; a single work becomes one job. `folder` is
    the run's folder, or for an array the folder of the script and the output. The names of the
    script and of the pickled works, which are in the logs of each task's first run, hold the token
    until `name_submission` renames them.

    Raises:
        UnclearSubmissionError: neither sbatch nor squeue told whether SLURM has the job.
        TryLaterError: the queue takes no more jobs now, or SLURM cannot be reached.
        ConfigError: sbatch refuses the job.
    """
    is_array = len(works) > 1
    runs = [RunFolder(Path(work.run_folders[0])) for work in works] if is_array else [folder]
    text = sbatch_script(spec, job, folder, runs if is_array else ())
    folder.logs.mkdir(parents=True, exist_ok=True)
    script = script_path(folder.logs, token)
    pickles = [pickle_path(run.logs, token) for run in runs]
    for run in runs:
        run.job_sh.write_text(text)
    script.write_text(text)
    for pickle, work in zip(pickles, works, strict=True):
        _pickle_work(work, job.minutes, pickle)
    try:
        job_id = call_sbatch(spec.cluster, script, token)
    except UnclearSubmissionError:
        raise
    except ConfigError:
        for path in (script, *pickles):
            path.unlink()
        raise
    if "#SBATCH --signal=" not in text:
        report_short_job(job)
    return job_id


def call_sbatch(cluster: ClusterConfig, script: Path, token: str) -> str:
    """Submit a script whose name holds the token, and return the job's number.

    Raises the errors of `submit_job`.
    """
    chosen = clusters(cluster)
    return call_submit(
        ["sbatch", str(script)],
        submission_environment(script.read_text()),
        cluster,
        "SLURM",
        partial(read_id, chosen),
        partial(refusal, cluster.name),
        lambda: find_submitted([token], chosen).get(token),
    )


def read_id(chosen: str, text: str) -> str | None:
    """Return the job number in sbatch's output, with its cluster if some are `chosen`.

    Return None if the output is ambiguous. If it holds several numbers, squeue can tell which one
    is the job's, by the name of its script.
    """
    only = chosen if "," not in chosen else ""
    found = {
        str(JobId(each["number"], "", each["cluster"] or only)) for each in SUBMITTED.finditer(text)
    }
    is_sure = len(found) == 1 and (chosen == only or "@" in "".join(found))
    return found.pop() if is_sure else None


def _options(cluster: ClusterConfig, job: JobSpec) -> dict[str, Any]:
    """Return the options that submitit has no parameter for, or that sites request differently."""
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


def _exports(spec: RunSpec, job: JobSpec) -> list[str]:
    """Return the lines that set variables.

    One of them holds the cluster, so that the job computes the same ID for itself as its
    submission.
    """
    chosen = clusters(spec.cluster)
    own = [] if not chosen else [f'export {CLUSTER_VARIABLE}="$SLURM_CLUSTER_NAME"']
    if chosen and "," not in chosen:
        own = export_lines({CLUSTER_VARIABLE: chosen})
    return [
        *own,
        *export_lines({"SRUN_CPUS_PER_TASK": str(job.cpus_per_task), **spec.cluster.environment}),
    ]

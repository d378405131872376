"""Submission: a configuration becomes a run, here by mpiexec or on a cluster by SLURM."""

from __future__ import annotations

import shlex
import sys

from gems.cli import Options, print_json
from gems.config import RunSpec
from gems.costed import costed
from gems.program import check_program
from gems.runfolder import RunFolder, prepare
from jobs.launch import launch
from jobs.launchers import command
from jobs.queue import release
from jobs.spec import JobSpec, job_spec

DRY_RUN = "--dry-run"


def prepare_run(spec: RunSpec, options: Options) -> int:
    """Prepares the run folder and prints its path, for those who start the ranks themselves.

    Raises:
        ConfigError: as `gems.runfolder.prepare`.
    """
    spec = costed(spec)
    release(RunFolder.of(spec))
    folder = prepare(spec)
    if options.json:
        print_json({"run_folder": str(folder.path)})
    else:
        print(folder.path)
    return 0


def submit(spec: RunSpec, options: Options) -> int:
    """Starts a run and gives its exit code; on SLURM, submits it and gives 0.

    With --dry-run nothing starts and no folder is made: the batch script (here: the launcher's command line)
    goes to stdout as it would be used, the resources to stderr.

    Raises:
        ConfigError: no launcher, no permission, a refused job, or a folder in use.
    """
    spec = costed(spec)
    job = job_spec(spec)
    if DRY_RUN in options.flags:
        _show(spec, job, options)
        return 0
    if job.launcher == "srun":
        return _submit_to_slurm(spec, job, options)
    folder = _prepare_here(spec, job)
    code = launch(folder, spec, table_on_stderr=options.json)
    if options.json:
        print_json({**folder.read_status(), "run_folder": str(folder.path)})
    return code


def start(spec: RunSpec) -> int:
    """Starts a run without a word on stdout, and gives its exit code; on SLURM, submits it and gives 0.

    Raises:
        ConfigError: as `submit`.
    """
    spec = costed(spec)
    job = job_spec(spec)
    if job.launcher == "srun":
        _send(spec, job)
        return 0
    return launch(_prepare_here(spec, job), spec, echo=False, is_quiet=True)


def _prepare_here(spec: RunSpec, job: JobSpec) -> RunFolder:
    command(job, RunFolder.of(spec))
    return prepare(spec)


def _show(spec: RunSpec, job: JobSpec, options: Options) -> None:
    check_program(spec)
    folder = RunFolder.of(spec)
    argv = command(job, folder)
    script = _script(spec, job, folder) if job.launcher == "srun" else None
    if options.json:
        print_json(
            {
                "script": script, "command": argv, "nodes": job.nodes, "tasks": job.tasks,
                "tasks_per_node": job.tasks_per_node, "cpus_per_task": job.cpus_per_task, "gpus": job.gpus,
                "minutes": job.minutes, "gpu_hours": job.gpu_hours, "run_folder": str(folder.path),
            }
        )  # fmt: skip
        return
    line = shlex.join(argv)
    print(line if script is None else script, end="\n" if script is None else "", flush=True)
    if script is not None:
        print(f"jobs: the script runs: {line}", file=sys.stderr)
    print(f"jobs: {job.summary()}", file=sys.stderr)
    print(f"jobs: nothing is submitted; without {DRY_RUN} the run folder is {folder.path}", file=sys.stderr)


def _script(spec: RunSpec, job: JobSpec, folder: RunFolder) -> str:
    from jobs.slurm import executor

    return executor(spec, job, folder).script()


def _send(spec: RunSpec, job: JobSpec) -> tuple[RunFolder, str]:
    """Submits a run to SLURM and gives its folder and the job's number."""
    from jobs.slurm import executor, need_sbatch, submit_job

    executor(spec, job, RunFolder.of(spec))
    need_sbatch()
    release(RunFolder.of(spec))
    folder = prepare(spec)
    job_id = submit_job(spec, job, folder)
    folder.write_status("submitted", job_id=job_id)
    return folder, job_id


def _submit_to_slurm(spec: RunSpec, job: JobSpec, options: Options) -> int:
    folder, job_id = _send(spec, job)
    log = folder.logs / "ranks.log"
    if options.json:
        print_json({"job_id": job_id, "run_folder": str(folder.path), "log": str(log)})
        return 0
    print(f"job     {job_id}: {job.summary()}")
    print(f"folder  {folder.path}")
    print(f"follow  tail -F {shlex.quote(str(log))}")
    print(f"state   squeue -j {job_id}")
    return 0

"""Submission: a configuration becomes a run, here by mpiexec or on a cluster by SLURM."""

from __future__ import annotations

import shlex
import sys
from typing import Any

from gems.cli.framework import Options, print_json
from gems.config.schema import RunSpec
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.simulation.profiled_costs import costed
from jobs.launch.launch import launch
from jobs.launch.launchers import command
from jobs.preflight.checks import Check, is_at_home, passed, preflight, show
from jobs.preflight.cost import is_agreed
from jobs.slurm.limits import check_limits
from jobs.diagnosis.node_blocklist import BadNodes
from jobs.launch.submission import release
from jobs.slurm.resources import JobSpec, job_spec

DRY_RUN = "--dry-run"


def prepare_run(spec: RunSpec, options: Options) -> int:
    """Prepare the run folder and prints its path, for those who start the ranks themselves.

    Raises:
        ConfigError: as `gems.runs.folder.prepare`.
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
    """Start a run and gives its exit code; on SLURM, submits it and gives 0.

    A job goes through `jobs.preflight.checks` before it is queued, and an expensive one is asked about on the terminal (--yes
    answers); who says no gets exit code 1. With --dry-run nothing starts and no folder is made: the batch script
    (here: the launcher's command line) goes to stdout as it would be used, the resources and the preflight to stderr.

    Raises:
        ConfigError: no launcher, no permission, a refused job, a folder in use, or nobody to ask.
        DoesNotFitError: a rank would hold more than its device, or a node's ranks more than its host memory.
    """
    spec = costed(spec)
    job = job_spec(spec)
    check_limits(spec, job)
    if DRY_RUN in options.flags:
        _show(spec, job, options)
        return 0
    if job.is_batch:
        return _submit_to_slurm(spec, job, options)
    folder = _prepare_here(spec, job)
    code = launch(folder, spec, table_on_stderr=options.json)
    if options.json:
        print_json({**folder.read_status(), "run_folder": str(folder.path)})
    return code


def start(spec: RunSpec, options: Options = Options()) -> int:  # noqa: B008 (it is frozen)
    """Start a run without a word on stdout, and gives its exit code; on SLURM, submits it and gives 0.

    Raises:
        ConfigError: as `submit`.
        DoesNotFitError: as `submit`.
    """
    spec = costed(spec)
    job = job_spec(spec)
    check_limits(spec, job)
    if job.is_batch:
        return 0 if _send(spec, job, options) else 1
    return launch(_prepare_here(spec, job), spec, echo=False, is_quiet=True)


def _prepare_here(spec: RunSpec, job: JobSpec) -> RunFolder:
    command(job, RunFolder.of(spec))
    return prepare(spec)


def _show(spec: RunSpec, job: JobSpec, options: Options) -> None:
    folder = RunFolder.of(spec)
    argv = command(job, folder)
    script = _script(spec, job, folder) if job.is_batch else None
    checks = passed(preflight(spec, job, script, here=is_at_home(spec)))
    if options.json:
        print_json(
            {
                "script": script, "command": argv, "nodes": job.nodes, "tasks": job.tasks,
                "tasks_per_node": job.tasks_per_node, "cpus_per_task": job.cpus_per_task, "gpus": job.gpus,
                "minutes": job.minutes, "gpu_hours": job.gpu_hours, "charge": job.charge,
                "charge_unit": job.charge_unit, "run_folder": str(folder.path), **_preflight_dict(checks),
            }
        )  # fmt: skip
        return
    line = shlex.join(argv)
    print(line if script is None else script, end="\n" if script is None else "", flush=True)
    if script is not None:
        print(f"jobs: the script runs: {line}", file=sys.stderr)
    print(f"jobs: {job.summary()}", file=sys.stderr)
    show(checks)
    print(f"jobs: nothing is submitted; without {DRY_RUN} the run folder is {folder.path}", file=sys.stderr)


def _preflight_dict(checks: list[Check]) -> dict[str, Any]:
    return {"preflight": [check.to_dict() for check in checks]}


def _script(spec: RunSpec, job: JobSpec, folder: RunFolder) -> str:
    from jobs.slurm.executor import executor

    return executor(spec, job, folder).script()


def _send(spec: RunSpec, job: JobSpec, options: Options) -> tuple[RunFolder, str, list[Check]] | None:
    """Submit a run to SLURM after its preflight; gives its folder, the job's number and the checks, or None after a no."""
    from jobs.slurm.executor import need_sbatch, submit_job

    folder = RunFolder.of(spec)
    script = _script(spec, job, folder)
    need_sbatch(job)
    release(folder)
    checks = passed(preflight(spec, job, script))
    if not is_agreed([job], spec.cluster.confirm_above_gpu_hours, options):
        print("jobs: nothing is submitted", file=sys.stderr)
        return None
    folder = prepare(spec)
    job_id = submit_job(spec, job, folder)
    folder.write_status("submitted", job_id=job_id)
    return folder, job_id, checks


def _submit_to_slurm(spec: RunSpec, job: JobSpec, options: Options) -> int:
    sent = _send(spec, job, options)
    if sent is None:
        return 1
    folder, job_id, checks = sent
    log = folder.logs / "ranks.log"
    if options.json:
        print_json({"job_id": job_id, "run_folder": str(folder.path), "log": str(log), **_preflight_dict(checks)})
        return 0
    show(checks)
    note = BadNodes(folder.path.parent).note(spec.cluster.name)
    if note is not None:
        print(f"jobs: {note}", file=sys.stderr)
    print(f"job     {job_id}: {job.summary()}")
    print(f"folder  {folder.path}")
    print(f"follow  python -m jobs logs -f {shlex.quote(str(folder.path))}")
    print(f"state   python -m jobs status {shlex.quote(str(folder.path))}")
    return 0

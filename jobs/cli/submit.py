"""`gems-jobs submit`, `prepare` and `collect`: run a configuration, here or as a job."""

from __future__ import annotations

import contextlib
import shlex
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from gems.cli.framework import Options, print_json
from gems.config.schema import RunSpec, TrainConfig
from gems.errors import ConfigError
from gems.plan.evaluate import evaluate
from gems.runs.folder import RunFolder
from gems.runs.owner import own_job_id, release, take
from gems.runs.prepare import prepare
from jobs.batch.launchers import command
from jobs.batch.output import report
from jobs.batch.preset_limits import check_limits, is_on_site
from jobs.batch.resources import JobSpec, job_spec
from jobs.diagnosis.node_blocklist import NodeBlocklist
from jobs.launch.launch import JSON, STDERR, STDOUT, launch
from jobs.launch.launch import collect as collect_run
from jobs.launch.submission import prepare_here, submit_chain, submit_run
from jobs.preflight.checks import Check, passed, preflight, show
from jobs.preflight.cost import DRY_RUN, FORCE, YES
from jobs.schedulers.scheduler import write_script
from jobs.status.job_record import gone_verifier, read_chain
from jobs.status.lookup import RUNS_DIR, find_one_run
from jobs.status.run_status import run_statuses

AFTER = "--after"
CHAIN = "--chain"
MAX_CHAIN = 100


def prepare_run(spec: RunSpec, options: Options) -> int:
    """Prepare the run folder and print its path, for users who start the ranks themselves."""
    job_id = own_job_id()
    folder = prepare(spec, own=partial(take, verify=gone_verifier(), job_id=job_id))
    if job_id is None:  # a user's own batch script owns the folder until the end of its job
        release(folder)
    if options.json:
        print_json({"run_folder": str(folder.path)})
    else:
        print(folder.path)
    return 0


def collect(words: Sequence[str], options: Options) -> int:
    """Run `gems-jobs collect RUN_FOLDER`.

    Raises:
        ConfigError: The words are not one folder, or the folder has no run.
    """
    if len(words) != 1:
        raise ConfigError(
            "collect", " ".join(words), "takes one run folder", "gems-jobs collect RUN_FOLDER"
        )
    folder = RunFolder(Path(words[0]).resolve())
    folder.read_spec()
    return collect_run(folder, JSON if options.json else STDOUT)


def submit(spec: RunSpec, options: Options) -> int:
    """Run here and return the exit code, or submit a job and return 0.

    The code is 1 if the user does not confirm the cost. Before a job is queued it must pass
    `jobs.preflight.checks`, and an expensive one must be confirmed on the terminal or by --yes.
    --after RUN starts the job when that run's job has ended. --chain N submits N jobs, each of
    which continues the run where its predecessor stopped. --force takes a folder if it is unknown
    whether its owner has ended. --dry-run starts nothing and creates no folder: it prints the batch
    script (for a local run, the launcher's command line) to stdout, and the resources and the
    preflight checks to stderr.

    Raises:
        ConfigError: No launcher, no permission, a refused job, a folder in use, or nobody to
            confirm.
        DoesNotFitError: A rank needs more than its device's memory, or a node's ranks more than its
            host memory.
    """
    job = job_spec(spec)
    num_jobs = options.whole(CHAIN, 1, most=MAX_CHAIN)
    for option in (AFTER, CHAIN):
        if option in options.chosen and not job.is_batch:
            value = options.chosen[option]
            raise ConfigError(
                option,
                value,
                "needs jobs of a batch system, and this run starts here",
                "choose a cluster=",
            )
    job = replace(job, after=_job_to_await(job.runs_dir, options))
    check_limits(job, spec.machine.host_bytes)
    is_forced = FORCE in options.flags
    folder = RunFolder.of(spec)
    if DRY_RUN in options.flags:
        argv = command(job, folder)
        script = write_script(job, folder) if job.is_batch else None
        here = is_on_site(job.cluster)
        checks = passed(preflight(spec, job, script, partial(evaluate, spec), here=here))
        _show(job, folder, argv, script, checks, options)
        return 0
    if job.is_batch:
        if _has_finished(folder, spec.train):
            return _show_finished(folder, options)
        is_sure = YES in options.flags
        submitted = submit_run(spec, job, assume_yes=is_sure, force=is_forced, num_jobs=num_jobs)
        if submitted is None:
            return 1
        _show_submitted(job, folder, *submitted, num_jobs, options)
        return 0
    folder = prepare_here(spec, job, force=is_forced)
    code = launch(folder, spec, summary=STDERR if options.json else STDOUT)
    if options.json:
        print_json({**folder.read_status(), "run_folder": str(folder.path)})
    return code


def _job_to_await(runs_dir: str, options: Options) -> str | None:
    """Return the last job of the run that --after names, or None if the run has ended."""
    if (name := options.chosen.get(AFTER)) is None:
        return None
    folder = find_one_run([f"{RUNS_DIR}{runs_dir}", name], "submit")
    (run,) = run_statuses([folder]).runs
    if not run.is_active:
        report(f"{AFTER} {name}: it is {run.state}, so that there is nothing to wait for")
        return None
    if run.job_id is None:
        raise ConfigError(
            AFTER,
            name,
            f"is {run.state}, and no job of a batch system",
            "wait for it: nothing else would",
        )
    return (read_chain(folder) or [run.job_id])[-1]


def _show(
    job: JobSpec,
    folder: RunFolder,
    argv: Sequence[str],
    script: str | None,
    checks: Sequence[Check],
    options: Options,
) -> None:
    """Show the script that would be submitted, or the command that would run here."""
    if options.json:
        names = (
            "nodes",
            "tasks",
            "tasks_per_node",
            "cpus_per_task",
            "gpus",
            "minutes",
            "gpu_hours",
            "charge",
            "charge_unit",
        )
        print_json(
            {
                "script": script,
                "command": argv,
                **{name: getattr(job, name) for name in names},
                "run_folder": str(folder.path),
                "preflight": [check.to_dict() for check in checks],
            }
        )
        return
    line = shlex.join(argv)
    print(f"{line}\n" if script is None else script, end="", flush=True)
    if script is not None:
        report(f"the script runs: {line}")
    report(job.summary())
    show(checks)
    report(f"nothing is submitted; without {DRY_RUN} the run folder is {folder.path}")


def _has_finished(folder: RunFolder, train: TrainConfig) -> bool:
    """Return whether a run has finished with this very configuration."""
    with contextlib.suppress(ConfigError, OSError):
        status = folder.read_status()
        is_same = status.get("state") == "finished" and folder.read_own_spec().train == train
        return is_same and not status.get("exit_code")
    return False


def _show_finished(folder: RunFolder, options: Options) -> int:
    if options.json:
        print_json({**folder.read_status(), "run_folder": str(folder.path)})
    name = shlex.quote(folder.path.name)
    again = f"`jobs resubmit {name} {FORCE}` runs it again"
    report(f"{name} has finished, and nothing is submitted; {again}")
    return 0


def _show_submitted(
    job: JobSpec,
    folder: RunFolder,
    job_id: str,
    checks: Sequence[Check],
    num_jobs: int,
    options: Options,
) -> None:
    """Submit the other jobs of the chain, and print what was submitted."""
    chain = submit_chain(job, folder, job_id, num_jobs) if num_jobs > 1 else [job_id]
    if options.json:
        print_json(
            {
                "job_id": job_id,
                "chain": chain,
                "run_folder": str(folder.path),
                "log": str(folder.logs / "ranks.log"),
                "preflight": [check.to_dict() for check in checks],
            }
        )
        return
    show(checks)
    if (note := NodeBlocklist(folder.path.parent).note(job.cluster.name)) is not None:
        report(note)
    print(f"job     {job_id}: {job.summary()}\nfolder  {folder.path}")
    if len(chain) > 1:
        print(f"chain   {', '.join(chain)}, each after the one before, until the steps are done")
    for what, words in (("follow", "logs -f"), ("state ", "status")):
        print(f"{what}  gems-jobs {words} {shlex.quote(str(folder.path))}")

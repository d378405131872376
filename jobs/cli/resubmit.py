"""Resume runs that have ended from their newest checkpoints, without nodes that failed.

`gems-jobs resubmit`.
The failed points of a study go as its points do, by job arrays; with --force each goes alone.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gems.cli.framework import Options, print_json
from gems.config.compose import changed
from gems.config.schema import RunSpec
from gems.errors import ConfigError, GemsError, one_of
from gems.plan.evaluate import with_strips_chosen
from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from gems.utils.tables import printable
from jobs.batch.command import SchedulerUnavailableError
from jobs.batch.resources import job_spec
from jobs.diagnosis.evidence import newest_checkpoint
from jobs.diagnosis.node_blocklist import BlockedNode, NodeBlocklist
from jobs.diagnosis.report import UNBLOCK, Diagnosis, diagnose_run, record_diagnosis
from jobs.launch.submission import start_run
from jobs.preflight.cost import FORCE, YES, is_confirmed
from jobs.schedulers.slurm_client.site import left_nodes
from jobs.status.lookup import RUNS_DIR, find_named
from jobs.status.run_status import read_status, run_statuses
from jobs.status.study_record import StudyRecord
from jobs.studies.points import Point
from jobs.studies.runner import StudyRunner

OLD_FORCE = "--again"  # the old one until the next release
OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=")
# Keys that leave the results of a run as they are, or only make it longer.
CLUSTER = "cluster."
MAY_CHANGE = (
    f"{CLUSTER}KEY",
    "train.steps",
    "train.checkpoint_s",
    "train.checkpoint_steps",
    "train.keep_checkpoints",
    "train.max_failed_saves",
    "train.hang_timeout_s",
    "train.resume",
)
NEEDS_CHANGE = (
    FailureCause.CONFIGURATION,
    FailureCause.DOES_NOT_FIT,
    FailureCause.DEVICE_MEMORY,
    FailureCause.WRONG_MPI,
)
NOT_CONFIRMED = "its cost was not confirmed"
FAILED_STATES = ("failed", "lost", "stopped")
Result = dict[str, Any]


def resubmit(words: Sequence[str], options: Options) -> int:
    """Run `gems-jobs resubmit RUN_OR_STUDY ... [key=value ...]`.

    Of a study all points that have failed.
    Runs that are active are refused, finished ones unless --force, and those whose cause needs a
    change first unless --yes. Above cluster.confirm_above_gpu_hours, of all points of a study
    together, it asks first unless --yes. Return the worst of the exit codes, 1 for a refusal.

    Raises:
        ConfigError: no such run or study, or a key that would make another run of it.
    """
    if OLD_FORCE in options.flags:
        raise ConfigError("option", OLD_FORCE, f"is now {FORCE}")
    overrides = [word for word in words if OVERRIDE.match(word) and not word.startswith(RUNS_DIR)]
    for key, _, value in (word.lstrip("+").partition("=") for word in overrides):
        if not key.startswith(CLUSTER) and key not in MAY_CHANGE:
            allowed = f"would make another run; {one_of(MAY_CHANGE)}"
            raise ConfigError(key, value, allowed, "submit a new one: gems-jobs submit")
    found = find_named([word for word in words if word not in overrides], "resubmit")
    results = [_resubmit(folder, overrides, options) for folder in found.runs]
    for study in found.studies:
        results += _resubmit_study(
            study, {folder.path for folder in found.runs}, overrides, options
        )
    if options.json:
        print_json({"runs": results})
    elif not results:
        print("no point has failed")
    return max((int(result["exit_code"]) for result in results), default=0)


def _resubmit(folder: RunFolder, overrides: Sequence[str], options: Options) -> Result:
    try:
        spec, notes = _next_attempt(folder, overrides, options)
        code = start_run(spec, assume_yes=YES in options.flags, force=FORCE in options.flags)
        if code and job_spec(spec).is_batch:
            raise GemsError(NOT_CONFIRMED)
    except GemsError as error:
        return _result(folder, options, "refused", str(error), error.exit_code)
    return _outcome(RunFolder.of(spec), options, notes, code)


def _resubmit_study(
    study: StudyRecord, done: Container[Path], overrides: Sequence[str], options: Options
) -> list[Result]:
    """Submit the failed points of a study that are not `done`, and return what became of each."""
    labels = {folder.path: label for label, folder in study.points() if folder.path.is_dir()}
    statuses = run_statuses([RunFolder(path) for path in labels]).runs
    failed = [
        run.folder for run in statuses if run.state in FAILED_STATES and run.folder.path not in done
    ]
    if FORCE in options.flags:
        return [_resubmit(folder, overrides, options) for folder in failed]
    results = []
    points = []
    notes = {}
    for folder in failed:
        try:
            spec, said = _next_attempt(folder, overrides, options)
        except GemsError as error:
            results.append(_result(folder, options, "refused", str(error), error.exit_code))
            continue
        points.append(point := Point((labels[folder.path],), spec))
        notes[point.folder.path] = said
    if not points:
        return results
    try:
        if not is_confirmed(
            [job_spec(point.spec) for point in points], assume_yes=YES in options.flags
        ):
            raise GemsError(NOT_CONFIRMED)
    except GemsError as error:
        refused = (
            _result(point.folder, options, "refused", str(error), error.exit_code)
            for point in points
        )
        return [*results, *refused]
    known = [
        (label, folder.path) for label, folder in study.points()
    ]  # those without a folder yet too
    study.begin([*known, *((point.label, point.folder.path) for point in points)])
    runner = StudyRunner(points, study, points)
    runner.run()
    waiting = {point.folder.path for point in runner.waiting}
    for folder in (point.folder for point in points):
        if (refusal := runner.refused.get(folder.path)) is not None:
            results.append(_result(folder, options, "refused", str(refusal), refusal.exit_code))
        elif folder.path in waiting:
            results.append(
                _result(folder, options, "refused", "the queue is full: call this again", 1)
            )
        else:
            code = read_status(folder).get("exit_code")
            results.append(
                _outcome(folder, options, notes[folder.path], code if isinstance(code, int) else 0)
            )
    return results


def _next_attempt(
    folder: RunFolder, overrides: Sequence[str], options: Options
) -> tuple[RunSpec, list[str]]:
    """Return the configuration to submit and notes for the user, and record why the run ended.

    Raise if it may not.
    """
    diagnosis = diagnose_run(folder, with_trace=False)
    if (refusal := _refusal(diagnosis, overrides, options)) is not None:
        raise GemsError(refusal)
    record_diagnosis(diagnosis)
    return _changed_spec(folder, overrides)


def _outcome(made: RunFolder, options: Options, notes: Sequence[str], code: int) -> Result:
    """Return what became of a run that was started here, or submitted."""
    if code:
        return _result(
            made, options, "failed", f"exit code {code}, see `jobs diagnose {made.path.name}`", code
        )
    job_id = read_status(made).get("job_id") if job_spec(made.read_spec()).is_batch else None
    if job_id is None:
        return _result(made, options, "finished", ", ".join(notes))
    return _result(made, options, "submitted", ", ".join([f"job {job_id}", *notes]), 0, job_id)


def _result(
    folder: RunFolder,
    options: Options,
    outcome: str,
    why: str,
    code: int = 0,
    job_id: str | None = None,
) -> Result:
    """Return and print the outcome of a run: submitted, finished (here), refused or failed."""
    name = folder.path.name
    if not options.json:
        print(printable(f"{name}: {outcome}, {why}"), flush=True)
    return {
        "run": name,
        "run_folder": str(folder.path),
        "outcome": outcome,
        "why": why,
        "exit_code": code,
        "job_id": job_id,
    }


def _refusal(diagnosis: Diagnosis, overrides: Sequence[str], options: Options) -> str | None:
    """Return why a run is not submitted again, or None."""
    cause = diagnosis.cause
    if cause in (FailureCause.RUNNING, FailureCause.WAITING) and diagnosis.state != "prepared":
        return f"it is {diagnosis.state}: {diagnosis.text}"
    if cause is FailureCause.FINISHED and FORCE not in options.flags:
        return f"it has finished; {FORCE} runs it again"
    is_fixed = cause is FailureCause.WRONG_MPI and any(
        word.lstrip("+").startswith(CLUSTER) for word in overrides
    )
    if cause in NEEDS_CHANGE and not is_fixed and YES not in options.flags:
        advice = "; ".join(diagnosis.advice)
        return (
            f"{diagnosis.line()}; it would fail again, first: {advice} ({YES} submits it unchanged)"
        )
    return None


def _changed_spec(folder: RunFolder, overrides: Sequence[str]) -> tuple[RunSpec, list[str]]:
    """Return the run to submit, and notes for the user.

    Raise ConfigError if too few nodes are left for it.
    """
    notes = []
    spec = with_strips_chosen(
        changed(replace(folder.read_own_spec(), runs_dir=str(folder.path.parent)), overrides)
    )
    if job_spec(spec).is_batch:
        blocked = NodeBlocklist(folder.path.parent).blocked(spec.cluster.name)
        exclude = dict.fromkeys([*spec.cluster.exclude, *(entry.node for entry in blocked)])
        spec = changed(spec, [f"cluster.exclude=[{','.join(exclude)}]"])
        _check_nodes_left(spec, blocked)
        if exclude:
            notes.append(f"without node{'s' if len(exclude) > 1 else ''} {', '.join(exclude)}")
    step = newest_checkpoint(folder)
    made = RunFolder.of(spec).path
    if made != folder.path:
        if step is not None and not any(
            word.lstrip("+").startswith("train.resume=") for word in overrides
        ):
            values = spec.to_dict()
            values["train"]["resume"] = str(folder.path)
            spec = RunSpec.from_dict(values)
        why = (
            "for these keys are part of the run"
            if overrides
            else "for an earlier version named that folder"
        )
        notes.append(f"in {RunFolder.of(spec).path}, {why}")
    return spec, [*notes, "from its start" if step is None else f"from step {step}"]


def _check_nodes_left(spec: RunSpec, blocked: Sequence[BlockedNode]) -> None:
    """Raise ConfigError if the excluded nodes leave too few.

    SLURM, if it does not answer now, would refuse the job.
    """
    cluster = spec.cluster
    job = job_spec(spec)
    if not cluster.exclude:
        return
    try:
        left, excluded = left_nodes(cluster)
    except SchedulerUnavailableError:
        return
    needed = min([job.nodes, *cluster.smaller_nodes(job.nodes)]) + cluster.spare_nodes
    if excluded and len(left) < needed:
        where = f"partition {cluster.partition}" if cluster.partition else f"cluster {cluster.name}"
        text = (
            f"leaves {len(left)} of the {len(left | excluded)} nodes of {where}, and the run needs"
            f" {needed}"
        )
        listed = next((entry.node for entry in blocked if entry.node in excluded), None)
        advice = (
            "exclude fewer nodes"
            if listed is None
            else f"a node that is sound: jobs diagnose {UNBLOCK} {listed}"
        )
        raise ConfigError("cluster.exclude", ",".join(cluster.exclude), text, advice)

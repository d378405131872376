"""`gems-jobs resubmit`: continue ended runs from their newest checkpoints, without bad nodes.

The failed points of a study are submitted in job arrays, or one by one with --force.
"""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from dataclasses import dataclass, field, replace
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
from jobs.batch.resources import JobSpec, job_spec
from jobs.diagnosis.evidence import newest_checkpoint
from jobs.diagnosis.node_blocklist import BlockedNode, NodeBlocklist
from jobs.diagnosis.report import UNBLOCK, Diagnosis, diagnose_run, record_diagnosis
from jobs.launch.submission import start_run
from jobs.preflight.cost import FORCE, YES, is_confirmed
from jobs.schedulers.scheduler import scheduler_for
from jobs.status.lookup import RUNS_DIR, StudyRecord, find_named
from jobs.status.run_status import read_status, run_statuses
from jobs.studies.points import Point
from jobs.studies.runner import StudyRunner

OVERRIDE = re.compile(r"\+{0,2}[A-Za-z_][\w.]*=")
# keys that do not change the results of a run, or only make it longer
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


def resubmit(words: Sequence[str], options: Options) -> int:
    """Run `gems-jobs resubmit RUN_OR_STUDY ... [key=value ...]`; of a study, all failed points.

    Active runs are refused, finished ones unless --force, and those whose cause of failure needs a
    change first unless --yes. Jobs above cluster.confirm_above_gpu_hours, of all points of a study
    together, must be confirmed unless --yes. Return the worst exit code; a refusal is 1.

    Raises:
        ConfigError: A run or study does not exist, or a key would make another run of it.
    """
    overrides = [word for word in words if OVERRIDE.match(word) and not word.startswith(RUNS_DIR)]
    for key, _, value in (word.lstrip("+").partition("=") for word in overrides):
        if not key.startswith(CLUSTER) and key not in MAY_CHANGE:
            allowed = f"would make another run; {one_of(MAY_CHANGE)}"
            raise ConfigError(key, value, allowed, "submit a new one: gems-jobs submit")
    named = find_named([word for word in words if word not in overrides], "resubmit")
    again = _Resubmission(overrides, YES in options.flags, FORCE in options.flags, options.json)
    for folder in named.runs:
        again.submit(folder)
    for study in named.studies:
        again.submit_study(study, {folder.path for folder in named.runs})
    if options.json:
        print_json({"runs": again.results})
    elif not again.results:
        print("no point has failed")
    return max((int(result["exit_code"]) for result in again.results), default=0)


@dataclass
class _Resubmission:
    """The runs to submit again with the same options; `results` has a row for each run."""

    overrides: Sequence[str]
    is_sure: bool
    is_forced: bool
    as_json: bool
    results: list[dict[str, Any]] = field(default_factory=list)

    def submit(self, folder: RunFolder) -> None:
        """Submit a run, or run it here."""
        try:
            spec, notes = self._next_attempt(folder)
            code = start_run(spec, assume_yes=self.is_sure, force=self.is_forced)
            if code and job_spec(spec).is_batch:
                raise GemsError(NOT_CONFIRMED)
        except GemsError as error:
            self._refuse(folder, error)
        else:
            self._note(RunFolder.of(spec), notes, code)

    def submit_study(self, study: StudyRecord, done: Container[Path]) -> None:
        """Submit the failed points of a study that are not `done`."""
        labels = {folder.path: label for label, folder in study.points() if folder.path.is_dir()}
        points = []
        notes = {}
        for run in run_statuses([RunFolder(path) for path in labels]).runs:
            folder = run.folder
            if run.state not in FAILED_STATES or folder.path in done:
                continue
            if self.is_forced:
                self.submit(folder)
                continue
            try:
                spec, point_notes = self._next_attempt(folder)
            except GemsError as error:
                self._refuse(folder, error)
            else:
                points.append(point := Point((labels[folder.path],), spec))
                notes[point.folder.path] = point_notes
        if not points:
            return
        try:
            jobs = [job_spec(point.spec) for point in points]
            if not is_confirmed(jobs, assume_yes=self.is_sure):
                raise GemsError(NOT_CONFIRMED)
        except GemsError as error:
            for point in points:
                self._refuse(point.folder, error)
            return
        # including those without a folder yet
        known = [(label, folder.path) for label, folder in study.points()]
        study.begin([*known, *((point.label, point.folder.path) for point in points)])
        runner = StudyRunner(points, study, points)
        runner.run()
        for point in points:
            folder = point.folder
            if (refusal := runner.refused.get(folder.path)) is not None:
                self._refuse(folder, refusal)
            elif point in runner.waiting:
                self._add(folder, "refused", "the queue is full: call this again", 1)
            else:
                self._note(folder, notes[folder.path], read_status(folder).get("exit_code") or 0)

    def _next_attempt(self, folder: RunFolder) -> tuple[RunSpec, list[str]]:
        """Return the configuration to submit and notes for the user; record the diagnosis.

        Raises:
            GemsError: The run may not be submitted again.
        """
        diagnosis = diagnose_run(folder, with_trace=False)
        if (refusal := self._refusal(diagnosis)) is not None:
            raise GemsError(refusal)
        record_diagnosis(diagnosis)
        return _changed_spec(folder, self.overrides)

    def _refusal(self, diagnosis: Diagnosis) -> str | None:
        """Return the reason not to submit a run again, or None."""
        cause = diagnosis.cause
        if cause in (FailureCause.RUNNING, FailureCause.WAITING) and diagnosis.state != "prepared":
            return f"it is {diagnosis.state}: {diagnosis.text}"
        if cause is FailureCause.FINISHED and not self.is_forced:
            return f"it has finished; {FORCE} runs it again"
        is_fixed = cause is FailureCause.WRONG_MPI and any(
            word.lstrip("+").startswith(CLUSTER) for word in self.overrides
        )
        if cause not in NEEDS_CHANGE or is_fixed or self.is_sure:
            return None
        first = f"it would fail again, first: {'; '.join(diagnosis.advice)}"
        return f"{diagnosis.line()}; {first} ({YES} submits it unchanged)"

    def _note(self, folder: RunFolder, notes: Sequence[str], code: int) -> None:
        """Record the outcome of a run that was started here or submitted."""
        job_id = None
        if not code and job_spec(folder.read_spec()).is_batch:
            job_id = read_status(folder).get("job_id")
        if code:
            why = f"exit code {code}, see `jobs diagnose {folder.path.name}`"
            self._add(folder, "failed", why, code)
        elif job_id is None:
            self._add(folder, "finished", ", ".join(notes))
        else:
            self._add(folder, "submitted", ", ".join([f"job {job_id}", *notes]), job_id=job_id)

    def _refuse(self, folder: RunFolder, error: GemsError) -> None:
        self._add(folder, "refused", str(error), error.exit_code)

    def _add(
        self, folder: RunFolder, outcome: str, why: str, code: int = 0, job_id: str | None = None
    ) -> None:
        """Record and print an outcome: submitted, finished (here), refused or failed."""
        name = folder.path.name
        if not self.as_json:
            print(printable(f"{name}: {outcome}, {why}"), flush=True)
        self.results.append(
            {
                "run": name,
                "run_folder": str(folder.path),
                "outcome": outcome,
                "why": why,
                "exit_code": code,
                "job_id": job_id,
            }
        )


def _changed_spec(folder: RunFolder, overrides: Sequence[str]) -> tuple[RunSpec, list[str]]:
    """Return the configuration to submit and notes for the user.

    Raises:
        ConfigError: Too few nodes are left.
    """
    notes = []
    spec = with_strips_chosen(
        changed(replace(folder.read_own_spec(), runs_dir=str(folder.path.parent)), overrides)
    )
    if job_spec(spec).is_batch:
        blocked = NodeBlocklist(folder.path.parent).blocked(spec.cluster.name)
        exclude = dict.fromkeys([*spec.cluster.exclude, *(entry.node for entry in blocked)])
        spec = changed(spec, [f"cluster.exclude=[{','.join(exclude)}]"])
        _check_nodes_left(job_spec(spec), blocked)
        if exclude:
            notes.append(f"without node{'s' if len(exclude) > 1 else ''} {', '.join(exclude)}")
    step = newest_checkpoint(folder)
    if RunFolder.of(spec) != folder:
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


def _check_nodes_left(job: JobSpec, blocked: Sequence[BlockedNode]) -> None:
    """Raise ConfigError if the excluded nodes leave too few; skip the check without SLURM."""
    cluster = job.cluster
    if not cluster.exclude:
        return
    try:
        available, excluded = scheduler_for(cluster).left_nodes(cluster)
    except SchedulerUnavailableError:
        return
    needed = min([job.nodes, *cluster.smaller_nodes(job.nodes)]) + cluster.spare_nodes
    if excluded and len(available) < needed:
        where = f"partition {cluster.partition}" if cluster.partition else f"cluster {cluster.name}"
        text = (
            f"leaves {len(available)} of the {len(available | excluded)} nodes of {where}, and the run needs"
            f" {needed}"
        )
        listed = next((entry.node for entry in blocked if entry.node in excluded), None)
        advice = (
            "exclude fewer nodes"
            if listed is None
            else f"a node that is sound: jobs diagnose {UNBLOCK} {listed}"
        )
        raise ConfigError("cluster.exclude", ",".join(cluster.exclude), text, advice)

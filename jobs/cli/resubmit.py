"""`python -m jobs resubmit`: runs that have ended go on from their newest checkpoint, without the nodes that failed them."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gems.cli.framework import Options, print_json
from gems.config.compose import changed
from gems.config.schema import RunSpec
from gems.errors import ConfigError, GemsError, one_of
from gems.runs.folder import RunFolder
from gems.utils.tables import printable
from jobs.cli.diagnose import remember
from jobs.cli.submit import start
from jobs.diagnosis.evidence import newest_checkpoint
from jobs.diagnosis.judge import Cause
from jobs.diagnosis.report import Diagnosis, diagnose_run
from jobs.diagnosis.node_blocklist import BadNodes
from jobs.slurm.resources import job_spec
from jobs.status.facts import read_status
from jobs.status.lookup import RUNS_DIR, catalogue
from jobs.status.run_status import conditions

YES, AGAIN = "--yes", "--again"
OVERRIDE = re.compile(r"\+{0,2}(?P<key>[A-Za-z_][\w.]*)=")
# Keys that leave the results of a run as they are, or only make it longer.
MAY_CHANGE = ("cluster.", "train.steps", "train.checkpoint_s", "train.checkpoint_steps", "train.keep_checkpoints",
              "train.hang_timeout_s", "train.resume")  # fmt: skip
NEEDS_CHANGE = (Cause.CONFIGURATION, Cause.DOES_NOT_FIT, Cause.DEVICE_MEMORY, Cause.WRONG_MPI)
SENT, DONE, REFUSED, FAILED = "submitted", "finished", "refused", "failed"
OF_STUDIES = ("failed", "lost", "stopped")


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run: submitted, finished (here), refused or failed."""

    folder: RunFolder
    outcome: str
    why: str
    exit_code: int = 0
    job_id: str | None = None

    def line(self) -> str:
        """Describe the outcome."""
        return printable(f"{self.folder.path.name}: {self.outcome}, {self.why}")

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome for a program."""
        return {
            "run": self.folder.path.name, "run_folder": str(self.folder.path), "outcome": self.outcome, "why": self.why,
            "exit_code": self.exit_code, "job_id": self.job_id,
        }  # fmt: skip


def resubmit(words: Sequence[str], options: Options) -> int:
    """Run `python -m jobs resubmit RUN_OR_STUDY ... [key=value ...]`; of a study all points that have failed.

    Refused are runs that go on, finished ones unless --again, and those whose cause needs a change first unless
    --yes. Gives the worst of the exit codes, 1 for a refusal.

    Raises:
        ConfigError: no such run or study, or a key that would make another run of it.
    """
    overrides = [word for word in words if OVERRIDE.match(word) and not word.startswith(RUNS_DIR)]
    _check_keys(overrides)
    names = [word for word in words if word not in overrides]
    if all(name.startswith(RUNS_DIR) for name in names):
        raise ConfigError(
            "resubmit", "none", "name runs or studies", "python -m jobs resubmit RUN_OR_STUDY [key=value ...]"
        )
    found = catalogue(names, allows_several=False)
    of_studies = [
        seen.folder
        for seen in conditions(
            [folder for study in found.studies for _, folder in study.points() if folder.path.is_dir()]
        ).runs
        if seen.state in OF_STUDIES
    ]
    folders = list({folder.path: folder for folder in (*found.runs, *of_studies)}.values())
    outcomes = []
    for folder in folders:
        outcomes.append(_sent(folder, overrides, options))
        if not options.json:
            print(outcomes[-1].line(), flush=True)
    if options.json:
        print_json({"runs": [outcome.to_dict() for outcome in outcomes]})
    elif not outcomes:
        print("no point has failed")
    return max((outcome.exit_code for outcome in outcomes), default=0)


def excluded(spec: RunSpec, nodes: BadNodes) -> list[str]:
    """Return the nodes that a run shall not use: its own, and those of its cluster that have failed lately."""
    bad = [entry.node for entry in nodes.of_cluster(spec.cluster.name)]
    return list(dict.fromkeys([*spec.cluster.exclude, *bad]))


def _sent(folder: RunFolder, overrides: Sequence[str], options: Options) -> Outcome:
    told = diagnose_run(folder, with_trace=False)
    refusal = _refusal(told, overrides, options)
    if refusal is not None:
        return Outcome(folder, REFUSED, refusal, 1)
    remember(told)
    try:
        spec, notes = _spec(folder, overrides)
        code = start(spec)
    except GemsError as error:
        return Outcome(folder, REFUSED, str(error), error.exit_code)
    made = RunFolder.of(spec)
    if code:
        return Outcome(made, FAILED, f"exit code {code}, see `jobs diagnose {made.path.name}`", code)
    job_id = read_status(made).get("job_id") if job_spec(spec).is_batch else None
    if job_id is not None:
        notes = [f"job {job_id}", *notes]
    return Outcome(made, SENT if job_id is not None else DONE, ", ".join(notes), 0, job_id)


def _refusal(told: Diagnosis, overrides: Sequence[str], options: Options) -> str | None:
    """Report why a run is not sent again; None where it may be."""
    if told.cause in (Cause.RUNNING, Cause.WAITING) and told.state != "prepared":
        return f"it is {told.state}: {told.text}"
    if told.cause is Cause.FINISHED and AGAIN not in options.flags:
        return f"it has finished; {AGAIN} runs it anew"
    is_mended = told.cause is Cause.WRONG_MPI and any(_key(word).startswith("cluster.") for word in overrides)
    if told.cause in NEEDS_CHANGE and not is_mended and YES not in options.flags:
        return f"{told.line()}; it would fail again, first: {'; '.join(told.advice)} ({YES} sends it as it is)"
    return None


def _spec(folder: RunFolder, overrides: Sequence[str]) -> tuple[RunSpec, list[str]]:
    """Return the run to submit, and what is to be said of it.

    Raises:
        ConfigError: a damaged run.yaml, or a value that cannot be.
    """
    notes = []
    spec = changed(replace(folder.read_spec(), runs_dir=str(folder.path.parent)), overrides)
    if job_spec(spec).is_batch:
        exclude = excluded(spec, BadNodes(folder.path.parent))
        spec = changed(spec, [f"cluster.exclude=[{','.join(exclude)}]"])
        if exclude:
            notes.append(f"without node{'s' if len(exclude) > 1 else ''} {', '.join(exclude)}")
    step = newest_checkpoint(folder)
    if RunFolder.of(spec).path != folder.path:
        if step is not None and not any(_key(word) == "train.resume" for word in overrides):
            values = spec.to_dict()
            values["train"]["resume"] = str(folder.path)
            spec = RunSpec.from_dict(values)
        notes.append(f"in {RunFolder.of(spec).path}, for these keys are part of the run")
    return spec, [*notes, "from its start" if step is None else f"from step {step}"]


def _check_keys(overrides: Sequence[str]) -> None:
    for word in overrides:
        key = _key(word)
        if not any(key == name or (name.endswith(".") and key.startswith(name)) for name in MAY_CHANGE):
            raise ConfigError(
                key, word.partition("=")[2], f"would make another run; {one_of(f'{name}KEY' if name.endswith('.') else name for name in MAY_CHANGE)}",
                "submit a new one: python -m jobs submit",
            )  # fmt: skip


def _key(word: str) -> str:
    found = OVERRIDE.match(word)
    return found["key"] if found else ""

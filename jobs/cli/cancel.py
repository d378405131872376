"""Cancelling: SLURM's jobs by one scancel, a run of this machine by its launching process, a study with its points to come."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from gems.cli.framework import Options, print_json
from gems.errors import ConfigError
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import write_json
from gems.utils.process_tree import end_stranger
from gems.utils.tables import printable
from jobs.cli.status import Overview, look
from jobs.slurm.jobs import cancel_jobs
from jobs.status.facts import GOING_ON, lives_here, read_facts
from jobs.status.lookup import RUNS_DIR, Catalogue, catalogue, run_name
from jobs.status.run_status import Condition, conditions
from jobs.status.study_record import StudyRecord, asked_by

YES = "--yes"
GRACE_S = 20.0  # a launching process gives its ranks some seconds, and then writes how they ended
END_LIMIT_S = 60.0
COMMAND_LIMIT_S = 60.0  # a study's command may be in the middle of a submission
LOOK_S = 1.0
CANCELLED, ENDING, LEFT, REFUSED = "cancelled", "ending", "left", "refused"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What became of a run: cancelled, still ending, left as it had ended, or refused."""

    folder: RunFolder
    outcome: str
    why: str

    def line(self) -> str:
        """Describe the outcome."""
        return printable(f"{self.folder.path.name}: {self.outcome}, {self.why}")


def cancel(words: Sequence[str], options: Options) -> int:
    """Run `python -m jobs cancel RUN_OR_STUDY ...`; gives 1 where something was refused or has not ended yet.

    A cancelled study starts no more points: its command looks for the mark before each.

    Raises:
        ConfigError: nothing named, no such run or study, or nobody there to say yes.
    """
    if all(word.startswith(RUNS_DIR) for word in words):
        raise ConfigError("cancel", "none", "name runs or studies", "python -m jobs cancel RUN_OR_STUDY ...")
    found = catalogue(words, allows_several=False)
    seen = look(found)
    if (seen.is_active or any(study.record.runs_here() is None for study in seen.studies)) and not (
        YES in options.flags or _says_yes(seen)
    ):
        print("jobs: nothing is cancelled", file=sys.stderr)
        return 1
    notes = [note for study in found.studies if (note := _stop_study(study))]
    outcomes = _cancel_runs(found)
    if options.json:
        print_json({
            "runs": [
                {"name": one.folder.path.name, "run_folder": str(one.folder.path), "outcome": one.outcome, "why": one.why}
                for one in outcomes
            ],
            "studies": [study.name for study in found.studies], "notes": notes,
        })  # fmt: skip
    else:
        print("\n".join([*(one.line() for one in outcomes), *notes]))
    return 1 if any(one.outcome in (REFUSED, ENDING) for one in outcomes) else 0


def _says_yes(seen: Overview) -> bool:
    """Show what would end, and asks."""
    of_studies = [found for study in seen.studies for _, found in study.points if found is not None]
    active = list({run.folder.path: run for run in (*seen.runs, *of_studies) if run.is_active}.values())
    if not sys.stdin.isatty():
        raise ConfigError("cancel", len(active), "must be confirmed, and nobody is there to ask", f"add {YES}")
    for run in active:
        job = f", job {run.facts.job_id}" if run.facts.job_id else ""
        print(printable(f"jobs: {run.folder.path.name} is {run.state}{job}"), file=sys.stderr)
    for study in seen.studies:
        print(printable(f"jobs: study {study.record.name} starts no more points"), file=sys.stderr)
    print("jobs: cancel? [y/N] ", end="", file=sys.stderr, flush=True)
    return sys.stdin.readline().strip().lower() in ("y", "yes")


def _stop_study(study: StudyRecord) -> str | None:
    """Mark a study as cancelled, and waits until its command starts no more; says so where one cannot know."""
    study.mark_cancelled()
    pause, deadline_s = threading.Event(), time.monotonic() + COMMAND_LIMIT_S
    while study.runs_here() and not _is_running_itself(study):
        if time.monotonic() > deadline_s:
            return f"study {study.name}: its command (process {study.read()['pid']}) stops before its next point"
        pause.wait(LOOK_S / 5)
    if study.runs_here() is None:
        return f"study {study.name}: its command on {study.read().get('host')} stops before its next point"
    return None


def _is_running_itself(study: StudyRecord) -> bool:
    """Return whether the study's own process is the launching one of a point."""
    pid = study.read().get("pid")
    statuses = [read_facts(folder).status for _, folder in study.points() if folder.path.is_dir()]
    return any(status.get("state") == "running" and status.get("pid") == pid for status in statuses)


def _cancel_runs(found: Catalogue) -> list[Outcome]:
    """Cancel what is active, and says what became of each run."""
    seen = conditions(found.folders())
    outcomes: list[Outcome] = []
    jobs: list[Condition] = []
    here: list[Condition] = []
    for run in seen.runs:
        refusal = _refusal(run)
        if not run.is_active:
            outcomes.append(Outcome(run.folder, LEFT, f"it is {run.state}"))
        elif refusal is not None:
            outcomes.append(Outcome(run.folder, REFUSED, refusal))
        elif (trouble := _mark(run.folder)) is not None:
            outcomes.append(Outcome(run.folder, REFUSED, trouble))
        else:
            (jobs if run.facts.job_id is not None else here).append(run)
    trouble = cancel_jobs([run.facts.job_id for run in jobs if run.facts.job_id]) if jobs else None
    outcomes += [_end_here(run) for run in here]
    outcomes += _await_jobs(jobs, trouble)
    return outcomes


def _mark(folder: RunFolder) -> str | None:
    """Leave the mark by which a run that is stopped knows why; says why it cannot."""
    try:
        write_json(folder.cancelled_json, asked_by())
    except OSError as error:
        return f"cannot write to its folder ({error.strerror})"
    return None


def _refusal(run: Condition) -> str | None:
    """Report why an active run cannot be cancelled from here."""
    facts = run.facts
    if facts.job_id is not None:
        ours = run_name(facts.folder.path).strip()
        if run.job_name is not None and run.job_name != ours:
            return f"job {facts.job_id} is called {run.job_name!r}: `scancel {facts.job_id}` if you mean all of it"
        return None
    if "job_id" in facts.status:
        return f"its job_id {facts.status['job_id']!r} is no job's number"
    if facts.state == "prepared":
        return "it was started by hand: end it there"
    if not lives_here(facts.status):
        return f"it runs on {facts.status.get('host')}: call this there"
    if not facts.status.get("pid_started"):
        return f"its status.json does not say when process {facts.status.get('pid')} started"
    return None


def _end_here(run: Condition) -> Outcome:
    """End a run of this machine by its launching process, which ends the ranks and says so in status.json."""
    pid, started = run.facts.status["pid"], str(run.facts.status["pid_started"])
    try:
        has_ended = end_stranger(pid, started, GRACE_S, lambda: run.folder.read_status().get("state") != "running")
    except PermissionError:
        run.folder.cancelled_json.unlink(missing_ok=True)
        return Outcome(run.folder, REFUSED, f"process {pid} belongs to somebody else")
    return _closed(run, f"process {pid}") if has_ended else Outcome(run.folder, ENDING, f"process {pid} is still there")


def _await_jobs(jobs: Sequence[Condition], trouble: str | None) -> list[Outcome]:
    """Wait until SLURM has let go of the jobs, or the runs have said how they ended."""
    pause, deadline_s = threading.Event(), time.monotonic() + END_LIMIT_S
    waiting = {run.folder.path: run for run in jobs}
    outcomes = []
    while waiting:
        seen = conditions([run.folder for run in waiting.values()])
        for now in seen.runs:
            is_unasked = now.state == "submitted" and now.is_guess and trouble is None
            if not now.is_active or is_unasked:
                run = waiting.pop(now.folder.path)
                outcomes.append(_closed(run, f"job {run.facts.job_id}"))
        if trouble is not None or time.monotonic() > deadline_s:
            break
        pause.wait(LOOK_S if waiting else 0)
    for run in waiting.values():
        if trouble is not None:
            run.folder.cancelled_json.unlink(missing_ok=True)
        why = f"job {run.facts.job_id}: {trouble or 'SLURM is at it, and status.json will say so'}"
        outcomes.append(Outcome(run.folder, ENDING if trouble is None else REFUSED, why))
    return outcomes


def _closed(run: Condition, what: str) -> Outcome:
    """Write the end of a run that has not said it itself: its process was killed, or its job never started."""
    status = run.folder.read_status()
    if status.get("state") in GOING_ON or status == run.facts.status:
        more = {key: value for key, value in status.items() if key not in ("state", "updated_utc")}
        run.folder.write_status("cancelled", **{**more, "cause": "cancelled"})
    elif status.get("state") != CANCELLED:
        run.folder.cancelled_json.unlink(missing_ok=True)
        return Outcome(run.folder, LEFT, f"it is {status.get('state')}")
    return Outcome(run.folder, CANCELLED, what)

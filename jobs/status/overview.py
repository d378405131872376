"""The overview of a folder: the status of its runs, and of its studies with their points."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from jobs.status.lookup import Catalogue
from jobs.status.run_status import MISSING, RunStatus, run_statuses
from jobs.status.study_record import StudyRecord


@dataclass(frozen=True, slots=True)
class StudyStatus:
    """The status of a study: its points in order, None for a point without a run folder."""

    record: StudyRecord
    points: tuple[tuple[str, RunStatus | None], ...]

    @property
    def counts(self) -> Counter[str]:
        """The number of points in each state."""
        return Counter(MISSING if run is None else run.state for _, run in self.points)

    @property
    def is_active(self) -> bool:
        """Whether a point waits or runs, or the study's command is alive and will start more."""
        return any(run is not None and run.is_active for _, run in self.points) or bool(self.record.is_running_here())

    @property
    def state(self) -> str:
        """The state of the whole study."""
        counts = self.counts
        if self.is_active:
            return "running"
        if len(counts) == 1:
            return next(iter(counts))
        return next((state for state in ("failed", "lost", "cancelled") if counts[state]), "incomplete")

    def to_dict(self) -> dict[str, Any]:
        """Return the study and its points for a program."""
        rows = [
            {"point": label, **(run.to_dict() if run is not None else {"state": MISSING})} for label, run in self.points
        ]
        return {"name": self.record.name, "state": self.state, "counts": dict(self.counts), "points": rows}


@dataclass(frozen=True, slots=True)
class Overview:
    """The status of runs and studies, and the errors of SLURM's commands."""

    runs: tuple[RunStatus, ...]
    studies: tuple[StudyStatus, ...]
    errors: tuple[str, ...]

    @property
    def is_active(self) -> bool:
        """Whether anything waits or runs."""
        return any(run.is_active for run in self.runs) or any(study.is_active for study in self.studies)

    def all_runs(self) -> tuple[RunStatus, ...]:
        """Return the runs and the points of the studies, each folder once."""
        points = [run for study in self.studies for _, run in study.points if run is not None]
        return tuple({run.folder.path: run for run in (*self.runs, *points)}.values())

    def to_dict(self) -> dict[str, Any]:
        """Return the whole for a program."""
        return {
            "runs": [run.to_dict() for run in self.runs],
            "studies": [study.to_dict() for study in self.studies],
            "not_asked": list(self.errors),
        }


def overview(catalogue: Catalogue) -> Overview:
    """Return the status of the runs and studies of a catalogue, by one query to SLURM for all of them."""
    statuses = run_statuses(catalogue.folders())
    by_path = {run.folder.path: run for run in statuses.runs}
    studies = [
        StudyStatus(study, tuple((label, by_path.get(folder.path)) for label, folder in study.points()))
        for study in catalogue.studies
    ]
    return Overview(tuple(by_path[folder.path] for folder in catalogue.runs), tuple(studies), statuses.errors)

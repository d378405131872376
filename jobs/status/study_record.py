"""Record a study: its points, the command that runs them, and whether it was cancelled.

The record is in the same folder as the study's pictures.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gems.errors import ConfigError
from gems.runs.folder import CANCELLED_JSON, RunFolder
from gems.runs.owner import is_alive_here
from gems.utils.atomic_io import write_json
from gems.utils.process_tree import start_time
from gems.utils.units import now_utc
from jobs.status.run_status import read_or_empty


@dataclass(frozen=True, slots=True)
class StudyRecord:
    """The folder of a study, `runs_dir/<study>/`; the run folders of its points are next to it."""

    path: Path

    @property
    def name(self) -> str:
        """The study's name."""
        return self.path.name

    @property
    def study_json(self) -> Path:
        """The points, and the process that runs them."""
        return self.path / "study.json"

    @property
    def cancelled_json(self) -> Path:
        """Who cancelled the study."""
        return self.path / CANCELLED_JSON

    @property
    def is_cancelled(self) -> bool:
        """Whether the study was cancelled since its command was last called."""
        return self.cancelled_json.exists()

    def begin(self, points: Sequence[tuple[str, Path]]) -> None:
        """Record that this process runs `points`, and remove an earlier cancellation.

        `points` are labels and run folders. Points of earlier calls, which had other overrides,
        stay as long as their folders exist.

        Raises:
            ConfigError: the folder cannot be written.
        """
        now = {path.name: label for label, path in points}
        earlier = {
            folder.path.name: label for label, folder in self.points() if folder.run_yaml.exists()
        }
        rows = [{"point": label, "run_folder": folder} for folder, label in (earlier | now).items()]
        pid = os.getpid()
        process = {"pid": pid, "pid_started": start_time(pid), "host": os.uname().nodename}
        try:
            write_json(self.study_json, {"study": self.name, **process, "points": rows})
            self.cancelled_json.unlink(missing_ok=True)
        except OSError as error:
            raise ConfigError(
                "runs_dir", self.path.parent, f"cannot write there ({error.strerror})"
            ) from error

    def points(self) -> tuple[tuple[str, RunFolder], ...]:
        """Return the labels and run folders of the points, whether or not the folders exist."""
        listed = self.read().get("points")
        found = []
        for row in listed if isinstance(listed, list) else []:
            name = row.get("run_folder") if isinstance(row, dict) else None
            if isinstance(name, str) and name and "/" not in name:
                found.append((str(row.get("point", name)), RunFolder(self.path.parent / name)))
        return tuple(found)

    def read(self) -> dict[str, Any]:
        """Read study.json: the points and the process that runs them.

        A damaged file counts as empty.
        """
        return read_or_empty(self.study_json)

    def is_running_here(self) -> bool | None:
        """Return whether the study's command is alive; None if it was called on another host."""
        record = self.read()
        return is_alive_here(record) if "pid" in record else False

    def mark_cancelled(self) -> None:
        """Ask the study's command to start no more points; it looks before each point.

        Raises:
            ConfigError: the mark cannot be written.
        """
        try:
            write_json(self.cancelled_json, requested_by())
        except OSError as error:
            raise ConfigError(
                "study", self.name, f"cannot write there ({error.strerror})"
            ) from error


def requested_by() -> dict[str, Any]:
    """Return who requests a cancellation, and when."""
    return {"uid": os.getuid(), "host": os.uname().nodename, "utc": now_utc()}

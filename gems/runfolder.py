"""The run folder: what a run leaves, and where. `runs/<name>-<signature>/`."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import yaml

from gems.config import RunSpec
from gems.cutting import profile_used
from gems.errors import ConfigError
from gems.program import check_program, cut_of
from gems.schedule.schedule import Schedule
from gems.schedule.schedule_json import from_json, to_json

OF_ALL_ATTEMPTS = ("run.yaml", "schedule.json", "partition.json", "profile.json", "attempts")
OF_PREPARATION = ("status.json", "provenance.json")


def signature(spec: RunSpec) -> str:
    """Gives 8 hexadecimal digits of the whole resolved configuration, but for the folders of runs and of the cache."""
    values = {key: value for key, value in spec.to_dict().items() if key not in ("runs_dir", "cache_dir")}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @classmethod
    def of(cls, spec: RunSpec) -> RunFolder:
        """Gives the folder of a resolved run, whether or not it is there."""
        return cls(Path(spec.runs_dir).resolve() / f"{spec.name}-{signature(spec)}")

    @property
    def run_yaml(self) -> Path:
        """The resolved configuration that every rank reads."""
        return self.path / "run.yaml"

    @property
    def schedule_json(self) -> Path:
        """The lowered schedule that every rank reads: the one list that was validated."""
        return self.path / "schedule.json"

    @property
    def partition_json(self) -> Path:
        """Where the model is cut, for every rank to read."""
        return self.path / "partition.json"

    @property
    def profile_json(self) -> Path:
        """The profile that the cut stands on; there is none where the cut needs none."""
        return self.path / "profile.json"

    @property
    def status_json(self) -> Path:
        """The run's state, written by the launcher."""
        return self.path / "status.json"

    @property
    def result_json(self) -> Path:
        """What rank 0 knew at the end."""
        return self.path / "result.json"

    @property
    def provenance_json(self) -> Path:
        """Which code made the run."""
        return self.path / "provenance.json"

    @property
    def trace_h5(self) -> Path:
        """The merged trace."""
        return self.path / "trace.h5"

    @property
    def logs(self) -> Path:
        """Folder of the ranks' output."""
        return self.path / "logs"

    @property
    def checkpoint(self) -> Path:
        """Folder of the weights at the end."""
        return self.path / "checkpoint"

    def heartbeat(self, rank: int) -> Path:
        """File in which a rank marks the action that it is in."""
        return self.path / "heartbeat" / f"rank{rank:04d}"

    def failed_json(self, rank: int) -> Path:
        """What a failing rank leaves."""
        return self.path / f"FAILED.rank{rank:04d}.json"

    def read_spec(self) -> RunSpec:
        """Reads run.yaml.

        Raises:
            ConfigError: there is none, or it is not a run's configuration.
        """
        try:
            values = yaml.safe_load(self.run_yaml.read_text())
        except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
            raise ConfigError(
                "run folder", self.path, f"holds no readable run.yaml ({error})", "prepare it first"
            ) from error
        if not isinstance(values, dict):
            raise ConfigError("run folder", self.path, "its run.yaml is not a configuration")
        return RunSpec.from_dict(values)

    def read_schedule(self) -> Schedule:
        """Reads schedule.json.

        Raises:
            ConfigError: there is none, or it is not a schedule.
        """
        try:
            return from_json(json.loads(self.schedule_json.read_text()))
        except (OSError, ValueError) as error:
            raise ConfigError(
                "run folder", self.path, f"holds no readable schedule.json ({error})", "prepare it first"
            ) from error

    def write_schedule(self, schedule: Schedule) -> None:
        """Writes schedule.json."""
        write_json(self.schedule_json, to_json(schedule), indent=None)

    def read_boundaries(self) -> tuple[int, ...]:
        """Reads where the model is cut from partition.json; nothing for a run on paper.

        Raises:
            ConfigError: there is none, or it holds no boundaries.
        """
        try:
            return tuple(int(cut) for cut in json.loads(self.partition_json.read_text())["boundaries"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise ConfigError(
                "run folder", self.path, f"holds no readable partition.json ({error})", "prepare it first"
            ) from error

    def write_boundaries(self, boundaries: tuple[int, ...]) -> None:
        """Writes partition.json."""
        write_json(self.partition_json, {"boundaries": list(boundaries)}, indent=None)

    def archive(self, keep: Collection[str] = (), also: Iterable[Path] = ()) -> None:
        """Moves what an earlier attempt left to attempts/<number>/, so that nothing recorded is lost.

        Entries named in `keep` stay; files in `also` go with the rest. A folder that was only prepared stays as it is.
        """
        left = [entry for entry in self.path.iterdir() if entry.name not in (*OF_ALL_ATTEMPTS, *keep)]
        left += [path for path in also if path.exists()]
        if not any(_is_record(entry) for entry in left):
            return
        attempts = self.path / "attempts"
        attempts.mkdir(exist_ok=True)
        numbers = [int(entry.name) for entry in attempts.iterdir() if entry.name.isdecimal()]
        target = attempts / f"{1 + max(numbers, default=0):03d}"
        target.mkdir()
        for entry in left:
            entry.rename(target / entry.name)

    def write_status(self, state: str, **more: Any) -> None:
        """Writes status.json at once and whole: state is prepared, submitted, running, finished or failed."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(self.status_json, {"state": state, "updated_utc": now, **more})

    def read_status(self) -> dict[str, Any]:
        """Reads status.json, or nothing where there is none.

        Raises:
            ConfigError: it is no JSON.
        """
        try:
            return read_json(self.status_json)
        except ValueError as error:
            raise ConfigError(
                "run folder", self.path, f"its status.json is damaged ({error})", "move that folder away"
            ) from error


def _is_record(entry: Path) -> bool:
    """Tells whether a run, not its preparation alone, has left `entry`."""
    return entry.name not in OF_PREPARATION and (entry.is_file() or any(entry.iterdir()))


def write_json(path: Path, document: dict[str, Any], indent: int | None = 1) -> None:
    """Writes a JSON file that appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    partial.write_text(json.dumps(document, indent=indent) + "\n")
    partial.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object, or gives an empty one where the file is missing."""
    try:
        document = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    return document if isinstance(document, dict) else {}


def provenance() -> dict[str, Any]:
    """Gives the commit of this code, with "-dirty" where files differ from it; "unknown" outside of a checkout."""
    here = Path(__file__).resolve().parent.parent
    words = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        said = subprocess.run(words, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return {"git_commit": "unknown"}
    return {"git_commit": said.stdout.strip() or "unknown"}


def prepare(spec: RunSpec) -> RunFolder:
    """Makes the folder of a resolved run and writes run.yaml, schedule.json and partition.json.

    A folder that already holds this configuration is used again: what the earlier attempt left moves to
    attempts/<number>/, so nothing recorded is lost.

    Raises:
        ConfigError: no permission, another configuration in the folder, a run that is still going on there, or a
            schedule that cannot be made or does not suit the model.
    """
    folder = RunFolder.of(spec)
    schedule = check_program(spec)
    boundaries, profile = cut_of(spec, schedule), profile_used(spec, schedule)
    try:
        folder.path.mkdir(parents=True, exist_ok=True)
        if folder.run_yaml.exists():
            _check_same(folder, spec)
            _refuse_running(folder)
            folder.archive()
        partial = folder.path / "run.yaml.partial"
        partial.write_text(yaml.safe_dump(spec.to_dict(), sort_keys=False))
        partial.replace(folder.run_yaml)
        folder.write_schedule(schedule)
        folder.write_boundaries(boundaries)
        if profile is not None:
            write_json(folder.profile_json, profile.to_json(), indent=None)
        folder.logs.mkdir(exist_ok=True)
        folder.heartbeat(0).parent.mkdir(exist_ok=True)
        write_json(folder.provenance_json, provenance())
        folder.write_status("prepared")
    except OSError as error:
        raise ConfigError(
            "runs_dir",
            spec.runs_dir,
            f"cannot write there ({error.strerror}: {error.filename})",
            "give runs_dir= a folder of yours",
        ) from error
    return folder


def _check_same(folder: RunFolder, spec: RunSpec) -> None:
    held = folder.read_spec()
    if signature(held) != signature(spec):
        raise ConfigError(
            "run folder", folder.path, f"holds another configuration ({signature(held)}, not {signature(spec)})",
            "choose another name= or runs_dir=, or move that folder away",
        )  # fmt: skip


def _refuse_running(folder: RunFolder) -> None:
    status = folder.read_status()
    if status.get("state") == "submitted":
        raise ConfigError(
            "run folder",
            folder.path,
            f"is that of job {status.get('job_id')}, which has not ended",
            "cancel it, or change name=",
        )
    pid = status.get("pid")
    if status.get("state") == "running" and status.get("host") == os.uname().nodename and _alive(pid):
        raise ConfigError(
            "run folder", folder.path, f"a run goes on there (process {pid})", "wait for it, or change name="
        )


def _alive(pid: object) -> bool:
    return isinstance(pid, int) and Path(f"/proc/{pid}").exists() and pid != os.getpid()

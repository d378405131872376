"""The run folder: what a run leaves, and where. `runs/<name>-<signature>/`."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from glob import escape
from pathlib import Path
from typing import Any

import yaml

from gems.config.run_id import run_id
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.memory.plan import MemoryPlan
from gems.runs.code_archive import CODE_ZIP
from gems.schedule.formats.schedule_json import from_json, to_json
from gems.schedule.schedule import Schedule
from gems.utils.atomic_io import read_json, write_json
from gems.utils.registry import load_plugins

OF_ALL_ATTEMPTS = (
    "run.yaml", "costs.json", "schedule.json", "partition.json", "profile.json", "memory.json", "attempts",
    "checkpoints",
)  # fmt: skip
CANCELLED_JSON = "cancelled.json"
OF_PREPARATION = ("status.json", "provenance.json", "provenance")


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run."""

    path: Path

    @classmethod
    def of(cls, spec: RunSpec) -> RunFolder:
        """Return the folder of a resolved run, whether or not it is there."""
        return cls(Path(spec.runs_dir).resolve() / f"{spec.name}-{run_id(spec)}")

    @property
    def run_yaml(self) -> Path:
        """The resolved configuration that every rank reads."""
        return self.path / "run.yaml"

    @property
    def costs_json(self) -> Path:
        """The costs of the run's profile, for cost=profile; there is none if the costs are those of run.yaml."""
        return self.path / "costs.json"

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
    def memory_json(self) -> Path:
        """What becomes of activations, stage by stage; there is none where they are kept."""
        return self.path / "memory.json"

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
    def provenance(self) -> Path:
        """Folder of all that is known of how the run was made; provenance.json is its summary."""
        return self.path / "provenance"

    @property
    def code_zip(self) -> Path:
        """The code as it was when the run was prepared, which a job runs from."""
        return self.provenance / CODE_ZIP

    @property
    def job_sh(self) -> Path:
        """The batch script as it was submitted."""
        return self.provenance / "job.sh"

    @property
    def slurm_json(self) -> Path:
        """SLURM's own record of the job, at each start and end."""
        return self.provenance / "slurm.json"

    @property
    def affinity_json(self) -> Path:
        """Where each rank runs, on which cores and which GPU."""
        return self.provenance / "affinity.json"

    @property
    def progress_json(self) -> Path:
        """How far the steps are, while they go on."""
        return self.path / "progress.json"

    @property
    def cancelled_json(self) -> Path:
        """Who wanted an end of the run, and when; there is none where nobody did."""
        return self.path / CANCELLED_JSON

    @property
    def stop_json(self) -> Path:
        """Who wants the run to save and stop at the end of a step, and why; there is none where nobody does."""
        return self.path / "stop.json"

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

    @property
    def checkpoints(self) -> Path:
        """Folder of the whole states, to go on from after a stop or a failure: one folder for each step."""
        return self.path / "checkpoints"

    @property
    def stopped_json(self) -> Path:
        """Before which step the ranks stopped on request, and why; there is none where they did not."""
        return self.path / "stopped.json"

    @property
    def attempt(self) -> int:
        """The number of the attempt that runs now, from 1: one more than there are archived ones."""
        return 1 + len(list((self.path / "attempts").glob("*/")))

    def heartbeat(self, rank: int) -> Path:
        """File in which a rank marks the action that it is in."""
        return self.path / "heartbeat" / f"rank{rank:04d}"

    def failed_json(self, rank: int) -> Path:
        """Return the path of the file that a failing rank leaves."""
        return self.path / f"FAILED.rank{rank:04d}.json"

    @property
    def stalled_json(self) -> Path:
        """The stall that a rank found; there is none while ranks move."""
        return self.path / "STALLED.json"

    def stacks(self, rank: int) -> Path:
        """Where a rank's Python stacks go when ranks have stalled, or when somebody asks for them by SIGUSR1."""
        return self.path / "stacks" / f"rank{rank:04d}.txt"

    def read_spec(self) -> RunSpec:
        """Read run.yaml, and import the plugins of the run.

        Raises:
            ConfigError: there is none, it is not a run's configuration, or a plugin cannot be imported.
        """
        try:
            values = yaml.safe_load(self.run_yaml.read_text())
        except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(
                "run folder", self.path, f"holds no readable run.yaml ({error})", "prepare it first"
            ) from error
        if not isinstance(values, dict):
            raise ConfigError("run folder", self.path, "its run.yaml is not a configuration")
        spec = RunSpec.from_dict(values)
        load_plugins(spec.plugins, spec.plugins_dir)
        return spec

    def read_run(self) -> RunSpec:
        """Read run.yaml with the costs of the run's profile in place of its own: what is emulated and simulated.

        Raises:
            ConfigError: as `read_spec`, or a damaged costs.json.
        """
        spec = self.read_spec()
        try:
            costs = read_json(self.costs_json)
        except ValueError as error:
            raise ConfigError(
                "run folder", self.path, f"its costs.json is damaged ({error})", "prepare it again"
            ) from error
        return RunSpec.from_dict(spec.to_dict() | {"cost": costs}) if costs else spec

    def traced_yaml(self) -> str:
        """Return run.yaml for the trace, with the costs that the run was emulated or simulated with."""
        if not self.costs_json.exists():
            return self.run_yaml.read_text()
        return yaml.safe_dump(self.read_run().to_dict(), sort_keys=False)

    def read_schedule(self) -> Schedule:
        """Read schedule.json.

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
        """Write schedule.json."""
        write_json(self.schedule_json, to_json(schedule), indent=None)

    def read_boundaries(self) -> tuple[int, ...]:
        """Read where the model is cut from partition.json; nothing for a run on paper.

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
        """Write partition.json."""
        write_json(self.partition_json, {"boundaries": list(boundaries)}, indent=None)

    def read_memory_plan(self) -> MemoryPlan | None:
        """Read memory.json; None where there is none, since activations are kept then.

        Raises:
            ConfigError: it holds no plan.
        """
        try:
            document = read_json(self.memory_json)
        except ValueError as error:
            raise ConfigError(
                "run folder", self.path, f"its memory.json is damaged ({error})", "prepare it again"
            ) from error
        return MemoryPlan.from_json(document) if document else None

    def archive(self, keep: Collection[str] = (), also: Iterable[Path] = ()) -> None:
        """Move what an earlier attempt left to attempts/<number>/, so that nothing recorded is lost.

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
        """Write status.json at once and whole; `jobs.status.run_status` words the states."""
        now = datetime.now(UTC).isoformat(timespec="seconds")
        write_json(self.status_json, {"state": state, "updated_utc": now, **more})

    def read_status(self) -> dict[str, Any]:
        """Read status.json, or nothing where there is none.

        Raises:
            ConfigError: it is no JSON.
        """
        try:
            return read_json(self.status_json)
        except ValueError as error:
            raise ConfigError(
                "run folder", self.path, f"its status.json is damaged ({error})", "move that folder away"
            ) from error


def older_folders(spec: RunSpec) -> list[Path]:
    """Return the folders beside a resolved run's own that hold the same configuration: earlier versions' IDs differ."""
    own, found = RunFolder.of(spec).path, []
    for path in sorted(own.parent.glob(f"{escape(spec.name)}-{'[0-9a-f]' * 8}")):
        try:
            if path != own and run_id(RunFolder(path).read_spec()) == run_id(spec):
                found.append(path)
        except ConfigError:  # what is no run, or cannot be read, is no older folder
            continue
    return found


def _is_record(entry: Path) -> bool:
    """Return whether a run, not its preparation alone, has left `entry`."""
    return entry.name not in OF_PREPARATION and (entry.is_file() or any(entry.iterdir()))

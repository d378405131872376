"""The run folder `runs/<name>-<run id>/`: the files of a run and their paths."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from typing import Any

import yaml

from gems.config.resolve import run_id
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.memory.plan import MemoryPlan
from gems.plan.rank_plan import RankPlan
from gems.runs.code_archive import CODE_ZIP
from gems.schedule.formats.schedule_json import from_json, to_json
from gems.schedule.schedule import Schedule
from gems.utils.atomic_io import RESERVE, read_json, read_yaml, write_json
from gems.utils.registry import load_plugins
from gems.utils.units import now_utc

OF_ALL_ATTEMPTS = (
    "run.yaml",
    "costs.json",
    "schedule.json",
    "partition.json",
    "profile.json",
    "memory.json",
    "attempts",
    "owners",
    "checkpoints",
    "metrics.csv",
    "tensorboard",
    "wandb",
    "best",
    "best.json",
    RESERVE,
    "layouts",
    "layouts.json",
)
CANCELLED_JSON = "cancelled.json"
DUMPER: Any = getattr(yaml, "CSafeDumper", yaml.SafeDumper)
OF_PREPARATION = ("status.json", "provenance.json", "provenance")


class _Entry:
    """A path below the folder of a run."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.path / self.name


class _PlanEntry(_Entry):
    """A file of the plan that the ranks run, which is the plan of the present layout."""

    def __get__(self, folder: RunFolder, owner: type[RunFolder]) -> Path:
        return folder.layout.path / self.name


@dataclass(frozen=True, slots=True)
class RunFolder:
    """The paths of one run.

    At first a run has the layout that its user chose, and the plan is in the folder itself. If the
    run continues with other ranks, the configuration and the plan of the present layout are in
    `layouts/<number>/`, and layouts.json lists the layouts so far, when they began and why.
    run.yaml always holds the user's configuration.
    """

    path: Path

    run_yaml = _Entry("run.yaml")  # the resolved configuration as the user gave it
    # the layouts after the run's own, the present one last
    layouts_json = _Entry("layouts.json")
    # costs from the run's profile, with cost=profile or a search over its stages
    costs_json = _PlanEntry("costs.json")
    # the lowered and validated schedule, which every rank runs
    schedule_json = _PlanEntry("schedule.json")
    # the cuts of the model, and the predicted peaks of the ranks
    partition_json = _PlanEntry("partition.json")
    profile_json = _PlanEntry("profile.json")  # the partition's profile, if it needed one
    memory_json = _PlanEntry("memory.json")  # the memory plan, unless activations are kept
    status_json = _Entry("status.json")  # the run's state, written by the launcher
    progress_json = _Entry("progress.json")  # the current step of the ranks
    result_json = _Entry("result.json")  # the results that rank 0 reported at the end
    provenance_json = _Entry("provenance.json")  # summary of the folder `provenance`
    provenance = _Entry("provenance")  # code, packages and environment
    # the code at preparation time, which a job runs
    code_zip = _Entry(f"provenance/{CODE_ZIP}")
    job_sh = _Entry("provenance/job.sh")  # the batch script as submitted
    slurm_json = _Entry("provenance/slurm.json")  # SLURM's job record, at each start and end
    affinity_json = _Entry("provenance/affinity.json")  # cores and GPU of each rank
    cancelled_json = _Entry(CANCELLED_JSON)  # who cancelled the run, and when
    # who asked the run to save and stop at the end of a step, and why
    stop_json = _Entry("stop.json")
    stopped_json = _Entry("stopped.json")  # the step before which the ranks stopped, and why
    stalled_json = _Entry("STALLED.json")  # the hang that a rank detected
    trace_h5 = _Entry("trace.h5")  # the merged trace
    logs = _Entry("logs")  # the ranks' output
    # loss and other figures of each step, over all attempts
    metrics_csv = _Entry("metrics.csv")
    # images, masks and predicted classes of some validation samples
    predictions_png = _Entry("predictions.png")
    checkpoint = _Entry("checkpoint")  # the weights at the end
    # the weights averaged over the steps with train.ema_decay
    average = _Entry("checkpoint/average")
    best = _Entry("best")  # the weights of the best validation, in a folder that best.json names
    best_json = _Entry("best.json")
    checkpoints = _Entry("checkpoints")  # complete states to resume from, one folder per step

    @classmethod
    def of(cls, spec: RunSpec) -> RunFolder:
        """Return the folder of a resolved run, whether or not it exists."""
        return cls(Path(spec.runs_dir).resolve() / f"{spec.name}-{run_id(spec)}")

    def best_weights(self) -> Path | None:
        """Return the folder of the weights of the best validation, or None if none were saved."""
        step = self._read_optional(self.best_json).get("step")
        return None if step is None else self.best / f"step{step:08d}"

    def layouts(self) -> list[dict[str, Any]]:
        """Read the layouts that followed the run's own.

        Each row has the number, the nodes, the ranks, the time, the step and the reason.
        """
        rows = self._read_optional(self.layouts_json).get("layouts", [])
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    def add_layout(
        self, number: int, layout: str, nodes: int | None, why: str, by: str, **more: Any
    ) -> None:
        """Record a layout, described by `layout`, as the present one; number 1 is the run's own.

        The files of the layout must already exist.
        """
        row = {
            "number": number,
            "utc": now_utc(),
            "by": by,
            "why": why,
            "from": self.read_spec().layout,
            "to": layout,
            "nodes": nodes,
            **more,
        }
        write_json(self.layouts_json, {"layouts": [*self.layouts(), row]})

    @property
    def layout_number(self) -> int:
        """The number of the present layout; 1 is the run's own."""
        rows = self.layouts()
        return int(rows[-1].get("number", 1)) if rows else 1

    @property
    def layout(self) -> RunFolder:
        """The folder with the configuration and plan of the present layout.

        It is this folder unless the run has continued with another layout.
        """
        number = self.layout_number
        return self if number == 1 else RunFolder(self.path / "layouts" / f"{number:04d}")

    def run_id(self, spec: RunSpec) -> str:
        """Return the ID of the run's own configuration; `spec` is the one that the ranks run."""
        return run_id(self.read_own_spec() if self.layouts() else spec)

    @property
    def attempt(self) -> int:
        """The number of the current attempt, from 1: one more than the archived attempts."""
        return 1 + len(list((self.path / "attempts").glob("*/")))

    def heartbeat(self, rank: int) -> Path:
        """Return the file in which a rank marks its current action."""
        return self.path / "heartbeat" / f"rank{rank:04d}"

    def failed_json(self, rank: int) -> Path:
        """Return the file that a rank writes when it fails."""
        return self.path / f"FAILED.rank{rank:04d}.json"

    def stacks(self, rank: int) -> Path:
        """Return the file of a rank's Python stacks, written after a hang or on SIGUSR1."""
        return self.path / "stacks" / f"rank{rank:04d}.txt"

    def read_spec(self) -> RunSpec:
        """Read the configuration of the present layout, which the ranks run; import its plugins.

        Raises:
            ConfigError: The file is missing or is not the configuration of a run, or a plugin
                cannot be imported.
        """
        return self.layout.read_own_spec()

    def read_own_spec(self) -> RunSpec:
        """Read run.yaml: the user's configuration, which identifies the run.

        Raises:
            ConfigError: As in `read_spec`.
        """
        with self._refusing(self.run_yaml):
            values = read_yaml(self.run_yaml.read_text())
        if not isinstance(values, dict):
            raise ConfigError("run folder", self.path, "its run.yaml is not a configuration")
        spec = RunSpec.from_dict(values)
        load_plugins(spec.plugins, spec.plugins_dir)
        return spec

    def read_run(self) -> RunSpec:
        """Read the configuration with the costs of the run's profile, for emulation and simulation.

        Raises:
            ConfigError: As in `read_spec`, or costs.json is damaged.
        """
        spec = self.read_spec()
        costs = self._read_optional(self.costs_json)
        return RunSpec.from_dict(spec.to_dict() | {"cost": costs}) if costs else spec

    def traced_yaml(self) -> str:
        """Return the configuration for the trace, with the costs of the emulation or simulation."""
        if not self.costs_json.exists():
            return self.layout.run_yaml.read_text()
        return to_yaml(self.read_run().to_dict())

    def read_schedule(self) -> Schedule:
        """Read schedule.json.

        Raises:
            ConfigError: The file is missing or does not contain a schedule.
        """
        with self._refusing(self.schedule_json):
            return from_json(json.loads(self.schedule_json.read_text()))

    def write_schedule(self, schedule: Schedule) -> None:
        """Write schedule.json."""
        write_json(self.schedule_json, to_json(schedule), indent=None)

    def read_boundaries(self) -> tuple[int, ...]:
        """Read the cuts of the model from partition.json; empty for an emulated or simulated run.

        Raises:
            ConfigError: The file is missing or does not contain boundaries.
        """
        with self._refusing(self.partition_json):
            return tuple(
                int(cut) for cut in json.loads(self.partition_json.read_text())["boundaries"]
            )

    def write_boundaries(
        self, boundaries: tuple[int, ...], peak_bytes: tuple[int, ...] | None = None
    ) -> None:
        """Write partition.json, with the predicted peak bytes of each rank if they are known."""
        write_json(
            self.partition_json,
            {"boundaries": list(boundaries), "predicted_peak_bytes": peak_bytes},
            indent=None,
        )

    def predicted_peak_bytes(self, rank: int) -> int | None:
        """Return the peak bytes that partition.json predicts for a rank of any replica.

        Return None if it predicts none.
        """
        peaks = self._read_optional(self.partition_json).get("predicted_peak_bytes")
        return int(peaks[rank % len(peaks)]) if peaks else None

    def read_memory_plan(self) -> MemoryPlan | None:
        """Read memory.json, or return None if activations are kept.

        Raises:
            ConfigError: The file does not contain a plan.
        """
        document = self._read_optional(self.memory_json)
        return MemoryPlan.from_json(document) if document else None

    def read_plan(self) -> RankPlan:
        """Read the part of the plan that ranks need.

        Raises:
            ConfigError: A file is missing or damaged.
        """
        return RankPlan(
            self.read_spec(), self.read_schedule(), self.read_boundaries(), self.read_memory_plan()
        )

    def read_status(self) -> dict[str, Any]:
        """Read status.json; empty if it is missing.

        Raises:
            ConfigError: The file is not valid JSON.
        """
        return self._read_optional(self.status_json, "move that folder away")

    def write_status(self, state: str, **more: Any) -> None:
        """Write status.json; `jobs.status.run_status` describes the states."""
        write_json(self.status_json, {"state": state, "updated_utc": now_utc(), **more})

    def change_status(
        self, status: Mapping[str, Any], state: str, without: Collection[str] = (), **more: Any
    ) -> None:
        """Write status.json with a new state, `more`, and the fields of `status` not in `without`."""
        removed = ("state", "updated_utc", *without)
        fields = {key: value for key, value in status.items() if key not in removed}
        self.write_status(state, **{**fields, **more})

    def archive(self, keep: Collection[str] = (), also: Iterable[Path] = ()) -> None:
        """Move the files of an earlier attempt to attempts/<number>/, so that no record is lost.

        Entries named in `keep` stay. Files in `also` move with the rest. A folder that was only
        prepared stays as it is.
        """
        entries = [
            entry for entry in self.path.iterdir() if entry.name not in (*OF_ALL_ATTEMPTS, *keep)
        ]
        entries += [path for path in also if path.exists()]
        if not any(
            entry.name not in OF_PREPARATION and (entry.is_file() or any(entry.iterdir()))
            for entry in entries
        ):
            return
        attempts = self.path / "attempts"
        attempts.mkdir(exist_ok=True)
        numbers = [int(entry.name) for entry in attempts.iterdir() if entry.name.isdecimal()]
        target = attempts / f"{1 + max(numbers, default=0):03d}"
        target.mkdir()
        for entry in entries:
            entry.rename(target / entry.name)

    @contextlib.contextmanager
    def _refusing(self, path: Path) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, KeyError, TypeError, RecursionError, yaml.YAMLError) as error:
            raise ConfigError(
                "run folder",
                self.path,
                f"holds no readable {path.name} ({error})",
                "prepare it first",
            ) from error

    def _read_optional(self, path: Path, advice: str = "prepare it again") -> dict[str, Any]:
        try:
            return read_json(path)
        except ValueError as error:
            raise ConfigError(
                "run folder", self.path, f"its {path.name} is damaged ({error})", advice
            ) from error


def describe_change(row: Mapping[str, Any]) -> str:
    """Describe a row of layouts.json in one line: both layouts, step, time, author and reason."""
    step = "its start" if row.get("step") is None else f"step {row['step']}"
    shapes = f"{row.get('from')} became {row.get('to')} from {step}"
    return f"{shapes} ({row.get('utc')}, {row.get('by')}: {row.get('why')})"


def to_yaml(values: dict[str, Any]) -> str:
    """Return the text of a run's run.yaml."""
    return str(yaml.dump(values, Dumper=DUMPER, sort_keys=False))


def older_folders(own: Path) -> list[Path]:
    """Return other folders of the same configuration, to which earlier versions gave other IDs."""
    others = []
    for path in sorted(own.parent.glob(f"{escape(own.name[:-8])}{'[0-9a-f]' * 8}")):
        with contextlib.suppress(ConfigError, OSError):  # not a run, or an unreadable one
            if (
                path != own
                and _run_id_at(path, (path / "run.yaml").stat().st_mtime_ns) == own.name[-8:]
            ):
                others.append(path)
    return others


@functools.cache  # each point of a study looks at all the others
def _run_id_at(path: Path, mtime_ns: int) -> str:
    return run_id(RunFolder(path).read_own_spec())

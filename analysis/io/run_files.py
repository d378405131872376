"""What the files of a run folder tell about its run, for a trace that is joined from the ranks' parts."""

from __future__ import annotations

from gems.errors import ConfigError
from gems.profile import ModelProfile
from gems.runs.folder import RunFolder
from gems.trace import LayerTimes, Trace
from gems.utils.atomic_io import read_json


def add_run_files(trace: Trace, folder: RunFolder) -> list[str]:
    """Return a trace the commit, the list, the cut, the memory plan and the layers' times that its run was prepared with.

    What has no file stays as it was; a damaged file is named in the notes that are given back.
    """
    notes = []
    for path, add in (
        (folder.provenance_json, _add_commit), (folder.schedule_json, _add_schedule), (folder.partition_json, _add_boundaries),
        (folder.memory_json, _add_memory_plan), (folder.profile_json, _add_layer_times),
    ):  # fmt: skip
        if not path.exists():
            continue
        try:
            add(trace, folder)
        except (ConfigError, ValueError) as error:
            notes.append(f"left out {path.name}: not readable ({' '.join(str(error).split())})")
    return notes


def _add_commit(trace: Trace, folder: RunFolder) -> None:
    trace.attributes["git_commit"] = read_json(folder.provenance_json).get("git_commit", "unknown")


def _add_schedule(trace: Trace, folder: RunFolder) -> None:
    schedule = folder.read_schedule()
    trace.schedule_rows = tuple(" ".join(map(str, row)) for row in schedule.rows)
    trace.schedule_sha256 = schedule.digest()


def _add_boundaries(trace: Trace, folder: RunFolder) -> None:
    trace.boundaries = folder.read_boundaries()


def _add_memory_plan(trace: Trace, folder: RunFolder) -> None:
    if folder.read_memory_plan() is None:
        raise ValueError("holds no plan")
    trace.memory_plan = folder.memory_json.read_text()


def _add_layer_times(trace: Trace, folder: RunFolder) -> None:
    profile = ModelProfile.from_json(read_json(folder.profile_json), folder.profile_json)
    columns = (
        tuple(float(getattr(layer, name)) for layer in profile.layers)
        for name in ("forward_s", "input_grad_s", "weight_grad_s")
    )
    trace.layer_times = LayerTimes(profile.source, *columns)

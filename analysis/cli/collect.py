"""Collection: the parts of a run's ranks become one trace, two pictures and a table."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from analysis.io.load import Loaded, load_parts, load_trace
from analysis.metrics.run_metrics import Metrics, run_metrics
from analysis.plots.memory_curve import draw_memory
from analysis.plots.timeline import draw_timeline
from gems.config.schema import RunSpec
from gems.profile import ModelProfile
from gems.profile.hdf5 import add_to_trace
from gems.runs.folder import RunFolder
from gems.trace import write_trace
from gems.utils.atomic_io import read_json

RESULTS = (
    "validation_accuracy", "validation_majority", "validation_loss", "num_validation", "peak_activation_bytes",
    "predicted_activation_bytes",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Collected:
    """A run's merged trace with its figures, and the files that were written."""

    loaded: Loaded
    metrics: Metrics
    files: dict[str, str]


def collect(path: Path) -> Collected:
    """Merge the parts in a run folder into trace.h5 and draw timeline.png and memory.png.

    A simulated run has no parts, and its trace.h5 is complete from the start. Of a run that was stopped, the steps that
    every rank finished are drawn; without one there is no picture, but the trace is written.

    Raises:
        ConfigError: no run folder, or none of its parts is readable.
    """
    folder = RunFolder(path)
    spec = folder.read_spec()
    is_simulated = spec.machine.kind == "simulated"
    loaded = load_trace(folder.trace_h5) if is_simulated else _merged(folder, spec)
    trace = loaded.trace
    files = {"trace": str(folder.trace_h5)}
    if len(trace.steps):
        timeline, memory = path / "timeline.png", path / "memory.png"
        draw_timeline(trace, timeline)
        draw_memory(trace, memory)
        files |= {"timeline": str(timeline), "memory": str(memory)}
    if folder.checkpoint.is_dir():
        files["checkpoint"] = str(folder.checkpoint)
    return Collected(loaded, run_metrics(trace), files)


def _merged(folder: RunFolder, spec: RunSpec) -> Loaded:
    """Join the parts, add rank 0's results, and write the trace."""
    loaded = load_parts(folder.path)
    trace, result = loaded.trace, read_json(folder.result_json)
    trace.attributes |= {name: result[name] for name in RESULTS if name in result}
    if "schedule_rows" in result:
        trace.schedule_rows = tuple(result["schedule_rows"])
        trace.schedule_sha256 = str(result.get("schedule_sha256", ""))
    write_trace(folder.trace_h5, trace)
    if trace.layer_times is not None:
        profile = read_json(folder.profile_json)
        add_to_trace(folder.trace_h5, ModelProfile.from_json(profile, folder.profile_json))
    return loaded

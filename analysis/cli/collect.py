"""Collection: the parts of a run's ranks become one trace, its pictures and a table."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from analysis.io.load import Loaded, load_parts, load_trace
from analysis.metrics.run_metrics import Metrics, run_metrics
from analysis.plots.figure import save_figure
from analysis.plots.learning_curve import learning_figure
from analysis.plots.memory_curve import memory_figure
from analysis.plots.timeline import timeline_figure
from gems.profile import ModelProfile
from gems.profile.hdf5 import add_to_trace
from gems.runs.folder import RunFolder
from gems.trace import write_trace
from gems.utils.atomic_io import read_json

LEARNING_PNG = "learning_curve.png"
RESULTS = (
    "validation_accuracy",
    "validation_majority",
    "validation_loss",
    "validation_dice",
    "validation_dice_constant",
    "validation_mean_absolute_error",
    "validation_mean_absolute_error_constant",
    "num_validation",
    "peak_activation_bytes",
    "predicted_activation_bytes",
)


def collect(path: Path) -> tuple[Loaded, Metrics, dict[str, str]]:
    """Merge the parts in a run folder into trace.h5, draw it, and return the files by name.

    A simulated run has no parts, and its trace.h5 is complete from the start. Of a run that was
    stopped, the steps that every rank finished are drawn; without one there is no picture, but the
    trace is written.

    Raises:
        ConfigError: No run folder, or none of its parts is readable.
    """
    folder = RunFolder(path)
    spec = folder.read_spec()
    is_simulated = not spec.machine.has_ranks
    loaded = load_trace(folder.trace_h5) if is_simulated else _merged(folder)
    files = {"trace": str(folder.trace_h5)}
    if len(loaded.trace.steps):
        for name, draw in (("timeline", timeline_figure), ("memory", memory_figure)):
            files[name] = str(path / f"{name}.png")
            save_figure(draw(loaded.trace), path / f"{name}.png")
        if np.isfinite(loaded.trace.steps["loss"]).any():
            files["learning curve"] = str(path / LEARNING_PNG)
            save_figure(learning_figure(loaded.trace), path / LEARNING_PNG)
    if folder.predictions_png.exists():
        files["predictions"] = str(folder.predictions_png)
    if folder.checkpoint.is_dir():
        files["checkpoint"] = str(folder.checkpoint)
    return loaded, run_metrics(loaded.trace), files


def _merged(folder: RunFolder) -> Loaded:
    """Join the parts, add rank 0's results, and write the trace."""
    loaded = load_parts(folder.path)
    trace = loaded.trace
    result = read_json(folder.result_json)
    trace.attributes |= {name: result[name] for name in RESULTS if result.get(name) is not None}
    if "schedule_rows" in result:
        trace.schedule_rows = tuple(result["schedule_rows"])
        trace.schedule_sha256 = str(result.get("schedule_sha256", ""))
    write_trace(folder.trace_h5, trace)
    if trace.layer_times is not None:
        profile = read_json(folder.profile_json)
        add_to_trace(folder.trace_h5, ModelProfile.from_json(profile, folder.profile_json))
    return loaded

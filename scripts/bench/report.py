"""A trace of a million events.

How long until it is read, drawn, made into a page, shown, and exported.
The trace is synthetic: one simulated step, repeated until there are enough events, each some per
cent longer or shorter. Shapes: `steps` is many steps of 16 ranks, `ranks` some steps of 1024,
`step` a single long one of 64; `study` is no such trace, but the page of 11 points from 8 to 1024
ranks. If there is a headless Chromium it shows the page: the time until its first picture is drawn,
and that of a picture of all events.

The exit code is 1 if reading and drawing, or making and showing the page, take 10 s or more
together (of the study 60 s).
"""

from __future__ import annotations

import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import yaml

from analysis.export.formats import export_runs
from analysis.io.load import load_trace
from analysis.plots.figure import save_figure
from analysis.plots.timeline import timeline_figure
from analysis.report.build import build_report
from gems.runs.simulated_run import simulated_trace
from gems.simulation.build import lowered_schedule
from gems.trace import DTYPES, Trace, write_trace
from scripts.bench.rig import answered, composed, machine, options

LIMIT_S = 10.0
STUDY_LIMIT_S = 60.0
STUDY = "study"
WORDS = (
    "machine=simulated cost=uniform cost.unit_s=0.001 cost.activation_bytes=4194304 schedule=1f1b"
    " cost.link=0.1 benchmark.skip_steps=0"
)
SHAPES = {
    "steps": (16, 1, 64),
    "ranks": (8, 128, 32),
    "step": (64, 1, 64),
}  # partitions, replicas, micro-batches
REPLICAS = (1, 2, 4, 8, 12, 16, 24, 32, 64, 96, 128)  # of a pipeline of 8 ranks, in the study
JITTER = 0.02
T = TypeVar("T")


def one_trace(partitions: int, replicas: int, micro_batches: int, steps: int) -> Trace:
    """Simulate a run; its trace has the events of one replica."""
    spec = composed(
        f"{WORDS} parallel.partitions={partitions} parallel.replicas={replicas}",
        f"parallel.micro_batches={micro_batches} train.steps={steps}",
    )
    trace = simulated_trace(spec, lowered_schedule(spec))
    trace.run_yaml = yaml.safe_dump(spec.to_dict())
    return trace


def made_up(shape: str, num_events: int) -> Trace:
    """Build a synthetic trace with at least `num_events` events."""
    partitions, replicas, _ = SHAPES[shape]
    trace = one_trace(*SHAPES[shape], steps=1)
    one = np.concatenate([trace.events] * replicas)
    one["rank"] += np.repeat(np.arange(replicas, dtype=np.int32) * partitions, len(trace.events))
    count = -(-num_events // len(one))
    span_ns = int(trace.steps["end_ns"][0])
    events = np.concatenate([one] * count)
    place = np.repeat(np.arange(count), len(one))
    drawn = np.random.default_rng(0).uniform(1 - JITTER, 1.0, len(events))
    length = ((events["end_ns"] - events["start_ns"]) * drawn).astype(np.int64)
    events["start_ns"] += place * span_ns
    events["end_ns"] = events["start_ns"] + length
    steps = np.repeat(trace.steps, count)
    steps["start_ns"] += np.arange(count) * span_ns
    steps["end_ns"] += np.arange(count) * span_ns
    if shape == "step":
        steps = steps[:1]
        steps["end_ns"] = count * span_ns
    else:
        events["step"] = place
        steps["step"] = np.arange(count)
    steps["loss"] = 2.0 / (1 + np.arange(len(steps)))
    order = np.lexsort((events["start_ns"], events["rank"]))
    none = np.empty(0, DTYPES["rank_steps"])
    return Trace(
        trace.attributes | {"identical_replicas": 1},
        events[order],
        steps,
        none,
        run_yaml=trace.run_yaml,
    )


def measured(shape: str, num_events: int, folder: Path) -> dict[str, Any]:
    """Measure one shape: seconds, and sizes in bytes."""
    row: dict[str, Any] = {"shape": shape}

    def timed(name: str, call: Callable[[], T]) -> T:
        began = time.perf_counter()
        made = call()
        row[f"{name}_s"] = time.perf_counter() - began
        return made

    if shape == STUDY:
        runs = [folder / f"ranks{8 * replicas}" for replicas in REPLICAS]
        for run, replicas in zip(runs, REPLICAS, strict=True):
            write_trace(run / "trace.h5", one_trace(8, replicas, 32, steps=8))
        row |= {"ranks": 8 * max(REPLICAS), "points": len(runs)}
    else:
        runs = [folder]
        trace = made_up(shape, num_events)
        row |= {"events": len(trace.events), "ranks": trace.world_size}
        write_trace(folder / "trace.h5", trace)
        del trace
        loaded = [timed("load", lambda: load_trace(folder))]
        timed(
            "timeline",
            lambda: save_figure(timeline_figure(loaded.pop().trace), folder / "timeline.png"),
        )
    made = timed("report", lambda: build_report(runs, folder / "report.html"))
    row |= {
        "page_bytes": made.size_bytes,
        "events" if shape == STUDY else "page_events": made.num_events,
    }
    if shape != STUDY:
        row["perfetto_bytes"] = timed("perfetto", lambda: export_runs(runs, "perfetto")).size_bytes
        row["csv_bytes"] = timed("csv", lambda: export_runs(runs, "csv")).size_bytes
    return row | (_shown(folder) if shutil.which("chromium") else {})


def _shown(folder: Path) -> dict[str, float]:
    from tests.analysis.browser import browser

    drawn = "new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))"
    with browser(folder) as page:
        began = time.perf_counter()
        page.open(folder / "report.html")
        page.evaluate("gemsReport.load(0)")
        page.evaluate(drawn)
        shown_s = time.perf_counter() - began
        page.evaluate("document.querySelector('button[data-act=all]').click()")
        page.evaluate(drawn)
        return {"show_s": shown_s, "draw_all_s": float(page.evaluate("gemsReport.drawMs(0)")) / 1e3}


def _is_slow(row: dict[str, Any]) -> bool:
    page_s: float = row["report_s"] + row.get("show_s", 0.0)
    if row["shape"] == STUDY:
        return page_s >= STUDY_LIMIT_S
    return max(row["load_s"] + row["timeline_s"], page_s) >= LIMIT_S


def main(argv: Sequence[str]) -> int:
    """Measure the shapes and return the exit code."""
    shapes = (*SHAPES, STUDY)
    given = options(__doc__, argv, json=False, events=1_000_000, shape={"choices": shapes})
    machine()
    rows = []
    for shape in (given.shape,) if given.shape else shapes:
        with tempfile.TemporaryDirectory() as name:
            row = measured(shape, given.events, Path(name))
        rows.append(row)
        if not given.json:
            times = ", ".join(
                f"{key[:-2]} {value:.2f} s" for key, value in row.items() if key.endswith("_s")
            )
            sizes = (
                f"{row['events']} events, {row['ranks']} ranks, page"
                f" {row['page_bytes'] / 1e6:.1f} MB"
            )
            print(f"{shape}: {sizes}: {times}")
    return answered({"rows": rows}, any(map(_is_slow, rows)), given.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

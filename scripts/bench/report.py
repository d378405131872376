"""A trace of a million events: how long until it is read, drawn, made into a page, shown, and exported.

The trace is synthetic: one simulated step, repeated until there are enough events, each some per cent longer or
shorter. Shapes: `steps` is many steps of 16 ranks, `ranks` some steps of 1024, `step` a single long one of 64; `study`
is no such trace, but the page of 11 points from 8 to 1024 ranks. If there is a headless Chromium it shows the page: the
time until its first picture is drawn, and that of a picture of all events.

The exit code is 1 if reading and drawing, or making and showing the page, take 10 s or more together (of the study 60
s).
"""

from __future__ import annotations

import json
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
from gems.config.compose import compose
from gems.runs.simulated_run import simulated_trace
from gems.simulation.build import lowered_schedule
from gems.trace import DTYPES, Trace, write_trace
from scripts.bench.rig import machine, parser

LIMIT_S, STUDY_LIMIT_S = 10.0, 60.0
STUDY = "study"
WORDS = (
    "machine=simulated", "cost=uniform", "cost.unit_s=0.001", "cost.activation_bytes=4194304", "schedule=1f1b",
    "cost.link=0.1",
    "train.warmup_steps=0",
)  # fmt: skip
SHAPES = {"steps": (16, 1, 64), "ranks": (8, 128, 32), "step": (64, 1, 64)}  # partitions, replicas, micro-batches
JITTER = 0.02
T = TypeVar("T")


def made_up(shape: str, num_events: int, seed: int = 0) -> Trace:
    """Build a synthetic trace with at least `num_events` events."""
    partitions, replicas, micro_batches = SHAPES[shape]
    sizes = {"partitions": partitions, "replicas": replicas, "micro_batches": micro_batches}
    spec = compose([*WORDS, "train.steps=1", *(f"parallel.{key}={value}" for key, value in sizes.items())])
    trace = simulated_trace(spec, lowered_schedule(spec))
    one = np.concatenate([trace.events] * replicas)
    one["rank"] += np.repeat(np.arange(replicas, dtype=np.int32) * partitions, len(trace.events))
    count = -(-num_events // len(one))
    span_ns = int(trace.steps["end_ns"][0])
    events = np.concatenate([one] * count)
    place = np.repeat(np.arange(count), len(one))
    drawn = np.random.default_rng(seed).uniform(1 - JITTER, 1.0, len(events))
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
    attributes = trace.attributes | {"identical_replicas": 1}
    order = np.lexsort((events["start_ns"], events["rank"]))
    none = np.empty(0, DTYPES["rank_steps"])
    return Trace(attributes, events[order], steps, none, run_yaml=yaml.safe_dump(spec.to_dict()))


def study_row(folder: Path) -> dict[str, Any]:
    """Measure the page of a study of 11 simulated points.

    The points are from 1 to 128 copies of a pipeline of 8 ranks.
    """
    runs = []
    for replicas in (1, 2, 4, 8, 12, 16, 24, 32, 64, 96, 128):
        sizes = ("parallel.partitions=8", "parallel.micro_batches=32", f"parallel.replicas={replicas}", "train.steps=8")
        spec = compose([*WORDS, *sizes])
        trace = simulated_trace(spec, lowered_schedule(spec))
        trace.run_yaml = yaml.safe_dump(spec.to_dict())
        runs.append(folder / f"ranks{8 * replicas}")
        write_trace(runs[-1] / "trace.h5", trace)
    began = time.perf_counter()
    made = build_report(runs, folder / "report.html")
    report_s = time.perf_counter() - began
    return {
        "shape": STUDY, "events": made.num_events, "ranks": 1024, "points": len(runs), "report_s": report_s,
        "page_bytes": made.size_bytes, **_shown(folder),
    }  # fmt: skip


def shape_row(shape: str, num_events: int, folder: Path) -> dict[str, Any]:
    """Measure one shape: seconds, and sizes in bytes."""
    trace = made_up(shape, num_events)
    row: dict[str, Any] = {"shape": shape, "events": len(trace.events), "ranks": trace.world_size}
    write_trace(folder / "trace.h5", trace)
    del trace

    def timed(name: str, call: Callable[[], T]) -> T:
        began = time.perf_counter()
        made = call()
        row[f"{name}_s"] = time.perf_counter() - began
        return made

    loaded = [timed("load", lambda: load_trace(folder))]
    timed("timeline", lambda: save_figure(timeline_figure(loaded.pop().trace), folder / "timeline.png"))
    made = timed("report", lambda: build_report([folder], folder / "report.html"))
    row |= {"page_bytes": made.size_bytes, "page_events": made.num_events}
    for name in ("perfetto", "csv"):
        row[f"{name}_bytes"] = timed(name, lambda name=name: export_runs([folder], name)).size_bytes  # type: ignore[misc]
    return row | _shown(folder)


def _shown(folder: Path) -> dict[str, float]:
    if not shutil.which("chromium"):
        return {}
    from tests.analysis.browser import browser

    with browser(folder) as page:
        began = time.perf_counter()
        page.open(folder / "report.html")
        page.evaluate("gemsReport.load(0)")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        shown_s = time.perf_counter() - began
        page.evaluate("document.querySelector('button[data-act=all]').click()")
        page.evaluate("new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
        return {"show_s": shown_s, "draw_all_s": float(page.evaluate("gemsReport.drawMs(0)")) / 1e3}


def main(argv: Sequence[str]) -> int:
    """Measure the shapes and return the exit code."""
    options = parser(__doc__, "json")
    options.add_argument("--events", type=int, default=1_000_000)
    options.add_argument("--shape", choices=(*SHAPES, STUDY))
    given = options.parse_args(argv)
    machine()
    rows = []
    for shape in (given.shape,) if given.shape else (*SHAPES, STUDY):
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            row = study_row(folder) if shape == STUDY else shape_row(shape, given.events, folder)
        rows.append(row)
        if not given.json:
            times = ", ".join(f"{key[:-2]} {value:.2f} s" for key, value in row.items() if key.endswith("_s"))
            sizes = f"{row['events']} events, {row['ranks']} ranks, page {row['page_bytes'] / 1e6:.1f} MB"
            print(f"{shape}: {sizes}: {times}")
    if given.json:
        print(json.dumps({"rows": rows}))
    return int(any(_is_slow(row) for row in rows))


def _is_slow(row: dict[str, Any]) -> bool:
    page_s = row["report_s"] + row.get("show_s", 0.0)
    if row["shape"] == STUDY:
        return bool(page_s >= STUDY_LIMIT_S)
    return bool(max(row["load_s"] + row["timeline_s"], page_s) >= LIMIT_S)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

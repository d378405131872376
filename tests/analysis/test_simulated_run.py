"""Every analysis reads a simulated run.

All kinds and streams, one replica for all, memory by what it holds.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import yaml

from analysis.__main__ import main
from analysis.cli.collect import collect
from analysis.cli.scaling import study_table
from analysis.cli.summary import summary_table
from analysis.metrics.events import step_window
from analysis.metrics.run_metrics import backward_mean_s, run_metrics
from analysis.plots.memory_curve import buffer_bytes, memory_figure, rank_curve
from analysis.plots.timeline import LOOKS, timeline_figure
from analysis.report.build import build_report
from analysis.scaling.points import read_points
from gems.config.schema import RunSpec
from gems.plan.draft import Draft
from gems.runs.prepare import prepare
from gems.runs.simulated_run import main as simulate_run
from gems.schedule.memory import memory_over_time
from gems.simulation.costs import RunCosts
from gems.trace import KINDS, STREAMS, write_trace
from tests.helpers.attributed import spec_of, trace_of

MEMORY = {
    "schema": "gems.schedule/1",
    "name": "memory",
    "ranks": 2,
    "stages": 2,
    "micro_batches": 2,
    "directions": 1,
    "placement": [[0, 1]],
    "actions": [
        [
            ["F", 0, 0, 0],
            ["OFFLOAD", 0, 0, 0],
            ["F", 0, 0, 1],
            ["PREFETCH", 0, 0, 0],
            ["I", 0, 0, 0],
            ["W", 0, 0, 0],
            ["R", 0, 0, 1],
            ["B", 0, 0, 1],
        ],
        [["F", 1, 0, 0], ["I", 1, 0, 0], ["W", 1, 0, 0], ["F", 1, 0, 1], ["B", 1, 0, 1]],
    ],
}
Make = Callable[..., RunSpec]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    """Return the function that resolves a simulated run.

    Without a name it is the one with all kinds.
    """
    path = tmp_path / "memory.json"
    path.write_text(json.dumps(MEMORY))

    def build(
        name: str = "file", partitions: int = 2, micro_batches: int = 2, replicas: int = 1
    ) -> RunSpec:
        spec = spec_of(
            name,
            partitions,
            micro_batches,
            replicas,
            path,
            {"link_latency_s": 0.002},
            unit_s=0.01,
            activation_bytes=1 << 20,
            boundary_bytes=1 << 18,
            offload=1.0,
            param_bytes=1 << 21,
        )
        return replace(spec, runs_dir=str(tmp_path / "runs"))

    return build


def test_the_run_with_all_kinds_has_them(make: Make) -> None:
    trace = trace_of(make())
    waits = {
        "FREE",
        "AWAIT",
        "INPUT",
        "START_REDUCE",
    }  # of memory policies, slow inputs, and ranks of several stages
    assert {KINDS[kind] for kind in trace.events["kind"]} == set(KINDS) - waits
    assert {STREAMS[stream] for stream in trace.events["stream"]} == set(STREAMS)


def test_recomputation_is_busy_and_not_useful(make: Make) -> None:
    """Rank 0 computes 2 x 3 units and a recomputation of 1, rank 1 computes 6: 10 ms each."""
    spec = make()
    found = run_metrics(trace_of(spec))
    played = RunCosts.of(spec).kept(Draft(spec).lowered).simulation
    assert found.busy_s == pytest.approx((2 * 0.07, 2 * 0.06))
    assert found.efficiency == pytest.approx(played.efficiency, rel=1e-6)
    assert found.bubble_measured == pytest.approx(1 - 0.13 / (2 * played.span), rel=1e-6)
    window = step_window(trace_of(spec))
    assert window.bubble == pytest.approx(found.bubble_measured)


def test_a_split_backward_is_both_halves(make: Make) -> None:
    trace = trace_of(make("zb_h1", 4, 8))
    assert backward_mean_s(trace.events) == pytest.approx(0.02)
    assert run_metrics(trace).backward_s == pytest.approx(0.02)
    only_half = trace.events[trace.events["kind"] == KINDS.index("I")]
    assert backward_mean_s(only_half) is None


def test_one_replica_stands_for_all(make: Make) -> None:
    one, many = (run_metrics(trace_of(make("1f1b", 4, 8, replicas=n))) for n in (1, 128))
    assert len(many.busy_s) == len(many.peak_device_bytes) == 512
    assert many.busy_s[:4] == one.busy_s == many.busy_s[-4:]
    assert (
        many.num_images == 128 * one.num_images
        and one.time_s is not None
        and many.time_s is not None
    )
    assert many.bubble_measured == pytest.approx(1 - 4 * 2 * 8 * 0.03 / (4 * many.time_s))
    assert many.time_s - one.time_s == pytest.approx(2 * 2 * 7 * 0.002), (
        "two steps of a tree of seven levels, up and down"
    )
    assert many.peak_device_bytes[508:] == one.peak_device_bytes


def test_the_picture_shows_all_kinds(make: Make) -> None:
    figure = timeline_figure(trace_of(make()))
    shown = {text.get_text() for text in figure.legends[0].get_texts()}
    light = {
        look.legend
        for look in LOOKS
        if look.shade != 1 and look.kinds[0] not in ("REDUCE_GRAD", "START_REDUCE", "STEP", "INPUT")
    }
    assert shown == light | {"idle (bubble)"}, (
        "a reduction of one and a step that costs nothing have no width"
    )


def test_the_picture_says_that_other_replicas_are_alike(make: Make) -> None:
    figure = timeline_figure(trace_of(make("1f1b", 4, 8, replicas=128)))
    words = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert (
        "512 ranks" in words and "(4 shown, the others are alike)" in words and "SIMULATED" in words
    )


def test_stages_of_a_rank_have_shades_in_the_picture(make: Make) -> None:
    figure = timeline_figure(trace_of(make("interleaved_1f1b", 2, 4)))
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert "F, 1st stage of a rank" in shown and "F, 2nd stage" in shown


def test_buffers_are_told_from_activations(make: Make) -> None:
    """From the events alone, as the simulation itself has them."""
    for name, partitions in (("1f1b", 4), ("gems_master", 4), ("interleaved_1f1b", 2), ("file", 2)):
        spec = make(name, partitions, 2 if name == "file" else 8)
        trace = trace_of(spec)
        schedule = Draft(spec).lowered
        costs = RunCosts.of(spec)
        memory = memory_over_time(
            schedule, costs.stages(schedule.placement), costs.kept(schedule).simulation, 1 << 20
        )
        for rank, held in enumerate(memory):
            events = trace.events[(trace.events["rank"] == rank) & (trace.events["step"] == 0)]
            times_ns = np.array([round(point.time * 1e9) for point in held.held])
            assert buffer_bytes(events, times_ns).tolist() == [
                point.boundaries for point in held.held
            ]


def test_the_memory_curve_has_its_parts(make: Make) -> None:
    trace = trace_of(make())
    curve = rank_curve(trace, step_window(trace), 0)
    assert curve is not None and curve.host_bytes.max() == 1 << 20
    assert 0 < curve.buffer_bytes.max() <= curve.peak_bytes
    figure = memory_figure(trace)
    shown = [text.get_text() for text in figure.legends[0].get_texts()]
    assert shown == ["activations", "buffers of messages", "copies in host memory"]
    words = " ".join(text.get_text() for text in figure.axes[0].texts)
    assert "beside parameters 2.00 MiB" in words and "host copies 1.00 MiB" in words


def test_in_a_measured_run_nothing_is_told_apart(make: Make) -> None:
    trace = trace_of(make("1f1b", 4, 8))
    trace.attributes["source"] = "measured"
    curve = rank_curve(trace, step_window(trace), 0)
    assert curve is not None and not curve.buffer_bytes.any()
    assert memory_figure(trace).legends == []


def test_collect_takes_the_trace_as_it_is(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare(make("1f1b", 4, 8, replicas=2))
    assert simulate_run([str(folder.path)]) == 0
    before = folder.trace_h5.read_bytes()
    files = collect(folder.path)[2]
    assert folder.trace_h5.read_bytes() == before
    assert sorted(files) == ["memory", "timeline", "trace"]
    assert all(Path(path).stat().st_size for path in files.values())
    for verb in ("summary", "collect", "timeline"):
        assert main([verb, str(folder.path)]) == 0
    out = capsys.readouterr().out
    assert "1f1b on 8 ranks (4 partitions x 2 replicas), 8 micro-batches a step: simulated" in out
    assert "bubble, simulated [%]" in out and "efficiency without" not in out


def test_the_table_tells_recomputation(make: Make, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare(make())
    assert simulate_run([str(folder.path)]) == 0
    assert main(["summary", str(folder.path)]) == 0
    assert "efficiency without recomputation, simulated [%]" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["1f1b", "interleaved_1f1b", "looped_bfs", "zb_h1", "gems_zb", "layer_parallel"]
)
def test_the_closed_form_stands_beside_the_simulated_bubble(make: Make, name: str) -> None:
    """With free links, where the form is exact: a split backward is told by its W."""
    spec = make(name, 4, 8)
    spec.machine.link_latency_s = 0.0
    found = run_metrics(trace_of(spec))
    assert found.bubble_formula == pytest.approx(found.bubble_measured)


@pytest.mark.cases
def test_units_are_no_seconds_in_the_table(make: Make) -> None:
    spec = make("1f1b")
    in_seconds = spec
    in_units = replace(spec, cost=replace(spec.cost, unit_s=1.0))
    texts = [
        summary_table(run_metrics(trace), trace, {})
        for trace in map(trace_of, (in_seconds, in_units))
    ]
    assert "images/s" in texts[0] and "step time, median [ms]" in texts[0]
    assert "images/s" not in texts[1] and "step time, median [units]" in texts[1]


def test_units_are_no_seconds_in_a_study_and_its_page(make: Make, tmp_path: Path) -> None:
    spec = make("1f1b")
    trace = trace_of(replace(spec, cost=replace(spec.cost, unit_s=1.0)))
    trace.run_yaml = yaml.safe_dump(spec.to_dict())
    path = tmp_path / "a" / "trace.h5"
    path.parent.mkdir()
    write_trace(path, trace)
    shown = study_table(read_points([path]))
    assert (
        "images/unit" in shown
        and "[units]" in shown
        and "images/s" not in shown
        and "[s]" not in shown
    )
    page = tmp_path / "page.html"
    build_report([path], page)
    text = re.sub(r"<script.*?</script>", "", page.read_text(), flags=re.DOTALL)
    assert "[units]" in text and not re.search(r"images/s\b|\[m?s\]|\bms\b| m?s<", text)

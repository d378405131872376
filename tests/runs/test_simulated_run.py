"""gems.runs.simulated_run: the trace of a run on paper, and the program that writes it."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

import gems.runs.simulated_run
from gems.config.resolve import resolve, run_id
from gems.config.schema import (
    BenchmarkConfig,
    CostConfig,
    MachineConfig,
    ParallelConfig,
    RunSpec,
    ScheduleConfig,
    TrainConfig,
)
from gems.plan.draft import Draft
from gems.plan.evaluate import evaluate
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.runs.simulated_run import main, simulated_trace
from gems.trace import KINDS, STREAMS, Trace, read_trace
from gems.utils.atomic_io import read_json
from tests.helpers.processes import python

ROOT = Path(__file__).resolve().parents[2]
LINKS = MachineConfig(kind="simulated", link_latency_s=0.001, link_bytes_per_s=1e6)


def spec_of(
    name: str = "1f1b",
    partitions: int = 4,
    micro_batches: int = 8,
    replicas: int = 1,
    steps: int = 3,
    runs_dir: str = "runs",
    machine: MachineConfig = LINKS,
    path: str | None = None,
    **cost: object,
) -> RunSpec:
    given = {
        "unit_s": 0.01,
        "activation_bytes": 1000,
        "boundary_bytes": 100,
        "param_bytes": 5000,
        **cost,
    }
    return resolve(
        RunSpec(
            runs_dir=runs_dir,
            schedule=ScheduleConfig(name=name, path=path),
            parallel=ParallelConfig(
                partitions=partitions, micro_batches=micro_batches, replicas=replicas
            ),
            cost=CostConfig(**given),  # type: ignore[arg-type]
            machine=machine,
            train=TrainConfig(steps=steps),
            benchmark=BenchmarkConfig(skip_steps=1),
        )
    )


def trace_of(spec: RunSpec) -> Trace:
    return simulated_trace(spec, Draft(spec).lowered)


def of_kind(trace: Trace, kind: str, step: int = 0) -> np.ndarray:
    events = trace.events
    return events[(events["kind"] == KINDS.index(kind)) & (events["step"] == step)]


def test_a_simulated_run_cuts_no_model() -> None:
    """16 stages of a network with fewer layers: nothing is cut, nothing is loaded."""
    spec = spec_of(partitions=64, micro_batches=64)
    assert evaluate(spec).boundaries == ()


def test_events_are_those_of_the_schedule_in_their_streams() -> None:
    spec = spec_of()
    schedule = Draft(spec).lowered
    trace = trace_of(spec)
    assert len(trace.events) == 3 * sum(map(len, schedule.rank_schedules))
    links = np.isin(
        trace.events["kind"], [i for i, kind in enumerate(KINDS) if "_F" in kind or "_B" in kind]
    )
    assert (trace.events["stream"][links] == STREAMS.index("link")).all()
    assert (trace.events["moved_bytes"][links] == 100).all()
    assert (trace.events["stream"][~links] == STREAMS.index("compute")).all()
    assert not trace.events["moved_bytes"][~links].any()
    order = np.lexsort((trace.events["start_ns"], trace.events["rank"]))
    assert (order == np.arange(len(order))).all()
    assert trace.schedule_sha256 == schedule.digest()
    assert trace.source == "simulated" and trace.attributes["signature"] == run_id(spec)


def test_times_are_units_of_the_cost_and_steps_repeat() -> None:
    """F takes 10 ms, and a message 1 ms + 100 bytes at 1 MB/s = 1.1 ms, so F of stage 1 starts at 11.1 ms."""
    trace = trace_of(spec_of())
    first = of_kind(trace, "F")
    second_rank = first[(first["rank"] == 1) & (first["micro_batch"] == 0)][0]
    assert (second_rank["start_ns"], second_rank["end_ns"]) == (11_100_000, 21_100_000)
    span_ns = trace.steps["end_ns"][0]
    assert trace.steps["start_ns"].tolist() == [0, span_ns, 2 * span_ns]
    assert trace.steps["is_warmup"].tolist() == [1, 0, 0]
    assert trace.steps["images"].tolist() == [8] * 3 and np.isnan(trace.steps["loss"]).all()
    later = of_kind(trace, "F", 2)
    assert (np.sort(later["start_ns"]) == np.sort(first["start_ns"]) + 2 * span_ns).all()
    assert trace.events["end_ns"].max() <= trace.steps["end_ns"][-1]


def test_bytes_are_activations_and_buffers() -> None:
    """Rank 0 of 1f1b holds 4 micro-batches and up to a buffer each way; parameters stand apart."""
    trace = trace_of(spec_of())
    held = trace.events["device_bytes"][trace.events["rank"] == 0]
    assert 4000 < held.max() <= 4300 and set(held % 1000) <= {0, 100, 200, 300}
    assert trace.attributes["peak_allocated_bytes"][0] >= held.max()
    assert trace.attributes["param_bytes"] == [5000] * 4
    assert not trace.events["host_bytes"].any()


def test_copies_have_streams_of_their_own(tmp_path: Path) -> None:
    path = tmp_path / "copies.json"
    path.write_text(
        '{"schema":"gems.schedule/1","name":"c","ranks":1,"stages":1,"micro_batches":1,"directions":1,"placement":[[0]],'
        '"actions":[[["F",0,0,0],["OFFLOAD",0,0,0],["PREFETCH",0,0,0],["B",0,0,0]]]}'
    )
    trace = trace_of(spec_of("file", 1, 1, path=str(path), offload=2.0))
    out = of_kind(trace, "OFFLOAD")[0]
    back = of_kind(trace, "PREFETCH")[0]
    assert (out["stream"], back["stream"]) == (STREAMS.index("copy_out"), STREAMS.index("copy_in"))
    assert (out["moved_bytes"], back["moved_bytes"]) == (1000, 1000)
    assert (out["host_bytes"], back["host_bytes"]) == (1000, 0)
    assert (out["device_bytes"], back["device_bytes"]) == (1000, 1000), (
        "out, and at once on its way back"
    )
    assert of_kind(trace, "B")[0]["device_bytes"] == 0


def test_replicas_that_are_alike_are_written_once() -> None:
    spec = spec_of(replicas=128)
    trace = trace_of(spec)
    assert trace.world_size == 512 and set(trace.events["rank"]) == set(range(4))
    assert trace.attributes["identical_replicas"] == 128
    assert trace.steps["images"].tolist() == [spec.parallel.global_batch] * 3 == [1024] * 3
    assert len(trace.attributes["peak_allocated_bytes"]) == 512


def test_a_very_long_run_is_written_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gems.runs.simulated_run, "MAX_EVENTS", 1000)
    trace = trace_of(spec_of(steps=100))
    assert len(trace.events) <= 1000 and 1 < len(trace.steps) < 100
    assert trace.attributes["steps_asked"] == 100
    monkeypatch.setattr(gems.runs.simulated_run, "MAX_EVENTS", 1)
    assert len(trace_of(spec_of(steps=100)).steps) == 2, "at least one that is no warm-up step"


def test_the_program_writes_trace_and_result(tmp_path: Path) -> None:
    folder = prepare(spec_of(runs_dir=str(tmp_path)))
    ended = python("-m", "gems.runs.simulated_run", str(folder.path))
    assert (ended.returncode, ended.stdout, ended.stderr) == (0, "", "")
    trace = read_trace(folder.trace_h5)
    result = read_json(folder.result_json)
    assert trace.run_yaml == folder.run_yaml.read_text()
    assert result["num_steps"] == 3 and result["schedule_sha256"] == trace.schedule_sha256
    assert result["schedule_rows"] == list(trace.schedule_rows)
    assert result["step_s"] == pytest.approx(trace.steps["end_ns"][0] * 1e-9)
    assert result["images_per_s"] == pytest.approx(8 / result["step_s"])


def test_a_folder_that_was_not_prepared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([str(tmp_path)]) == 2
    assert capsys.readouterr().err.startswith("gems: run folder=")
    assert main([]) == 2
    assert capsys.readouterr().err == "usage: python -m gems.runs.simulated_run RUN_FOLDER\n"


def test_a_trace_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = prepare(spec_of(runs_dir=str(tmp_path)))
    RunFolder(folder.path).trace_h5.with_name(f"trace.h5.{os.getpid()}.partial").mkdir()
    assert main([str(folder.path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("gems: run folder=") and "cannot write there" in line


def test_nothing_heavy_is_loaded() -> None:
    program = (
        "import sys, gems.runs.simulated_run; "
        "print(*[m for m in ('torch', 'mpi4py', 'hydra', 'matplotlib') if m in sys.modules])"
    )
    ended = python("-c", program)
    assert (ended.returncode, ended.stdout.strip()) == (0, "")


class TestNoise:
    MACHINE = MachineConfig(kind="simulated", noise=0.02)

    def test_steps_are_drawn_and_events_lie_in_their_steps(self) -> None:
        spec = spec_of("gems_master", replicas=8, steps=6, machine=self.MACHINE)
        trace = trace_of(spec)
        again = trace_of(spec)
        took = trace.steps["end_ns"] - trace.steps["start_ns"]
        assert (
            len(set(took.tolist())) == 6 and (again.steps["end_ns"] == trace.steps["end_ns"]).all()
        )
        quiet = trace_of(
            spec_of("gems_master", replicas=8, steps=6, machine=MachineConfig(kind="simulated"))
        )
        assert (
            took.min() > (quiet.steps["end_ns"] - quiet.steps["start_ns"])[0]
        )  # the slowest of 8 counts
        for step in trace.steps:
            mine = trace.events[trace.events["step"] == step["step"]]
            assert (
                step["start_ns"] <= mine["start_ns"].min()
                and mine["end_ns"].max() == step["end_ns"]
            )
        assert (np.diff(trace.events["rank"]) >= 0).all()
        assert trace.attributes["noise"] == 0.02

    def test_a_long_run_draws_its_steps_once(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(gems.runs.simulated_run, "MAX_NOISY_STEPS", 3)
        steps = trace_of(spec_of(steps=7, machine=self.MACHINE)).steps
        took = (steps["end_ns"] - steps["start_ns"]).tolist()
        assert took[:3] == took[3:6] and len(set(took)) == 3


def test_a_calibrated_machine_is_told_with_its_error() -> None:
    machine = MachineConfig(kind="simulated", calibrated_from="two nodes", held_out_error=0.02)
    attributes = trace_of(spec_of(machine=machine)).attributes
    assert (attributes["calibrated_from"], attributes["held_out_error"]) == ("two nodes", 0.02)
    assert "held_out_error" not in trace_of(spec_of()).attributes

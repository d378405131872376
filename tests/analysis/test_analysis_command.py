"""The command `gems-analysis` and the closing table."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pytest

from analysis.__main__ import VERBS, main
from analysis.cli.summary import summary_dict, summary_table
from analysis.metrics.run_metrics import run_metrics
from gems.trace import DTYPES, Trace, part_path, write_trace
from tests.helpers.processes import python

ROOT = Path(__file__).resolve().parents[2]
Simulate = Callable[..., Trace]
WriteParts = Callable[..., Trace]


@pytest.fixture
def run_folder(simulate: Simulate, tmp_path: Path) -> Path:
    """Return the folder of a finished run of 4 ranks."""
    write_trace(tmp_path / "trace.h5", simulate())
    return tmp_path


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """Run a command that must end with exit code 2 and one line on stderr, and gives that line."""
    assert main(arguments) == 2
    shown = capsys.readouterr()
    assert shown.out == "" and shown.err.count("\n") == 1 and shown.err.endswith("\n")
    return shown.err


def test_summary_prints_the_table(run_folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["summary", str(run_folder)]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith(
        "gems_master on 4 ranks (4 partitions x 1 replica), 8 micro-batches a step: simulated (a"
        " prediction"
    )
    assert str(run_folder / "trace.h5") in out


def test_summary_json_is_one_object_with_units_in_names(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", str(run_folder / "trace.h5"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["source"] == "simulated"
    assert answer["images_per_s"] == pytest.approx(16 / answer["step_median_s"])
    assert answer["bubble_measured"] == pytest.approx(answer["bubble_formula"], abs=1e-9)
    assert len(answer["busy_s"]) == len(answer["peak_device_bytes"]) == answer["world_size"] == 4
    assert answer["notes"] == [] and answer["paths"] == [str(run_folder / "trace.h5")]


def test_timeline_writes_beside_the_trace(
    run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["timeline", str(run_folder)]) == 0
    assert capsys.readouterr().out.strip() == str(run_folder / "timeline.png")
    assert (run_folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_timeline_of_another_file_is_named_after_it(
    run_folder: Path, simulate: Simulate, capsys: pytest.CaptureFixture[str]
) -> None:
    write_trace(run_folder / "predicted.h5", simulate(partitions=2))
    assert main(["timeline", str(run_folder / "predicted.h5"), "--step", "1", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["step"], answer["source"], answer["is_whole"]) == (1, "simulated", True)
    assert answer["timeline"] == str(run_folder / "predicted-timeline.png")
    assert Path(answer["timeline"]).stat().st_size > 10_000


def test_out_and_pdf(run_folder: Path, tmp_path: Path) -> None:
    assert main(["timeline", str(run_folder), "--out", str(tmp_path / "x.pdf")]) == 0
    assert (tmp_path / "x.pdf").read_bytes().startswith(b"%PDF")


def test_a_killed_run_is_joined_in_memory(
    tmp_path: Path, write_parts: WriteParts, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parts(tmp_path, {"steps": 4}, steps_of={1: 2})
    assert main(["summary", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    answer = json.loads(out)
    assert answer["num_steps"] == 1 and answer["schedule"] == "gems_master"
    assert (
        "has no trace.h5" in err
        and "2 steps are whole" in err
        and "rank 1 finished 2 steps, others 4" in err
    )
    assert main(["timeline", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["step"] == 1
    assert not (tmp_path / "trace.h5").exists()


def test_an_unreadable_part_is_left_out_and_named(
    tmp_path: Path, write_parts: WriteParts, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parts(tmp_path, {"partitions": 2})
    part_path(tmp_path, 1).write_bytes(b"")
    assert main(["summary", str(tmp_path), "--json"]) == 0
    out, err = capsys.readouterr()
    assert "left out rank0001.h5" in err
    answer = json.loads(out)
    assert answer["bubble_measured"] is None and answer["peak_rss_bytes"] == [1 << 20, None]


def test_one_part_alone_is_a_trace_too(
    tmp_path: Path, write_parts: WriteParts, capsys: pytest.CaptureFixture[str]
) -> None:
    write_parts(tmp_path, {"partitions": 2})
    assert main(["summary", str(part_path(tmp_path, 1))]) == 0
    assert "the part of one rank of 2" in capsys.readouterr().err


def test_unknown_verbs_name_the_valid_ones(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["efficiency", "x"], ["--json"]):
        line = refused(capsys, *arguments)
        assert line.startswith("analysis: command=") and "allowed: timeline, summary" in line
    assert main([]) == 2
    assert capsys.readouterr().out.startswith("usage: gems-analysis VERB WORD ... [--json]\n")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["summary"], "PATH"),
        (["summary", "nowhere"], "does not exist"),
        (["summary", "{run}", "--steps", "3"], "--steps"),
        (["timeline", "{run}", "--step", "9"], "step=9: allowed: 0 to 2"),
        (["timeline", "{run}", "--step", "two"], "two"),
        (["timeline", "{run}", "--out", "{run}/none/x.png"], "folder does not exist"),
        (["timeline", "{run}", "--out", "{run}/x.jpeg"], ".jpeg"),
    ],
)
def test_bad_input_is_one_line(
    run_folder: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
) -> None:
    assert expected in refused(capsys, *(argument.format(run=run_folder) for argument in arguments))


def test_bad_files_are_one_line(
    tmp_path: Path, run_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    assert "neither trace.h5 nor trace/rank*.h5" in refused(capsys, "summary", str(empty))
    text = tmp_path / "notes.txt"
    text.write_text("hello")
    assert "not a readable trace file" in refused(capsys, "summary", str(text))
    foreign = tmp_path / "foreign.h5"
    with h5py.File(foreign, "w") as file:
        file.attrs["schema_version"] = "1.0"
        file["weights"] = np.zeros(3)
    assert "not a readable trace file" in refused(capsys, "summary", str(foreign))
    part = part_path(empty, 0)
    part.parent.mkdir()
    part.write_bytes(b"torn")
    assert "not a readable trace file" in refused(capsys, "summary", str(empty))
    with h5py.File(run_folder / "trace.h5", "a") as file:
        file.attrs["schema_version"] = "2.0"
    assert "schema 2.0 cannot be read here" in refused(capsys, "timeline", str(run_folder))


def test_table_has_accuracy_with_the_majority_beside_it(simulate: Simulate) -> None:
    trace = simulate(name="1f1b", source="measured")
    assert "validation" not in summary_table(run_metrics(trace), trace, {})
    trace.attributes |= {"validation_accuracy": 0.912, "validation_majority": 0.55}
    text = summary_table(run_metrics(trace), trace, {"checkpoint": "runs/a/checkpoint.pt"})
    lines = {
        line.strip().split("  ")[0]: line.split("  ")[-1].strip() for line in text.splitlines()[1:]
    }
    assert lines["validation accuracy [%]"] == "91.2 (majority class 55.0)"
    assert lines["step time, median [ms]"] == "33.0"
    assert lines["bubble, measured [%]"] == lines["bubble, by formula [%]"] == "27.3"
    assert lines["images/s"] == "485"
    assert lines["steps"] == "2 (1 warm-up step left out)"
    assert lines["peak, device ledger [MiB], rank 0"] == "17.0"
    assert lines["peak, device ledger [MiB], rank 3"] == "8.00"
    assert lines["checkpoint"] == "runs/a/checkpoint.pt"
    assert summary_dict(run_metrics(trace), trace)["validation_accuracy"] == 0.912


def test_table_has_the_interval_of_the_median_or_the_range_of_few_steps(simulate: Simulate) -> None:
    trace = simulate(name="1f1b", source="measured", steps=9)
    assert "fastest" not in summary_table(run_metrics(trace), trace, {})  # all steps are alike
    trace.steps["end_ns"] += np.arange(9) ** 2 * 10_000
    shown = summary_table(run_metrics(trace), trace, {})
    assert (
        re.search(r"step time, median's 95 % interval \[ms\] +33\.\d to 33\.\d", shown)
        and "fastest" not in shown
    )
    trace.steps = trace.steps[:4]
    shown = summary_table(run_metrics(trace), trace, {})
    assert "step time, fastest to slowest [ms]" in shown and "interval" not in shown


@pytest.mark.parametrize("source", ["emulated", "simulated"])
def test_a_prediction_is_never_called_measured(simulate: Simulate, source: str) -> None:
    trace = simulate(partitions=2, source=source)
    text = summary_table(run_metrics(trace), trace, {})
    assert "measured" not in text and f"bubble, {source} [%]" in text


def test_table_without_figures_says_why(simulate: Simulate) -> None:
    trace = simulate(partitions=2, steps=2, warmup_steps=2)
    assert "2 steps finished by every rank, warm-up only" in summary_table(
        run_metrics(trace), trace, {}
    )
    trace.steps = trace.steps[:0]
    text = summary_table(run_metrics(trace), trace, {})
    assert "no step was finished by every rank" in text and "nan" not in text and "None" not in text


def test_table_of_many_ranks_keeps_to_the_extremes(simulate: Simulate) -> None:
    trace = simulate(name="1f1b", partitions=20, micro_batches=20, steps=2)
    text = summary_table(run_metrics(trace), trace, {})
    assert (
        "highest of 20 ranks  65.0 on rank 0" in text
        and "lowest of 20 ranks   8.00 on rank 19" in text
    )


def test_a_loss_that_left_the_numbers_is_null_in_json(simulate: Simulate) -> None:
    trace = simulate(partitions=2)
    trace.steps["loss"] = np.inf
    metrics = run_metrics(trace)
    assert summary_dict(metrics, trace)["loss_last"] is None
    assert "inf to inf" in summary_table(metrics, trace, {})


def test_table_shows_resident_and_driver_bytes(simulate: Simulate) -> None:
    trace = simulate(partitions=2)
    samples = [(0, 0, 2 << 30, 1 << 30, 1.0, 0.5), (1, 0, 3 << 30, 1 << 30, 1.0, 0.5)]
    trace.samples = np.array(samples, DTYPES["samples"])
    text = summary_table(run_metrics(trace), trace, {})
    assert "peak, driver [GiB], rank 1" in text
    assert "peak, resident [GiB]               1.00 on all 2 ranks" in text


def test_start_up_loads_nothing_heavy() -> None:
    heavy = ("matplotlib", "torch", "mpi4py", "hydra")
    code = (
        "import sys, analysis.__main__, analysis.plots.timeline, analysis.plots.memory_curve,"
        f" analysis.cli.summary\nprint([name for name in {heavy!r} if name in sys.modules])"
    )
    done = python("-c", code, check=True)
    assert done.stdout.strip() == "[]"


def test_the_module_runs_as_a_program(run_folder: Path) -> None:
    command = [sys.executable, "-m", "analysis"]
    done = subprocess.run(
        [*command, "reprot", "x"], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert (
        done.stderr.strip()
        == f"analysis: command=reprot: allowed: {', '.join(VERBS)}; nearest: report"
    )
    done = subprocess.run(
        [*command, "summary", str(run_folder)], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")

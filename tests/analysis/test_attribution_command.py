"""`gems-analysis attribution`, the waterfall with its CSV, and the line in a run's closing table."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from analysis.__main__ import main
from analysis.attribution.causes import (
    CAUSES,
    COLUMNS,
    Attribution,
    attribute,
    attribution_table,
    largest_line,
)
from analysis.cli.summary import summary_table
from analysis.metrics.run_metrics import run_metrics
from analysis.plots.waterfall import waterfall_figure
from gems.trace import Trace, write_trace
from tests.helpers.attributed import spec_of, trace_of


@pytest.fixture(scope="module")
def trace() -> Trace:
    return trace_of(spec_of(link=0.2, input_load=2.0, replicas=2, param_bytes=10))


@pytest.fixture
def path(trace: Trace, tmp_path: Path) -> Path:
    write_trace(tmp_path / "trace.h5", trace)
    return tmp_path / "trace.h5"


def test_json_has_parts_for_the_run_and_for_each_rank(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attribution", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert list(found["causes_s"]) == list(CAUSES) == list(found["rank_own_s"])
    assert found["ideal_s"] + sum(found["causes_s"].values()) == pytest.approx(found["step_s"])
    for rank in range(8):
        lost_s = sum(found["rank_causes_s"][cause][rank] for cause in CAUSES)
        assert found["ideal_s"] + lost_s == pytest.approx(found["step_s"])
    assert (found["source"], found["num_steps"], found["pace"], found["files"]) == (
        "simulated",
        2,
        "costs",
        [],
    )
    assert found["efficiency"] == pytest.approx(24 / found["step_s"])


def test_the_table_has_a_row_a_part_and_one_a_rank(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["attribution", str(path), "--ranks"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("simulated run, mean of 2 steps")
    rows = {line.split()[0]: line.split()[1:] for line in lines[2:13]}
    assert set(rows) == {
        "ideal",
        "step",
        *(cause.replace("_to_", "-to-").replace("all_", "all-") for cause in CAUSES),
    }
    shares = {name: float(row[1]) for name, row in rows.items()}
    assert shares.pop("step") == 100 and sum(shares.values()) == pytest.approx(100, abs=0.1)
    ranks = [[float(word) for word in line.split()] for line in lines if line.strip()[:1].isdigit()]
    assert [row[0] for row in ranks] == list(range(8))
    assert all(sum(row[1:]) == pytest.approx(100, abs=0.1) for row in ranks)


@pytest.mark.parametrize("suffix", [".png", ".pdf", ".svg"])
def test_the_waterfall_is_drawn_with_its_csv(
    path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = path.with_name(f"waterfall{suffix}")
    assert main(["attribution", str(path), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-2:] == [str(out), str(out.with_suffix(".csv"))]
    assert out.stat().st_size > 5_000
    with out.with_suffix(".csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS and len(rows) == 1 + 9 * len(CAUSES)
    for rank in ("", "5"):
        shares = [
            float(row["share_of_step"])
            for row in rows
            if row["rank"] == rank and row["part"] in CAUSES
        ]
        assert sum(shares) + float(rows[0]["share_of_step"]) == pytest.approx(1)


def test_bars_of_the_waterfall_stand_where_the_one_before_ended(trace: Trace) -> None:
    found = attribute(trace)
    bars = waterfall_figure(found).axes[0].patches
    assert len(bars) == 2 + len(CAUSES)
    reached = bars[0].get_width()
    assert reached == pytest.approx(found.ideal_s)
    for bar, cause in zip(bars[1:-1], CAUSES, strict=True):
        assert (bar.get_x(), bar.get_width()) == pytest.approx((reached, found.run_s[cause]))
        reached += bar.get_width()
    assert (bars[-1].get_x(), bars[-1].get_width()) == pytest.approx((0, reached))
    words = [text.get_text() for text in waterfall_figure(found).axes[0].texts]
    assert (
        f"{found.run_s['bubble']:.3g} units, {100 * found.run_s['bubble'] / found.step_s:.1f} %"
        in words
    )
    assert any("SIMULATED" in word for word in words)


def test_a_cause_that_saved_time_goes_back() -> None:
    found = attribute(trace_of(spec_of("gems_master", times=[1, 2, 1, 1])))
    bar = waterfall_figure(found).axes[0].patches[2]
    assert bar.get_width() == pytest.approx(-1.4)


def test_a_table_that_cannot_be_written_is_refused(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.csv").mkdir()
    assert main(["attribution", str(path), "--out", str(tmp_path / "b.png")]) == 2
    assert "cannot be written" in capsys.readouterr().err


def test_a_trace_without_a_schedule_is_one_line(
    trace: Trace, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bare = Trace(
        trace.attributes, trace.events, trace.steps, trace.rank_steps, run_yaml=trace.run_yaml
    )
    write_trace(tmp_path / "bare.h5", bare)
    assert main(["attribution", str(tmp_path / "bare.h5")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("analysis: trace=") and "holds no schedule" in line
    assert "lost most" not in summary_table(run_metrics(bare), bare, {})


def test_the_closing_table_names_the_three_largest(
    path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["summary", str(path)]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if "lost most to" in line]
    assert line.split("  ")[-1].split(", ")[0].startswith("bubble 2") and line.count(",") == 2


def test_nothing_lost_is_said_so() -> None:
    none = {cause: (0.0,) for cause in CAUSES}
    found = Attribution("measured", 1, 1.0, 1.0, none, none, 0.0, "peers")
    assert largest_line(found) == "nothing" and found.efficiency == 1.0
    assert "100.00" in attribution_table(found)

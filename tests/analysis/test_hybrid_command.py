"""`gems-analysis hybrid`: the picture of a plan; and the planner reads what a scaling study writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.io.files import write_csv
from analysis.plots.answers import hybrid_figure
from analysis.scaling.points import Point, point_rows
from gems.search.hybrid.inputs import read_efficiency


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["hybrid", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def plan() -> dict[str, Any]:
    def choice(workers: int, ways: int, value: float) -> dict[str, Any]:
        speedup = {"value": value, "low": value * 0.9, "high": value * 1.1}
        return {"workers": workers, "ways": ways, "speedup": speedup}

    rows = [
        {
            "devices": 2**k,
            "choices": [
                choice(2**k, 1, 1.5**k),
                *([choice(2 ** (k - 1), 2, 1.2 * 1.6**k)] if k else []),
            ],
        }
        for k in range(5)
    ]
    return {
        "model": "resnet",
        "height_px": 64,
        "width_px": 64,
        "worker_batch": 8.0,
        "base": {"workers": 1, "ways": 1},
        "rows": rows,
        "crossings": [{"ways": 2, "devices": 6, "below": 4, "low": 4.5, "high": 7.0}],
    }


def test_a_plan_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    svg = tmp_path / "plan.svg"
    path.write_text(json.dumps(plan()))
    assert (
        said(capsys, str(path), "--out", str(svg)).strip() == str(svg) and "<svg" in svg.read_text()
    )
    (axes,) = hybrid_figure(plan()).axes
    alone, several = axes.lines[:2]
    assert list(alone.get_ydata()) == [1.5**k for k in range(5)]
    assert list(several.get_xdata()) == [2, 4, 8, 16] and several.get_ydata()[0] == 1.2 * 1.6


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", "3", '{"rows": 3}', '{"rows": [{"devices": 1, "choices": [{}]}]}']
)
def test_what_is_no_plan_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(text)
    assert main(["hybrid", str(path)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and "holds no answer of gems plan" in err


def test_the_planner_reads_what_a_scaling_study_writes(tmp_path: Path) -> None:
    points = [
        Point(
            line="1f1b",
            source="emulated",
            ranks=2 * replicas,
            partitions=2,
            replicas=replicas,
            micro_batches=4,
            images_per_step=4 * replicas,
            problem=(1.0,),
            work_s=1.0,
            step_s=(step_s, step_s),
            signatures=("a",),
        )
        for replicas, step_s in ((1, 1.0), (2, 1.25), (4, 2.0))
    ]
    table, source = read_efficiency(write_csv(point_rows(points), tmp_path / "scaling.csv"), "1f1b")
    assert source == "emulated" and [table(n, 2) for n in (1, 2, 4)] == [1.0, 0.8, 0.5]
    as_json = tmp_path / "scaling.json"
    as_json.write_text(json.dumps({"points": point_rows(points)}))
    assert read_efficiency(as_json, "1f1b") == (table, source)

"""scripts.reproduce: the papers' studies by one command each."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gems.simulation.build import lowered_schedule
from gems.simulation.costs import simulate_step
from scripts.reproduce import mcap, scaling


def run(*words: str) -> str:
    ended = subprocess.run(
        [sys.executable, "-m", *words], capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


@pytest.mark.parametrize(("script", "verb"), [("vdnn", "vdnn"), ("pal", "hybrid")])
def test_a_script_prints_what_its_verb_prints(script: str, verb: str) -> None:
    assert run(f"scripts.reproduce.{script}") == run("analysis", verb) != ""


def test_the_scaling_of_gems_is_a_study(tmp_path: Path) -> None:
    shown = run("scripts.reproduce.gems", f"runs_dir={tmp_path}", "--dry-run", "model.depth=20")
    assert "model=resnet1001_v2" in shown and "parallel.replicas=128" in shown


def test_parameters_are_set_beside_the_paper_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"exact": 30, "mcap": 20, "torchgpipe_size": 10, "torchgpipe_time": 16}
    rows = [
        {"family": "vgg", "ranks": 4, "method": name, "num_parameters": size}
        for name, size in sizes.items()
    ]
    monkeypatch.setattr(mcap, "largest_models", lambda: rows)
    assert mcap.main([]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[2:]] == [
        ["vgg", "4", "mcap", "torchgpipe_size", "2.00", "1.55"],
        ["vgg", "4", "mcap", "torchgpipe_time", "1.25", "1.55"],
        ["vgg", "4", "exact", "torchgpipe_size", "3.00", "-"],
        ["vgg", "4", "exact", "torchgpipe_time", "1.88", "-"],
    ]


def test_others_machines_are_simulated_from_what_they_published(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What a GPU computes is the published time, however the layers share it.

    Sums and stragglers come on top.
    """
    table = tmp_path / "table.csv"
    head, *rows = [
        line for line in scaling.TABLE.read_text().splitlines() if not line.startswith("#")
    ]
    table.write_text(
        "\n".join(
            ["# some rows", head, *(row for row in rows if row.startswith("v100_resnet50"))][:3]
        )
    )
    assert scaling.main(["--table", str(table), "--series", "v100_resnet50", "--json"]) == 0
    (series,) = json.loads(capsys.readouterr().out).values()
    (point,) = series["points"]
    assert (point["accelerators"], point["global_batch"], point["machine"]) == (
        8,
        1664,
        "dgx1_v100",
    )
    assert point["measured_s"] == pytest.approx(114.183 / 770)
    assert point["compute_s"] == pytest.approx(208 / 1442.6)
    assert point["simulated_s"] == pytest.approx(sum(point[name] for name in scaling.PIECES))
    assert point["compute_s"] < point["low_s"] <= point["simulated_s"] <= point["high_s"]
    assert series["median_error"] == pytest.approx(
        abs(point["simulated_s"] / point["measured_s"] - 1)
    )
    assert (
        len(series["median_errors"]) == 4
        and series["median_errors"][series["choice"]] == series["median_error"]
    )
    assert all(source for source in series["constants"].values())


def test_a_base_of_several_gpus_holds_their_sum() -> None:
    series = scaling.ALL_SERIES[1]
    (base,) = series.choices["one node"].values()
    spec = scaling.spec_of(series, base, base.gpus, base.images)
    step = simulate_step(spec, lowered_schedule(spec))[1]
    assert step.span == pytest.approx(base.step_s, rel=1e-6)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("name,value\na,1\n", "has no column series, accelerators, global_batch"),
        (
            "series,accelerators,global_batch,step_s\na,8,64,1\n",
            "has no series v100_resnet50; allowed: a",
        ),
        (
            "series,accelerators,global_batch,step_s,source\nv100_resnet50,8,60,1,dgx1\n",
            "global_batch=60: is no multiple of its 8 accelerators",
        ),
    ],
    ids=["another form", "no such series", "a batch with a remainder"],
)
def test_a_table_of_no_use_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, says: str
) -> None:
    table = tmp_path / "table.csv"
    table.write_text(text)
    assert scaling.main(["--table", str(table)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert says in line


def test_an_image_in_a_smaller_batch_takes_longer_as_in_inference() -> None:
    base = scaling.Base("dgx1_v100", 1, 200, 0.2, "here", {50: 1000.0, 100: 1600.0, 200: 2000.0})
    assert base.image_s(200) == pytest.approx(0.001)
    assert base.image_s(50) == pytest.approx(0.002)
    assert base.image_s(75) == pytest.approx(
        0.001 * (50 + 62.5) / 2 / 75 / 0.5
    )  # half-way between 50 and 62.5 ms
    assert replace(base, inference={}).image_s(50) == pytest.approx(0.001)

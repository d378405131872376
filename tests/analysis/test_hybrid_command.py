"""`gems-analysis hybrid`: the projections of Pal et al., and the picture of a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.io.files import write_csv
from analysis.scaling.points import Point, point_rows
from gems.planner.hybrid.inputs import read_efficiency

PNG = b"\x89PNG"


def said(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert main(["hybrid", *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    answer: dict[str, Any] = json.loads(said(capsys, "--json"))
    assert (answer["schema"], answer["source"]) == ("gems.hybrid_projections/1", "predicted")
    last = {each["network"]: each["gains"][-1] for each in answer["networks"]}
    assert {
        name: (gain["devices"], round(100 * gain["gain"], 1)) for name, gain in last.items()
    } == {"Inception-V3": (256, 26.5), "GNMT": (256, 8.0), "BigLSTM": (32, 22.0)}
    for gain in last.values():
        assert (
            gain["low"] < gain["gain"] < gain["high"]
            and gain["workers"] * gain["ways"] == gain["devices"]
        )
        assert (
            gain["published"]["is_confirmed"]
            and gain["published"]["devices_mark"] == "recalled, not confirmed"
        )
        assert gain["gain"] != gain["published"]["gain"], "recomputed, and not the printed figure"
    assert {each["network"]: each["is_independent"] for each in answer["networks"]} == {
        "Inception-V3": True,
        "GNMT": False,
        "BigLSTM": False,
    }
    crossings = {each["network"]: each["crossing"] for each in answer["networks"]}
    assert (crossings["Inception-V3"]["above"], crossings["Inception-V3"]["at_most"]) == (32, 64)
    assert crossings["Inception-V3"]["devices"] == 54
    assert crossings["GNMT"]["devices"] is None and crossings["GNMT"]["at_most"] == 256
    assert crossings["GNMT"]["by_noise_scale"] == pytest.approx(100.8, abs=0.1)
    assert crossings["BigLSTM"]["by_noise_scale"] is None
    inputs = [(each["network"], one) for each in answer["networks"] for one in each["inputs"]]
    assert len(answer["unconfirmed"]) == len(inputs) and not any(
        one["is_confirmed"] for _, one in inputs
    )
    derived = [name for name, one in inputs if one["mark"] == "derived from the published gain"]
    assert derived == ["GNMT", "BigLSTM"]


def test_table_marks_what_is_not_confirmed_and_what_proves_nothing(
    capsys: pytest.CaptureFixture[str],
) -> None:
    lines = said(capsys).splitlines()
    for name, gain, shows in (
        ("Inception-V3", "+26.5 %", "reproduced from inputs"),
        ("Inception-V3", "+15.5 %", "reproduced from inputs"),
        ("GNMT", "+8.0 %", "only consistent"),
        ("BigLSTM", "+22.0 %", "only consistent"),
    ):
        assert any(line.startswith(name) and gain in line and shows in line for line in lines)
    marked = [line for line in lines if line.startswith("!")]
    assert sum("SU^2" in line and "recalled, not confirmed" in line for line in marked) == 3
    assert sum("derived from the published gain" in line for line in marked) == 2
    assert any("between 32 and 64 devices (at 54" in line for line in lines)
    assert sum("from a derived input" in line for line in lines) == 2


def test_picture(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    out = tmp_path / "pal.png"
    answer = json.loads(said(capsys, "--json", "--out", str(out)))
    assert answer["picture"] == str(out) and out.read_bytes().startswith(PNG)


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
    path.write_text(json.dumps(plan()))
    assert said(capsys, str(path)).strip() == str(tmp_path / "plan.png")
    svg = tmp_path / "plan.svg"
    assert json.loads(said(capsys, str(path), "--out", str(svg), "--json")) == {"picture": str(svg)}
    assert (tmp_path / "plan.png").read_bytes().startswith(PNG) and "<svg" in svg.read_text()


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


def test_a_picture_that_cannot_be_written_is_one_line(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    for out in ("pal.txt", str(tmp_path / "none" / "pal.png")):
        assert main(["hybrid", "--out", out]) == 2
        shown = capsys.readouterr()
        assert shown.out == "" and shown.err.count("\n") == 1


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


def test_measured_epochs_stand_beside_what_the_paper_is_recalled_to_say(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = json.loads(said(capsys, "--json"))["measured_epochs"]
    gnmt = next(row for row in rows if (row["name"], row["devices"]) == ("GNMT", 256))
    assert (gnmt["global_batch"], gnmt["is_extrapolated"], gnmt["published"]["gain"]) == (
        32768,
        True,
        0.08,
    )
    assert gnmt["low"] < gnmt["gain"] < gnmt["high"] < 0.0  # hybrid does not win
    assert {row["name"] for row in rows} == {"GNMT", "ResNet-50-like"}
    assert "By epochs that others have measured (not verified by MLCommons)" in said(capsys)

"""`gems-analysis vdnn`: the table of the vDNN paper's studies."""

from __future__ import annotations

import json

import pytest

from analysis.__main__ import main
from analysis.papers.vdnn import (
    ALEXNET,
    GOOGLENET,
    LOADS,
    OVERFEAT,
    VGG16,
    VGG416,
    Row,
    device_rates,
    simulate_networks,
    table,
    table_rows,
)
from analysis.papers.vdnn_study import Policy, Study
from gems.config.schema import MachineConfig

Studied = tuple[dict[object, Study], MachineConfig]


@pytest.fixture(scope="module")
def studied() -> Studied:
    return simulate_networks()


@pytest.fixture(scope="module")
def rows(studied: Studied) -> dict[tuple[str, str], Row]:
    return {(row.network, row.quantity): row for row in table_rows(*studied)}


def test_the_ten_networks_run_on_the_papers_card(studied: Studied) -> None:
    made, machine = studied
    assert list(made) == list(LOADS) and len(made) == 10
    assert machine.name == "titan_x" and machine.d2h_bytes_per_s == 12.8e9
    assert device_rates(machine).flops_per_s == pytest.approx(5.25e12)


def test_averages_stand_beside_the_abstracts(rows: dict[tuple[str, str], Row]) -> None:
    for load, published, within in ((ALEXNET, 89, 6), (OVERFEAT, 91, 6), (GOOGLENET, 95, 6)):
        over_calls = rows[load.title, "vdnn_all: average saved, over calls"]
        over_time = rows[load.title, "vdnn_all: average saved, over time"]
        bare = rows[load.title, "vdnn_all: average saved, over time, without workspace"]
        for row in (over_calls, over_time, bare):
            assert row.published == published and row.unit == "%"
            assert row.difference == pytest.approx(row.ours - published)
        assert abs(over_calls.difference or 0.0) < 2.5 and abs(over_time.difference or 0.0) < within
        assert bare.ours < over_time.ours
        assert rows[load.title, "vdnn_conv: peak saved"].published is None


def test_losses_of_vgg16_stand_around_the_published(rows: dict[tuple[str, str], Row]) -> None:
    conv, every = (
        rows[VGG16.title, f"vdnn_{policy}: throughput lost"] for policy in ("conv", "all")
    )
    assert conv.published == every.published == 18.0
    assert conv.ours < 18.0 < every.ours


def test_totals(rows: dict[tuple[str, str], Row]) -> None:
    total = rows[VGG416.title, "baseline without workspace"]
    assert abs(total.difference or 100.0) < 5.0 and "recalled" in total.source
    bare, whole = (rows[VGG16.title, f"baseline{end}"] for end in (" without workspace", ""))
    assert bare.ours < 28.0 < whole.ours
    assert rows["those beyond 12.9 GB", "how many of the ten"].ours == 6


def test_the_table_says_its_metric_and_marks_what_is_recalled(studied: Studied) -> None:
    shown = table(table_rows(*studied))
    assert "the bytes that vDNN manages" in shown and "Why figures differ" in shown
    totals = [line for line in shown.splitlines() if line.startswith("VGG-416")]
    assert len(totals) == 2 and all(line.endswith("paper, recalled") for line in totals)
    assert shown.count("recalled") == 2
    assert (
        len({line.rindex("paper") for line in shown.splitlines() if line.endswith(" paper")}) == 1
    )  # in columns


def test_json_is_one_object_with_the_memory_over_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vdnn", "--json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    answer = json.loads(out)
    assert answer["schema"] == "gems.vdnn/1" and answer["source"] == "simulated"
    assert answer["machine"]["name"] == "titan_x" and "vDNN manages" in answer["metric"]
    assert {(row["network"], row["unit"]) for row in answer["rows"]} >= {
        ("VGG-416", "GB"),
        ("AlexNet", "%"),
    }
    vgg = next(
        each
        for each in answer["networks"]
        if (each["network"], each["num_images"]) == ("VGG-16", 256)
    )
    assert list(vgg["policies"]) == [f"vdnn_{policy}" for policy in Policy]
    for step in vgg["policies"].values():
        assert sum(step["seconds"]) == pytest.approx(step["step_s"])
        held = sum(
            seconds * held
            for seconds, held in zip(step["seconds"], step["device_bytes"], strict=True)
        )
        assert held / step["step_s"] == pytest.approx(step["average_bytes"])


def test_plain_output_is_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vdnn"]) == 0
    assert capsys.readouterr().out.startswith("What is counted")


def test_an_unknown_word_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["vdnn", "run"]) == 2
    assert "run" in capsys.readouterr().err

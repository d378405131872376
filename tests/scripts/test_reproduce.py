"""scripts.reproduce: the papers' studies by one command each."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from analysis.scaling.published import read_table
from gems.search.hybrid.quantity import Quantity
from scripts.reproduce import mcap, mlperf, pal, scaling, vdnn
from tests.helpers.processes import python


def run(*words: str) -> str:
    ended = python("-m", *words)
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def cells(line: str) -> list[str]:
    return re.split(r"  +", line.strip())


def test_vdnn_s_studies_stand_beside_the_paper_s(capsys: pytest.CaptureFixture[str]) -> None:
    vdnn.main()
    shown = capsys.readouterr().out
    rows = {
        (name, what): (ours, published)
        for name, _, what, *_, ours, published in map(cells, shown.splitlines()[2:])
    }
    assert len(rows) == 22
    for name, calls, time, published in (
        ("AlexNet", "87.5", "83.4", "89.0"),
        ("OverFeat", "93.1", "91.7", "91.0"),
        ("GoogLeNet", "94.2", "89.9", "95.0"),
    ):
        assert rows[name, "all: average saved, over calls"] == (calls, published)
        assert rows[name, "all: average saved, over time"] == (time, published)
    assert rows["VGG-16", "conv: throughput lost"] == ("3.4", "1.0")
    assert rows["VGG-16", "all: throughput lost"] == ("18.5", "18.0")
    assert rows["VGG-416", "baseline without workspace"] == ("70.1", "67.1")
    assert rows["-", "how many of the ten exceed the card"] == ("6.0", "6.0")


def test_without_vdnn_a_step_takes_as_long_as_its_calls_and_nothing_leaves() -> None:
    network = vdnn.Network(vdnn.ALEXNET._replace(images=2))
    assert vdnn.play(network, "none").lost == pytest.approx(0.0) and not any(
        vdnn.offloads(network, "none")
    )
    conv, every = (vdnn.offloads(network, policy) for policy in ("conv", "all"))
    assert 0 < sum(conv) < sum(every) and all(
        more or not one for one, more in zip(conv, every, strict=True)
    )
    assert vdnn.play(network, "all").peak_bytes < vdnn.play(network, "none").peak_bytes


def test_pal_s_gains_stand_beside_the_paper_s(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pal.main(["--out", str(tmp_path / "pal.png")])
    lines = capsys.readouterr().out.splitlines()
    gains = {
        (name, devices): (gain, published)
        for name, devices, gain, _, published, _ in map(cells, lines[2:6])
    }
    assert gains == {
        ("Inception-V3", "64"): ("+15.5 %", "+15.5 %"),
        ("Inception-V3", "256"): ("+26.5 %", "+26.5 %"),
        ("GNMT", "256"): ("+8.0 %", "+8.0 %"),
        ("BigLSTM", "32"): ("+22.0 %", "+22.0 %"),
    }
    assert "  Inception-V3: between 32 and 64 devices (at 54, 49 to 69)" in lines
    measured = {(series, devices): gain for series, _, devices, gain, _ in map(cells, lines[-4:])}
    assert measured == {
        ("gnmt_v0.6_v0.7", "128"): "-15.1 %",
        ("gnmt_v0.6_v0.7", "256"): "-5.4 %",
        ("resnet50_v1.1", "512"): "-17.1 %",
        ("resnet50_v1.1", "1024"): "-7.1 %",
    }
    assert (tmp_path / "pal.png").read_bytes().startswith(b"\x89PNG")


def test_a_gain_follows_its_inputs_and_not_the_printed_figure() -> None:
    slower = replace(pal.INCEPTION, speedup=Quantity.exact(1.2))
    assert slower.case.gain(128, 2) == pytest.approx(1.2 / 2 * 23 / 12)


@pytest.mark.usefixtures("warm")
def test_the_scaling_of_gems_is_a_study(tmp_path: Path) -> None:
    shown = run("scripts.reproduce.gems", f"runs_dir={tmp_path}", "--dry-run", "model.depth=20")
    assert (
        "model=resnet1001_v2" in shown and "parallel.replicas=128" in shown and "97.32 %" in shown
    )


def test_parameters_are_set_beside_the_paper_s(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"exact": 30, "mcap": 20, "torchgpipe_size": 10, "torchgpipe_time": 16}
    monkeypatch.setattr(mcap, "largest", lambda model, ranks: sizes)
    mcap.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 2 * 2 * 4
    assert [" ".join(cells(line)) for line in lines[2:6]] == [
        "vgg 4 mcap torchgpipe_size 2.00 1.55",
        "vgg 4 mcap torchgpipe_time 1.25 1.55",
        "vgg 4 exact torchgpipe_size 3.00 -",
        "vgg 4 exact torchgpipe_time 1.88 -",
    ]


def test_others_machines_are_simulated_from_what_they_published(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """What a GPU computes is the published time, however the layers share it.

    Sums and stragglers come on top.
    """
    series = scaling.ALL_SERIES[0]
    one = replace(
        series, choices={name: series.choices[name] for name in list(series.choices)[::2]}
    )
    scaling.show(one, read_table(scaling.TABLE)[series.name][:2])
    _, _, first, second, shown, fixed = capsys.readouterr().out.splitlines()
    assert " ".join(cells(first)) == "8 208 dgx1_v100 148.3 147.2 -0.8 0.1 2.9"
    assert " ".join(cells(second)).startswith("16 208 dgx2_v100 147.7 148.0 ")
    assert (
        shown.strip().startswith("median error 0.5 % by container 18.12") and "fixed time" in fixed
    )


def test_a_base_of_several_gpus_holds_their_sum() -> None:
    series = scaling.ALL_SERIES[1]
    (base,) = series.choices["one node"].values()
    spec = scaling.spec_of(series, base, base.gpus, base.images)
    assert scaling.quiet_s(spec) == pytest.approx(base.step_s, rel=1e-6)


def test_an_image_in_a_smaller_batch_takes_longer_as_in_inference() -> None:
    base = scaling.Base("dgx1_v100", 1, 200, 0.2, {50: 1000.0, 100: 1600.0, 200: 2000.0})
    assert base.image_s(200) == pytest.approx(0.001)
    assert base.image_s(50) == pytest.approx(0.002)
    assert base.image_s(75) == pytest.approx(
        0.001 * (50 + 62.5) / 2 / 75 / 0.5
    )  # half-way between 50 and 62.5 ms
    assert replace(base, inference={}).image_s(50) == pytest.approx(0.001)


V06 = """
:::MLL 1556733699.711 global_batch_size: {"value": 100, "metadata": {}}
:::MLL 1556733699.712 train_samples: {"value": 1000, "metadata": {}}
:::MLL 1556733700.000 run_start: {"value": null, "metadata": {}}
:::MLL 1556733700.000 block_start: {"value": null, "metadata": {"first_epoch_num": 1, "epoch_count": 4}}
:::MLL 1556733780.000 block_stop: {"value": null, "metadata": {"first_epoch_num": 1}}
:::MLL 1556733790.000 block_start: {"value": null, "metadata": {"first_epoch_num": 5, "epoch_count": 4}}
:::MLL 1556733791.000 block_start: {"value": null, "metadata": {"first_epoch_num": 9, "epoch_count": 4}}
:::MLL 1556733870.000 block_stop: {"value": null, "metadata": {"first_epoch_num": 5}}
"""


def v07(*times_ms: int) -> str:
    def line(key: str, time_ms: int, value: object = None, **metadata: object) -> str:
        return ":::MLLOG " + json.dumps(
            {"time_ms": time_ms, "key": key, "value": value, "metadata": metadata}
        )

    lines = [line("global_batch_size", 1, 100), line("train_samples", 2, 1000)]
    for number, time_ms in enumerate(times_ms):
        start_ms = 100_000 * (number + 1)
        lines += [
            line("epoch_start", start_ms, epoch_num=number),
            line("epoch_stop", start_ms + time_ms),
        ]
    return "\n".join([*lines, "a line of the program's own"])


def mlperf_result(folder: Path, system: str, *texts: str, nodes: int = 2) -> None:
    place = folder / "round/results" / system / "resnet"
    place.mkdir(parents=True)
    for number, text in enumerate(texts):
        (place / f"result_{number}.txt").write_text(text)
    (folder / "round/systems").mkdir(exist_ok=True)
    facts = {"number_of_nodes": nodes, "accelerators_per_node": 4, "accelerator_model_name": "A100"}
    (folder / "round/systems" / f"{system}.json").write_text(json.dumps(facts))


def test_mlperf_s_results_become_a_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    mlperf_result(tmp_path, "s8", v07(21_000), v07(30_000, 20_000, 20_000), V06)
    mlperf_result(tmp_path, "s16", v07(10_000), nodes=4)
    mlperf_result(tmp_path, "broken", v07().replace("global_batch_size", "other"))
    mlperf_result(tmp_path, "cpus", v07(20_000), nodes=0)
    mlperf.main([str(tmp_path)])
    said = capsys.readouterr()
    assert said.err.count("left out: ") == 2
    table = tmp_path / "steps.csv"
    table.write_text(said.out)
    large, small = sorted(read_table(table)["resnet, round, A100"], key=lambda row: row.step_s)
    assert (small.accelerators, small.global_batch, small.step_s) == (8, 100, pytest.approx(2.0))
    assert (large.accelerators, large.step_s) == (16, pytest.approx(1.0))

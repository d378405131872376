"""analysis.scaling.projection.

A simulated study's bands and sensitivities, and the published figure beside it.
"""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

import analysis.scaling.projection
from analysis.__main__ import main
from analysis.plots.figure import source_mark
from analysis.scaling.points import read_points, title
from analysis.scaling.projection import (
    COMPUTE,
    PUBLISHED,
    Projection,
    machine_constants,
    project,
    varied,
)
from gems.config.resolve import resolve
from gems.config.schema import (
    BenchmarkConfig,
    CostConfig,
    MachineConfig,
    ModelConfig,
    ParallelConfig,
    RunSpec,
    ScheduleConfig,
    TrainConfig,
)
from gems.runs.simulated_run import simulated_trace
from gems.simulation.build import lowered_schedule
from gems.trace import read_trace, write_trace

MACHINE = MachineConfig(
    kind="simulated",
    link_latency_s=1e-5,
    link_bytes_per_s=1e9,
    ranks_per_node=4,
    node_latency_s=1e-6,
    node_bytes_per_s=1e10,
    contention=True,
    noise=0.01,
    calibrated_from="a data sheet",
)


def spec_of(replicas: int, machine: MachineConfig = MACHINE) -> RunSpec:
    return resolve(
        RunSpec(
            model=ModelConfig(depth=1001, version=2),
            schedule=ScheduleConfig("gems_master"),
            parallel=ParallelConfig(4, replicas=replicas, micro_batches=2),
            cost=CostConfig(name="profile", unit_s=0.01, param_bytes=10**7, activation_bytes=1),
            machine=machine,
            train=TrainConfig(steps=4),
            benchmark=BenchmarkConfig(skip_steps=1),
        )
    )


def runs(
    folder: Path, machine: MachineConfig = MACHINE, replicas: tuple[int, ...] = (1, 8, 256)
) -> list[Path]:
    paths = []
    for number in replicas:
        spec = spec_of(number, machine)
        trace = simulated_trace(spec, lowered_schedule(spec))
        trace.run_yaml = yaml.safe_dump(spec.to_dict())
        paths.append(folder / f"run{number}")
        paths[-1].mkdir()
        write_trace(paths[-1] / "trace.h5", trace)
    return paths


@pytest.fixture(autouse=True)
def few_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(analysis.scaling.projection, "NUM_DRAWS", 4)
    monkeypatch.setattr(analysis.scaling.projection, "NUM_BAND_STEPS", 5)
    monkeypatch.setattr(analysis.scaling.projection, "NUM_STEPS", 5)


def projected(paths: list[Path]) -> Projection | None:
    return project(read_points(paths), paths)


def test_each_constant_is_changed_alone() -> None:
    spec = spec_of(2)
    slower = varied(spec, {COMPUTE: 0.8, "machine.noise": 1.2})
    assert (
        slower.cost.forward == pytest.approx(1.25 * spec.cost.forward)
        and slower.cost.recompute is None
    )
    assert slower.machine == replace(spec.machine, noise=0.012)
    assert varied(spec, {"machine.link_bytes_per_s": 0.5}).machine.link_bytes_per_s == 5e8
    assert set(machine_constants(spec_of(1, replace(MACHINE, noise=0.0, node_latency_s=0.0)))) == {
        COMPUTE,
        "machine.link_latency_s",
        "machine.link_bytes_per_s",
        "machine.node_bytes_per_s",
    }


def test_a_band_holds_its_points_and_each_constant_pulls_its_way(tmp_path: Path) -> None:
    found = projected(runs(tmp_path))
    assert found is not None and found.calibrated_from == "a data sheet"
    base, _, last = found.places
    assert (base.efficiency, base.low, base.high) == (1.0, pytest.approx(1.0), pytest.approx(1.0))
    assert last.low < last.efficiency < 1 and last.low < last.high < 1
    assert last.published is not None and last.published[0] == 0.9732
    effects = {each.constant: each.more - each.less for each in found.sensitivities}
    assert effects["machine.link_bytes_per_s"] > 0 > effects["machine.noise"]
    assert effects[COMPUTE] < 0  # a faster device waits longer for the same links
    assert {each.ranks for each in found.sensitivities} == {1024}


@pytest.mark.parametrize("machine", [replace(MACHINE, calibrated_from=None)])
def test_a_machine_of_unknown_origin_has_no_band(tmp_path: Path, machine: MachineConfig) -> None:
    assert projected(runs(tmp_path, machine, (1, 2))) is None


def test_the_figure_of_another_model_is_not_beside_it() -> None:
    assert ("gems_master", "resnet-1001-v2", 1024) in PUBLISHED
    assert ("gems_master", "resnet-110-v2", 1024) not in PUBLISHED
    assert ("gems_master", "resnet-1001-v2", 512) not in PUBLISHED


def test_pictures_of_predictions_tell_their_error(tmp_path: Path) -> None:
    paths = runs(tmp_path, replace(MACHINE, held_out_error=0.031), (1, 2))
    assert "held-out error of step times 3.1 %" in title(read_points(paths))[1]
    mark = source_mark("simulated", read_trace(paths[0] / "trace.h5").attributes)
    assert mark == "SIMULATED, a prediction; held-out error of step times 3.1 %"
    assert source_mark("measured", {"held_out_error": 0.1}) == "measured"


def test_the_command_writes_pictures_and_tables(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    paths = list(map(str, runs(tmp_path, replace(MACHINE, held_out_error=0.031), (1, 256))))
    assert main(["scaling", *paths, "--out", str(tmp_path / "out"), "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    for name in (
        "scaling.png",
        "projection.png",
        "projection.pdf",
        "projection.csv",
        "sensitivity.csv",
    ):
        assert (tmp_path / "out" / name).stat().st_size > 0
    rows = list(csv.DictReader((tmp_path / "out" / "projection.csv").read_text().splitlines()))
    assert [row["published_efficiency"] for row in rows] == ["", "0.9732"]
    assert rows[1]["held_out_error"] == "0.031" and len(answer["bands"]) == 2
    assert len(answer["sensitivities"]) == 6
    assert main(["scaling", *paths, "--out", str(tmp_path / "out")]) == 0
    out = capsys.readouterr().out
    assert "held-out error of step times 3.1 %" in out and "published 97.32" in out

"""Predictions for machine=h200 against the steps of one H200 in docs/gpu.jsonl."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from gems.cli.framework import Options
from gems.cli.simulate import show_simulation
from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.plan.evaluate import simulate

LINES = Path(__file__).resolve().parents[2] / "docs" / "gpu.jsonl"
GRAPHS = "train.cuda_graphs=true"
MIDDLE_PX = 512


def measured() -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in LINES.read_text().splitlines()]
    (figures,) = (line["figures"] for line in lines if line["row"] == "launches")
    return list(figures)


def spec_of(figures: dict[str, Any], *words: str) -> RunSpec:
    side_px = figures["side_px"]
    of_row = [f"model={figures['model']}", f"train.precision={figures['precision']}"]
    of_row += [f"data.{side}_px={side_px}" for side in ("height", "width")]
    counts = [f"parallel.{key}=1" for key in ("partitions", "micro_batches", "micro_batch_size")]
    fixed = ["machine=h200", "cost=profile", "data=synthetic", "schedule=1f1b", *counts]
    return compose([*fixed, *of_row, *words])


def test_steps_are_near_those_of_an_h200() -> None:
    """Each eager and replayed step within 15 %, half of them within 8 %.

    Of each network and precision with the smallest and the largest image.
    """
    figures = measured()
    assert len(figures) == 8
    errors = {}
    for row in (row for row in figures if row["side_px"] != MIDDLE_PX):
        for key, words in (("engine_s", ()), ("graph_s", (GRAPHS,))):
            name = row["model"], row["side_px"], row["precision"], key
            errors[name] = simulate(spec_of(row, *words)).step_s / row[key] - 1
    assert {name: error for name, error in errors.items() if abs(error) > 0.15} == {}
    assert median(map(abs, errors.values())) < 0.08


@pytest.mark.parametrize(
    ("words", "host"), [((), "26.8 us of the host"), ((GRAPHS,), "none of the host (CUDA graphs)")]
)
def test_constants_and_their_source_are_printed(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...], host: str
) -> None:
    small = {"model": "resnet20_v1", "side_px": 32, "precision": "float32"}
    show_simulation(spec_of(small, *words), Options())
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if "launch costs  " in line)
    assert f"an operator takes {host} and at least 5.78 us of the device" in line
    assert line.endswith("2026-11-26 on one H200, torch 2.11+cu130, driver 580.159, commit a5eafac")
    show_simulation(spec_of(small, *words, "machine.launch_s=null"), Options())
    assert "launch" not in capsys.readouterr().out


def test_strips_wait_for_the_host_unless_they_are_graphs() -> None:
    small = {"model": "resnet20_v1", "side_px": 64, "precision": "float32"}
    whole = ("model.norm=frozen_batch", "model.depth=8")
    strips = (*whole, "parallel.strips=4")
    whole_s = simulate(spec_of(small, *whole)).step_s
    eager_s = simulate(spec_of(small, *strips)).step_s
    assert eager_s > 2 * whole_s
    assert simulate(spec_of(small, *strips, GRAPHS)).step_s < eager_s / 2

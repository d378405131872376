"""`gems-analysis memory`: the picture of an answer of `gems memory`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from analysis.__main__ import main
from analysis.plots.answers import memory_plans_figure

MIB = 2**20
ANSWER: dict[str, Any] = {
    "model": "made_up",
    "height_px": 8,
    "width_px": 8,
    "schedule": "1f1b",
    "partitions": 1,
    "profile_source": "fake",
    "profile_device": "cpu",
    "limit_bytes": 60 * MIB,
    "curves": [
        {
            "policy": "keep",
            "rank": 0,
            "device": [[0.0, 50 * MIB], [0.001, 70 * MIB]],
            "host": [[0.001, 0]],
        },
        {
            "policy": "plan",
            "rank": 0,
            "device": [[0.0, 50 * MIB], [0.002, 55 * MIB]],
            "host": [[0.002, 15 * MIB]],
        },
    ],
}


def test_a_line_a_policy_in_ms_and_mib_with_the_limit() -> None:
    device, host = memory_plans_figure(ANSWER).axes
    lines = {line.get_label(): line for line in device.lines}
    assert set(lines) == {"keep", "plan", "limit"}
    assert list(lines["keep"].get_xdata()) == [0.0, 1.0] and list(lines["keep"].get_ydata()) == [
        50.0,
        70.0,
    ]
    assert set(lines["limit"].get_ydata()) == {60.0}
    assert list(host.lines[1].get_ydata()) == [15.0] and "MiB" in host.get_ylabel()


def test_a_limit_far_above_is_left_out() -> None:
    device, _ = memory_plans_figure({**ANSWER, "limit_bytes": 900 * MIB}).axes
    assert "limit" not in {line.get_label() for line in device.lines}
    assert device.get_ylim()[1] < 100


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    document = tmp_path / "memory.json"
    out = tmp_path / "memory.svg"
    document.write_text(json.dumps(ANSWER))
    assert main(["memory", str(document), "--out", str(out)]) == 0
    assert capsys.readouterr().out.strip() == str(out) and "SIMULATED" in out.read_text()

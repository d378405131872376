"""A whole run whose rank is killed by SIGKILL goes on where it was, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from analysis.io.load import load_trace
from gems.engine.checkpoint import weights
from gems.runs.heartbeat import read_beat
from gems.utils.atomic_io import read_json

STEPS = 40
LIMIT_S = 240.0
LOOK_S = 0.001
SMALL = [
    "model=resnet20_v1",
    "model.depth=8",
    "model.width=4",
    "model.norm=group",
    "data=synthetic",
    "data.height_px=16",
    "data.width_px=16",
    "data.train_samples=256",
    "data.validation_samples=8",
    "parallel.partitions=2",
    "parallel.micro_batch_size=2",
    "parallel.replications=2",
    "parallel.parts=1",
    "schedule=gems_master",
    "machine.device=cpu",
    "optimizer.name=adam",
    "optimizer.lr=0.001",
    f"train.steps={STEPS}",
    "train.checkpoint_steps=2",
    "cluster=local",
]


def _command(runs: Path, overrides: list[str]) -> list[str]:
    return [sys.executable, "-m", "jobs", "submit", "--json", f"runs_dir={runs}", *overrides]


def run(runs: Path, overrides: list[str]) -> Path:
    """Start a run or continue it, wait for its end and return its folder."""
    ended = subprocess.run(
        _command(runs, overrides), capture_output=True, text=True, timeout=LIMIT_S
    )
    if ended.returncode:
        raise SystemExit(f"exit code {ended.returncode}\n{ended.stderr[-3000:]}")
    return Path(json.loads(ended.stdout)["run_folder"])


def run_and_kill(runs: Path, overrides: list[str], chance: random.Random) -> str | None:
    """Continue a run and kill a rank some steps later.

    Return where it was, or None if the run ended before.
    """
    old = {
        beat.pid
        for path in runs.glob("killed-*/heartbeat/rank*")
        if (beat := read_beat(path)) is not None
    }
    process = subprocess.Popen(
        _command(runs, overrides), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    rank = chance.randrange(2)
    wait = chance.randrange(1, 5)
    victim = None
    moment_s = chance.random() * 0.2
    goal: int | None = None
    deadline_s = time.monotonic() + LIMIT_S
    while process.poll() is None and time.monotonic() < deadline_s:
        path = next(runs.glob(f"killed-*/heartbeat/rank{rank:04d}"), None)
        beat = None if path is None else read_beat(path)
        if path is not None and beat is not None and beat.pid not in old and beat.step >= 0:
            goal = beat.step + wait if goal is None else goal
            if beat.step >= goal:
                time.sleep(moment_s)
                victim = read_beat(path)
                break
        time.sleep(LOOK_S)
    if victim is None or victim.step < 0:
        process.wait(LIMIT_S)
        return None
    os.kill(victim.pid, signal.SIGKILL)
    process.wait(LIMIT_S)
    return f"rank {rank}, step {victim.step}, {victim.action}"


def bits(whole: Path, killed: Path, steps: int = STEPS) -> dict[str, Any]:
    """Return whether two runs have the same losses and the same weights to the bit."""
    curves, states = _outcomes(whole, killed)
    same_names = [list(layer) for layer in states[0].values()] == [
        list(layer) for layer in states[1].values()
    ]
    return {
        "equal_losses": (
            curves[0]["loss"].tobytes() == curves[1]["loss"].tobytes() and len(curves[0]) == steps
        ),
        "equal_weights": same_names and all(value.equal(other) for value, other in _pairs(states)),
        "attempts_in_curve": len(set(curves[1]["attempt"].tolist())),
    }


def _outcomes(*folders: Path) -> tuple[list[Any], list[dict[str, Any]]]:
    return [load_trace(folder).trace.steps for folder in folders], [
        weights.load(folder) for folder in folders
    ]


def _pairs(states: list[dict[str, Any]]) -> Iterator[tuple[Any, Any]]:
    for name, layer in states[0].items():
        for key, value in layer.items():
            yield value, states[1][name][key]


@pytest.mark.timeout(280)
def test_a_run_killed_in_any_step_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    whole = run(tmp_path, [*SMALL, "name=whole"])
    assert run_and_kill(tmp_path, [*SMALL, "name=killed"], random.Random(5)) is not None
    (killed,) = tmp_path.glob("killed-*")
    assert (
        read_json(killed / "status.json")["state"] == "failed"
        and not (killed / "result.json").exists()
    )
    assert run(tmp_path, [*SMALL, "name=killed"]) == killed
    found = bits(whole, killed, STEPS)
    assert found["equal_losses"] and found["equal_weights"]
    assert read_json(killed / "result.json")["num_steps"] == STEPS

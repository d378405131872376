"""A run whose rank is killed goes on where it was, and ends as if nothing had happened."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.io.load import load_trace
from gems.engine.checkpoint import weights
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import read_beat
from gems.utils.atomic_io import read_json
from tests.helpers.job_helpers import wait_until

STEPS = 40
LIMIT_S = 240.0
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


def submit(runs: Path, name: str) -> subprocess.Popen[str]:
    """Start a run or continue it."""
    words = ["submit", "--json", f"runs_dir={runs}", f"name={name}", *SMALL]
    return subprocess.Popen(
        [sys.executable, "-m", "jobs", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )


def run(runs: Path, name: str) -> Path:
    """Run to the end, and return the folder."""
    out, _ = submit(runs, name).communicate(timeout=LIMIT_S)
    return Path(json.loads(out)["run_folder"])


@pytest.mark.timeout(280)
@pytest.mark.usefixtures("warm")
def test_a_run_killed_in_any_step_ends_with_the_bits_of_one_that_was_not(tmp_path: Path) -> None:
    whole = run(tmp_path, "whole")
    process = submit(tmp_path, "killed")
    wait_until(lambda: any(tmp_path.glob("killed-*")), LIMIT_S)
    (killed,) = tmp_path.glob("killed-*")
    path = RunFolder(killed).heartbeat(1)
    wait_until(lambda: (beat := read_beat(path)) is not None and beat.step > 2, LIMIT_S)
    beat = read_beat(path)
    assert beat is not None and beat.step < STEPS - 1
    os.kill(beat.pid, signal.SIGKILL)
    process.communicate(timeout=LIMIT_S)
    assert read_json(killed / "status.json")["state"] == "failed"
    assert not (killed / "result.json").exists()
    assert run(tmp_path, "killed") == killed
    folders = (whole, killed)
    losses = [load_trace(folder).trace.steps["loss"] for folder in folders]
    assert losses[0].tobytes() == losses[1].tobytes() and len(losses[0]) == STEPS
    layers = [weights.load(folder) for folder in folders]
    assert [list(layer) for layer in layers[0].values()] == [
        list(layer) for layer in layers[1].values()
    ]
    for name, layer in layers[0].items():
        assert all(value.equal(layers[1][name][key]) for key, value in layer.items())
    assert read_json(killed / "result.json")["num_steps"] == STEPS

"""Commands in a folder whose packages are called like ours."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

NAMES = ("analysis", "conf", "examples", "gems", "jobs", "scripts", "tests")
NET = """
from torch import nn


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 14 * 14, 2))
"""
RUN = [
    "schedule=1f1b",
    "parallel.partitions=1",
    "parallel.micro_batches=2",
    "parallel.micro_batch_size=2",
    "model.target=mine.Net",
    "data=synthetic",
    "data.num_classes=2",
    "data.height_px=16",
    "data.width_px=16",
    "train.evaluate=false",
]


@pytest.mark.cases
@pytest.mark.timeout(300)
def test_folders_of_the_user_that_are_called_like_ours(tmp_path: Path) -> None:
    for name in NAMES:
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"raise ImportError('{name} of the user')")
    (tmp_path / "mine.py").write_text(NET)
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}

    def run(program: str, *words: str) -> str:
        ended = subprocess.run(
            [Path(sys.executable).with_name(program), *words],
            cwd=tmp_path,
            env=environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=200,
        )
        assert ended.returncode == 0, f"{words}\n{ended.stdout}\n{ended.stderr}"
        return ended.stdout

    run("gems", "schedule", *RUN)
    run(
        "gems-jobs",
        "submit",
        "cluster=local",
        "name=small",
        "train.steps=2",
        "benchmark.skip_steps=0",
        *RUN,
    )
    assert "finished" in run("gems-jobs", "status")

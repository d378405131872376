"""Commands with machine=cuda, as a user gives them, on the fake device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.io.load import load_parts
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import read_json
from tests.fake_cuda.cuda import NAME

ROOT = Path(__file__).resolve().parent.parent.parent
LIMIT_S = 240
SMALL = [
    "machine=cuda",
    "data=synthetic",
    "data.height_px=32",
    "data.width_px=32",
    "data.num_classes=3",
    "data.train_samples=16",
    "data.validation_samples=4",
    "model=resnet20_v1",
    "model.width=4",
    "parallel.micro_batches=4",
    "parallel.micro_batch_size=1",
]


def run(*words: str) -> subprocess.CompletedProcess[str]:
    ended = subprocess.run(
        [sys.executable, "-m", *words], cwd=ROOT, capture_output=True, text=True, timeout=LIMIT_S - 20
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


@pytest.mark.timeout(LIMIT_S)
def test_a_submitted_run_trains_on_the_gpu(tmp_path: Path) -> None:
    words = (f"runs_dir={tmp_path}", "name=small", "parallel.partitions=2", "train.steps=3", "schedule=gems_master")
    run("jobs", "submit", *SMALL, *words)
    (path,) = tmp_path.glob("small-*")
    folder = RunFolder(path)
    assert read_json(folder.result_json)["num_steps"] == 3
    attributes = load_parts(path).trace.attributes
    assert attributes["source"] == "measured" and attributes["device"] == NAME


@pytest.mark.timeout(LIMIT_S)
def test_a_profile_is_measured_on_the_gpu(tmp_path: Path) -> None:
    found = json.loads(run("gems", "profile", "--json", *SMALL, "profile=measured", f"cache_dir={tmp_path}").stdout)
    assert found["source"] == "measured" and found["device"] == NAME
    assert all(layer["forward_s"] > 0 and layer["stash_bytes"] >= 0 for layer in found["layers"])


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("memory", ["vdnn_all memory.min_offload_bytes=0", "recompute"])
def test_gradients_on_the_gpu_are_those_of_one_process(memory: str) -> None:
    words = f"memory={memory} train.precision=float64 parallel.partitions=2 schedule=1f1b".split()
    found = json.loads(run("gems", "verify", "--json", *SMALL, *words).stdout)
    assert found["max_rel_error"] <= 1e-12

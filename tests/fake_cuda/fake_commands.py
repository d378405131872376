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
        [sys.executable, "-m", *words],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=LIMIT_S - 20,
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended


@pytest.mark.timeout(LIMIT_S)
def test_a_submitted_run_trains_on_the_gpu(tmp_path: Path) -> None:
    words = (
        f"runs_dir={tmp_path}",
        "name=small",
        "parallel.partitions=2",
        "train.steps=3",
        "schedule=gems_master",
    )
    run("jobs", "submit", *SMALL, *words)
    (path,) = tmp_path.glob("small-*")
    folder = RunFolder(path)
    assert read_json(folder.result_json)["num_steps"] == 3
    attributes = load_parts(path).trace.attributes
    assert attributes["source"] == "measured" and attributes["device"] == NAME


@pytest.mark.timeout(LIMIT_S)
def test_a_profile_is_measured_on_the_gpu(tmp_path: Path) -> None:
    found = json.loads(
        run("gems", "profile", "--json", *SMALL, "profile=measured", f"cache_dir={tmp_path}").stdout
    )
    assert found["source"] == "measured" and found["device"] == NAME
    assert all(layer["forward_s"] > 0 and layer["stash_bytes"] >= 0 for layer in found["layers"])
    assert found["facts"]["library_bytes"] == 2**20  # the workspace of its one stream


@pytest.mark.timeout(LIMIT_S)
@pytest.mark.parametrize("memory", ["vdnn_all memory.min_offload_bytes=0", "recompute"])
def test_gradients_on_the_gpu_are_those_of_one_process(memory: str) -> None:
    words = f"memory={memory} train.precision=float64 parallel.partitions=2 schedule=1f1b".split()
    found = json.loads(run("gems", "verify", "--json", *SMALL, *words).stdout)
    assert found["max_rel_error"] <= 1e-12


MIXED = [
    "machine=cuda",
    "data=synthetic",
    "data.height_px=64",
    "data.width_px=64",
    "data.num_classes=3",
    "parallel.micro_batch_size=1",
    "train.precision=bf16_mixed",
]


@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize(
    "model", ["convnext_tiny", "nf_resnet50 model.width=8", "resnet50 model.width=8", "unet"]
)
def test_mixed_precision_keeps_what_a_profile_without_a_gpu_says(
    model: str, tmp_path: Path
) -> None:
    """CUDA's autocast computes norms and sums in float32, the processor's does not."""
    words = (*MIXED, *f"model={model}".split(), f"cache_dir={tmp_path}", "profile.repetitions=1")
    fake, measured = (
        json.loads(run("gems", "profile", "--json", *words, f"profile={name}").stdout)["layers"]
        for name in ("fake", "measured")
    )
    for key in (
        "stash_bytes",
        "saved",
        "held_for_weights_bytes",
        "plain_peak_bytes",
        "cheap_bytes",
    ):
        assert [layer[key] for layer in fake] == [layer[key] for layer in measured], key


@pytest.mark.timeout(LIMIT_S)
def test_strips_in_mixed_precision_keep_what_is_predicted(tmp_path: Path) -> None:
    words = (
        "model=convnext_tiny",
        "parallel.strips=2",
        "parallel.micro_batches=2",
        f"cache_dir={tmp_path}",
    )
    found = json.loads(run("gems", "verify", "--json", *MIXED, *words).stdout)
    assert found["peak_activation_bytes"] == found["predicted_activation_bytes"]

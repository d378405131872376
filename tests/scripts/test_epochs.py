"""The study of epochs by global batch: what a training takes, and the file that the planner reads."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from gems.search.hybrid.inputs import read_epochs
from scripts.bench.epochs import Task, _batches, epochs_to_target, main, make_task

SMALL = [
    "data.train_samples=64",
    "data.validation_samples=32",
    "data.height_px=8",
    "data.width_px=8",
]


@pytest.fixture(scope="module")
def task() -> Task:
    return make_task(SMALL, target_loss=0.65, most_epochs=4.0)


def test_every_sample_is_seen_once_an_epoch() -> None:
    batches = _batches(10, 4, seed=0)
    seen = torch.cat([next(batches) for _ in range(5)]).tolist()
    assert sorted(seen[:10]) == sorted(seen[10:]) == list(range(10)) and seen[:10] != seen[10:]


def test_micro_batches_change_nothing(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = epochs_to_target(task, 32, 0.1, seed=0)
    monkeypatch.setattr("scripts.bench.epochs.MICRO_BATCH", 8)
    assert whole is not None and whole > 0
    assert epochs_to_target(task, 32, 0.1, seed=0) == pytest.approx(whole, rel=1e-3)


def test_what_never_arrives_is_none(task: Task) -> None:
    images, labels = task.validation
    hopeless = Task(task.spec, task.train, (images, 1 - labels), 1e-6, 0.5)
    assert epochs_to_target(hopeless, 32, 0.1, seed=0) is None


def test_the_file_is_what_the_planner_reads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "epochs.json"
    words = f"--out {out} --batches 4,32 --seeds 1 --target-loss 0.6 --most-epochs 20"
    assert main([*words.split(), *SMALL]) == 0
    said = capsys.readouterr().out
    document = json.loads(out.read_text())
    assert {run["global_batch"] for run in document["runs"]} | set(document["missed"]) == {4, 32}
    found = read_epochs(out)
    assert found.fit is not None and found.num_samples == 64
    assert "E_min" in said and str(out) in said


def test_no_batch_at_the_target_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = f"--out {tmp_path}/e.json --batches 32 --seeds 1 --target-loss 0 --most-epochs 1"
    assert main([*words.split(), *SMALL]) == 2
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("epochs: --target-loss=0.0: is reached by no batch")
    )

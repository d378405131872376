"""`gems evaluate` and `gems export` on a run of two ranks that was trained here."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gems
from gems.cli.evaluate import run_for_inference, weights_folder
from gems.data import open_dataset
from gems.errors import ConfigError
from gems.runs.folder import RunFolder

ROOT = Path(__file__).parents[2]
WORDS = (
    "data=synthetic", "data.height_px=16", "data.width_px=16", "data.validation_samples=10", "model.depth=8",
    "schedule=1f1b", "parallel.partitions=2", "parallel.micro_batch_size=4", "train.steps=6", "train.validate_steps=3",
    "train.monitor=loss", "optimizer.lr=0.2", "cluster=local",
)  # fmt: skip


def call(folder: Path, package: str, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", package, *words], cwd=folder, env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=250,
    )  # fmt: skip


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that validated after three steps and at its end."""
    folder = tmp_path_factory.mktemp("trained")
    ended = call(folder, "jobs", "submit", *WORDS)
    assert ended.returncode == 0, ended.stderr
    (run,) = (folder / "runs").iterdir()
    return run


def test_one_rank_measures_what_two_ranks_did(trained: Path) -> None:
    ended = call(trained.parents[1], "gems", "evaluate", "run", "parallel.partitions=1", "schedule=gpipe", "--json")
    assert ended.returncode == 0, ended.stderr
    found = json.loads(ended.stdout)
    result = json.loads(RunFolder(trained).result_json.read_text())
    assert found["num_validation"] == result["num_validation"] == 10
    assert found["validation_accuracy"] == result["validation_accuracy"]
    assert found["validation_loss"] == pytest.approx(result["validation_loss"], rel=1e-5)


def test_the_model_in_one_piece_gives_the_same_loss(trained: Path) -> None:
    spec = RunFolder(trained).read_spec()
    data = open_dataset(spec.data, spec.seed)
    images = torch.stack([torch.from_numpy(data.image("validation", index)) for index in range(10)])
    labels = torch.tensor([data.label("validation", index) for index in range(10)])
    with torch.no_grad():
        loss = torch.nn.functional.cross_entropy(gems.load_model(trained)(images), labels)
    result = json.loads(RunFolder(trained).result_json.read_text())
    assert float(loss) == pytest.approx(result["validation_loss"], rel=1e-5)


def test_best_weights_are_those_of_the_best_validation(trained: Path) -> None:
    best = json.loads(RunFolder(trained).best_json.read_text())
    assert best["step"] in (3, 6) and best["metric"] == "validation_loss"
    folder = weights_folder(trained, "best")
    assert sorted(path.name for path in folder.iterdir()) == ["stage0000.pt", "stage0001.pt"]
    spec, path = run_for_inference([str(trained)], "best", "evaluate")
    assert (spec.train.initial_checkpoint, path) == (str(folder), trained)


def test_overrides_change_ranks_data_and_micro_batches(trained: Path) -> None:
    words = [str(trained), "parallel.partitions=3", "parallel.micro_batches=6", "data=tissue", "data.height_px=32"]
    spec, _ = run_for_inference(words, "last", "evaluate")
    assert (spec.world_size, spec.parallel.micro_batches, spec.cluster.ranks_per_node) == (3, 6, 3)
    assert (spec.data.name, spec.data.height_px, spec.data.width_px) == ("tissue", 32, 16)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["parallel.partitions=1"], r"^run=none: must be one run; gems evaluate RUN"),
        (["a", "b"], r"^run=a b: must be one run"),
        (["{run}", "parallel.partition=1"], r"^parallel\.partition=1: unknown key; nearest: parallel\.partitions"),
        (["{run}", "data=tisue"], r"^data=tisue: allowed: .*nearest: tissue"),
    ],
)
def test_refusals(trained: Path, words: list[str], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        run_for_inference([word.format(run=trained) for word in words], "last", "evaluate")


def test_a_run_without_best_weights(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^--weights=best: .* has none; train with train\.monitor=METRIC$"):
        weights_folder(tmp_path, "best")
    with pytest.raises(ConfigError, match=r"^--weights=average: .* has none; train with train\.ema_decay"):
        weights_folder(tmp_path, "average")
    (tmp_path / "checkpoint" / "average").mkdir(parents=True)
    assert weights_folder(tmp_path, "average") == tmp_path / "checkpoint" / "average"

"""The example of training from a script: classes of the script, and objects that it has made."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import gems
from gems.errors import ConfigError
from gems.launch.local_launcher import mpiexec_argv, rank_environment
from gems.utils import given
from tests.helpers.processes import python

ROOT = Path(__file__).parents[2]


@pytest.fixture
def tiles(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, count in (("train", 16), ("validation", 6)):
        labels = np.arange(count) % 2
        images = rng.integers(100, size=(count, 3, 32, 32), dtype=np.uint8) + (
            100 * labels[:, None, None, None]
        )
        np.save(tmp_path / f"{split}.npy", images.astype(np.uint8))
        (tmp_path / f"{split}.csv").write_text("".join(f"{label}\n" for label in labels))
    return tmp_path


@pytest.mark.usefixtures("warm")
def test_the_script_trains_in_two_ranks_and_its_network_is_found_again(tiles: Path) -> None:
    argv = mpiexec_argv(2, [sys.executable, "-m", "examples.train_script", str(tiles)])
    environment = rank_environment(1) | {"PYTHONPATH": str(ROOT)}
    ended = subprocess.run(
        argv, env=environment, cwd=tiles, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("accuracy") == 2
    (run,) = (tiles / "runs").iterdir()
    model = gems.load_model(run)
    assert type(model).__name__ == "Net"
    assert model(torch.zeros(1, 3, 32, 32)).shape == (1, 2)


class Pairs:
    """Eight samples of constant images."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        return torch.full((3, 8, 8), float(index % 2)), index % 2


@pytest.mark.usefixtures("warm")
def test_objects_of_a_program(tmp_path: Path) -> None:
    """A network that was made before, whose weights it starts from, and a dataset that no name leads to."""
    network = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, 2))
    words = [
        "schedule=1f1b",
        "data.height_px=8",
        "data.width_px=8",
        "parallel.micro_batches=2",
        "train.steps=1",
        "benchmark.skip_steps=0",
        "optimizer.lr=1e-20",
        f"runs_dir={tmp_path}",
    ]
    code = (
        f"import gems, tests.examples.test_train_script as t, torch; t.train_objects({words!r},"
        f" {str(tmp_path)!r})"
    )
    torch.save(network, tmp_path / "network.pt")
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    ended = python("-c", code, env=environment)
    assert ended.returncode == 0, ended.stderr
    (run,) = (path for path in tmp_path.iterdir() if path.is_dir())
    saved = {
        name: value for layer in gems.load_weights(run).values() for name, value in layer.items()
    }
    expected = network.state_dict()
    assert saved.keys() == expected.keys()
    assert all(torch.equal(saved[name], expected[name]) for name in expected)
    with pytest.raises(ConfigError, match=r"^model\.target=Sequential: was handed in by a script"):
        gems.load_model(run)


def train_objects(words: list[str], folder: str) -> None:
    network = torch.load(Path(folder) / "network.pt", weights_only=False)
    gems.train(gems.compose(words), model=network, dataset=Pairs())


def test_names_of_objects(monkeypatch: pytest.MonkeyPatch) -> None:
    assert given.target_of("model", nn.Linear) == ("torch.nn.modules.linear:Linear", {}, None)
    target, kwargs, _ = given.target_of("loss", lambda: 3)
    assert target == given.TAKE and given.take(**kwargs) == 3
    first, second = (given.target_of("model", nn.Linear(2, size))[1]["digest"] for size in (2, 3))
    assert first != second
    monkeypatch.setattr(given, "_objects", {})
    with pytest.raises(ConfigError, match="was handed in by a script"):
        given.take("model", "Net", "")

"""The example of a user's own dataset.

Both ends of a pipeline read it, and train as one process does.
"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from gems.__main__ import VERBS
from gems.cli.framework import main
from gems.config.schema import DataConfig
from gems.data import open_dataset


@pytest.fixture
def root(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    for split, count in (("train", 12), ("validation", 4)):
        np.save(
            tmp_path / f"{split}.npy", rng.integers(256, size=(count, 3, 32, 32), dtype=np.uint8)
        )
        (tmp_path / f"{split}.csv").write_text("".join(f"{index % 2}\n" for index in range(count)))
    return tmp_path


def test_tiles_are_read(root: Path) -> None:
    data = DataConfig(target="examples.own_tiles.Tiles", kwargs={"root": str(root)})
    found = open_dataset(data, seed=0)
    assert (found.num_train, found.num_validation) == (12, 4)
    stored = np.load(root / "validation.npy")[1]
    np.testing.assert_allclose(found.image("validation", 1), stored / 255 - 0.5, atol=1e-6)
    plain = np.load(root / "train.npy")[3] / np.float32(255) - np.float32(0.5)
    flips = {
        bool(np.allclose(found.image("train", 3, draw), plain[:, :, ::-1], atol=1e-6))
        for draw in range(8)
    }
    assert flips == {False, True}


@pytest.mark.usefixtures("warm")
def test_gradients_are_those_of_one_process(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "data.target=examples.own_tiles.Tiles",
        f"data.kwargs.root={root}",
        "schedule=1f1b",
        "parallel.partitions=2",
        "parallel.micro_batches=2",
        "parallel.micro_batch_size=2",
        "data.num_workers=1",
    ]
    assert main("gems", VERBS, ["verify", *words, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_rel_error"] <= 1e-12

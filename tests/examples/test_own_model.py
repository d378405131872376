"""The example of a model: it is split where it should be, and trains as in one process."""

from __future__ import annotations

import json

import pytest

from gems.__main__ import VERBS
from gems.cli.framework import main
from gems.config.compose import compose
from gems.models import layers_of

WORDS = [
    "model.target=examples.own_model.TileNet", "model.kwargs={width:4}", "data=synthetic", "schedule=1f1b",
    "parallel.partitions=2", "parallel.micro_batches=2", "parallel.micro_batch_size=2",
]  # fmt: skip


def test_layers() -> None:
    spec = compose(WORDS)
    assert [layer.name for layer in layers_of(spec.model, spec.data)]


def test_gradients_are_those_of_one_process(capsys: pytest.CaptureFixture[str]) -> None:
    assert main("gems", VERBS, ["verify", *WORDS, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["max_rel_error"] <= 1e-12

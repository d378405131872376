"""The example of a model is split into layers; tests/mpi/test_tasks.py has its gradients."""

from __future__ import annotations

from gems.config.compose import compose
from gems.models import layers_of

WORDS = [
    "model.target=examples.own_model.TileNet",
    "model.kwargs={width:4}",
    "data=synthetic",
    "schedule=1f1b",
    "parallel.partitions=2",
    "parallel.micro_batches=2",
    "parallel.micro_batch_size=2",
]


def test_layers() -> None:
    spec = compose(WORDS)
    assert [layer.name for layer in layers_of(spec.model, spec.data)]

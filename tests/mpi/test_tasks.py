"""Losses of every task with labels that weigh unevenly, and models with several outputs, against one process."""

from __future__ import annotations

import csv
from dataclasses import replace

import numpy as np
import pytest
import tifffile
import torch

from gems.autograd.outputs import as_tuple
from gems.config.schema import DataConfig, LossConfig, ModelConfig, RunSpec
from gems.data import open_dataset, task_of
from gems.engine.batch_loader import BatchLoader
from gems.engine.evaluation.measure import evaluate
from gems.engine.evaluation.predictions import Numbered, write_predictions
from gems.engine.rank import Rank
from gems.engine.transport.mpi import broadcast, meet
from gems.engine.verification.compare import compare
from gems.errors import ConfigError
from gems.losses.summed import open_loss
from gems.models import layers_of
from gems.models.build import build_layers
from tests.helpers import toys
from tests.helpers.device import DEVICE
from tests.helpers.toys import plan_of
from tests.mpi.conftest import sub_world

OWN = "tests.helpers.own_losses"
UNET = {"name": "unet", "depth": 3, "width": 4, "norm": "batch"}
MASKS = {
    "name": "tissue",
    "task": "segmentation",
    "num_classes": 2,
    "height_px": 20,
    "width_px": 28,
}
VALUES = {"name": "synthetic", "num_classes": 3, "height_px": 12, "width_px": 8}
OWNED = {"target": "tests.helpers.own_segmenters.{}", "kwargs": {"num_classes": 2}}
UNEVEN = {"kwargs": {"weight": [1, 9]}}


def owned(name: str) -> dict:
    return {**OWNED, "target": OWNED["target"].format(name)}


CASES = {
    "unet, 2 partitions": (UNET, MASKS, {}, ("gems_master", 2, 2)),
    "unet, 3 partitions, class weights": (UNET, MASKS, UNEVEN, ("1f1b", 3, 1)),
    "unet, split backward, an ignored class": (
        UNET,
        MASKS,
        {"kwargs": {"ignore_index": 0}},
        ("zb_h1", 2, 2),
    ),
    "class weights": ({}, {**VALUES, "num_classes": 2}, UNEVEN, ("gems_master", 2, 2)),
    "an ignored class": (
        {},
        VALUES,
        {"kwargs": {"ignore_index": 1, "label_smoothing": 0.1}},
        ("gems_master", 2, 2),
    ),
    "mse": ({}, {**VALUES, "task": "regression"}, {}, ("gems_master", 2, 2)),
    "one value": (
        {},
        {**VALUES, "task": "regression", "num_classes": 1},
        {"name": "l1"},
        ("1f1b", 2, 2),
    ),
    "several labels": (
        {},
        {**VALUES, "task": "multi_label"},
        {"kwargs": {"pos_weight": [1, 5, 2]}},
        ("gpipe", 3, 1),
    ),
    "own weights": (
        {},
        VALUES,
        {"target": f"{OWN}.WeightedFocal", "kwargs": {"weights": [1.0, 9.0, 2.0]}},
        ("gems_master", 2, 2),
    ),
    "own function": ({}, VALUES, {"target": f"{OWN}.summed_or_mean"}, ("gems_mast", 2, 2)),
    "own u-net": (owned("OwnSegmenter"), MASKS, UNEVEN, ("gems_master", 3, 1)),
    "the example of a model": (
        {"target": "examples.own_model.TileNet", "kwargs": {"width": 4}},
        {"name": "synthetic", "num_classes": 2, "height_px": 32, "width_px": 32},
        {},
        ("1f1b", 2, 1),
    ),
    "own network that changes its input": (
        {"target": "tests.helpers.own_unet.OwnUNet", "kwargs": {"width": 4}},
        {"name": "synthetic", "num_classes": 2, "height_px": 18, "width_px": 14},
        {},
        ("1f1b", 3, 1),
    ),
    "a part of a dict": (owned("WithDict"), MASKS, {"output": "out", **UNEVEN}, ("1f1b", 2, 2)),
    "a whole dict": (owned("WithDict"), MASKS, {"target": f"{OWN}.of_two"}, ("gems_master", 2, 1)),
    "other outputs in training": (
        owned("WithTuple"),
        MASKS,
        {"output": "main"},
        ("gems_master", 2, 2),
    ),
}


def make_spec(model: dict, data: dict, loss: dict, schedule: tuple[str, int, int]) -> RunSpec:
    return toys.make_spec(
        *schedule,
        model=ModelConfig(**{"depth": 8, "width": 4, **model} if "target" not in model else model),
        data=DataConfig(train_samples=64, validation_samples=5, **data),
        loss=LossConfig(**loss),
        train__precision="float64",
    )


@pytest.mark.parametrize("case", CASES)
def test_trains_as_one_process(comm, case):
    spec = make_spec(*CASES[case])
    part = sub_world(comm, spec.world_size)
    if part is not None:
        difference = compare(plan_of(spec), part, DEVICE)
        assert difference.max_rel_error <= 1e-12, difference
        assert difference.peak_activation_bytes == difference.predicted_activation_bytes, difference


@pytest.mark.parametrize(
    "case", ["unet, 3 partitions, class weights", "other outputs in training", "mse"]
)
def test_evaluation_and_predictions_are_those_of_the_whole(comm, case, tmp_path):
    """With a last micro-batch that is filled up, and of a network that gives other outputs than in training."""
    spec = make_spec(*CASES[case])
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    out = broadcast(part, tmp_path)
    rank = Rank.open(plan_of(spec), part, DEVICE)
    loader = BatchLoader.open(rank.plan, part, DEVICE)
    found = evaluate(rank, loader)
    loader.close()
    numbered = BatchLoader.open(rank.plan, part, DEVICE, spec.train.steps, Numbered)
    names = [str(number) for number in range(spec.data.num_classes)]
    said = write_predictions(rank, numbered, {"out": str(out), "classes": names})
    numbered.close()
    meet(part)
    layers = layers_of(spec.model, spec.data)
    dataset = open_dataset(spec.data, spec.seed)
    output = torch.from_numpy(np.stack([dataset.image("validation", n) for n in range(5)])).double()
    for module in build_layers(layers, 0, len(layers), spec.seed, torch.float64):
        output = module.eval()(*as_tuple(output))
    labels = torch.from_numpy(np.stack([dataset.label("validation", n) for n in range(5)]))
    loss = open_loss(spec.loss, task_of(spec.data), torch.float64, torch.device("cpu"))
    labels = labels.double() if labels.is_floating_point() else labels
    assert found["num_validation"] == 5
    assert found["validation_loss"] == pytest.approx(
        float(loss(output, labels).detach()), rel=1e-12
    )
    scores = loss.part(output).detach().numpy()
    rows = list(csv.DictReader((out / "predictions.csv").read_text().splitlines()))
    assert [row["sample"] for row in rows] == [dataset.name_of("validation", n) for n in range(5)]
    assert said["num_samples"] == 5 and ("maps" in said) == (task_of(spec.data) == "segmentation")
    for row, one in zip(rows, scores, strict=True):
        if task_of(spec.data) == "regression":
            assert [float(row[name]) for name in names] == pytest.approx(one, rel=1e-8)
            continue
        with tifffile.TiffFile(out / row["map"]) as file:
            assert file.pages[0].is_tiled
            assert np.array_equal(file.asarray(), one.argmax(0))
        assert [int(row[f"pixels_{name}"]) for name in names] == [
            int((one.argmax(0) == n).sum()) for n in (0, 1)
        ]


def test_uneven_labels_are_not_the_mean_of_means(comm, monkeypatch):
    """Without the weights of the other ranks the gradient is another."""
    from gems.engine.step_weight import StepWeight

    spec = make_spec({}, {**VALUES, "num_classes": 2}, UNEVEN, ("1f1b", 2, 2))
    agreed = StepWeight.__call__

    def alone(self, labels, windows):
        agreed(self, labels, windows)
        return 2 * self.mine if labels else 1.0

    monkeypatch.setattr(StepWeight, "__call__", alone)
    assert compare(plan_of(spec), comm, DEVICE).max_rel_error > 1e-3


def test_a_loss_that_is_no_sum_is_refused_before_the_first_step(comm):
    spec = make_spec(UNET, MASKS, {}, ("1f1b", 2, 2))
    with pytest.raises(ConfigError, match="cannot be summed over micro-batches"):
        Rank.open(plan_of(replace(spec, loss=LossConfig(target=f"{OWN}.batch_dice"))), comm, DEVICE)

"""Losses as sums with weights.

Equal to the loss of everything at once, whatever the micro-batches; or refused.
"""

from __future__ import annotations

import collections

import pytest
import torch
from torch import nn

import scripts.reproduce.language  # noqa: F401  registers data=tokens
from gems.config.recipe import LossConfig
from gems.config.schema import DataConfig
from gems.engine.step_weight import StepWeight
from gems.errors import ConfigError
from gems.losses.summed import Loss, SummedLoss, open_loss

CPU = torch.device("cpu")
OWN = "tests.helpers.own_losses"
CLASSES = 3
SOURCES = {  # of shapes of outputs and labels of 7 samples
    "classification": (DataConfig(num_classes=CLASSES), (7, CLASSES)),
    "tokens": (DataConfig(name="tokens", num_classes=CLASSES, length=5), (7, CLASSES, 5)),
    "segmentation": (
        DataConfig(target="a.B", task="segmentation", height_px=6, width_px=5, num_classes=CLASSES),
        (7, CLASSES, 6, 5),
    ),
    "multi_label": (
        DataConfig(target="a.B", task="multi_label", num_classes=CLASSES),
        (7, CLASSES),
    ),
    "regression": (DataConfig(target="a.B", task="regression", num_classes=CLASSES), (7, CLASSES)),
}


def opened(task: str, dtype=torch.float64, like=None, **config) -> SummedLoss:
    data, shape = SOURCES[task]
    return SummedLoss(
        LossConfig(**config),
        data,
        dtype,
        CPU,
        torch.empty(shape, device="meta") if like is None else like,
    )


def samples(task: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    shape = SOURCES[task][1]
    generator = torch.Generator().manual_seed(seed)
    outputs = torch.randn(shape, generator=generator, dtype=torch.float64)
    if task in ("multi_label", "regression"):
        labels = torch.rand(shape, generator=generator, dtype=torch.float64)
        return outputs, labels.round() if task == "multi_label" else labels
    labels = torch.randint(CLASSES, (shape[0], *shape[2:]), generator=generator)
    if task == "segmentation":
        labels[0], labels[1, 2:] = -1, -1  # a whole sample and a part of one are ignored
    return outputs, labels


WEIGHTED = {"weight": [1, 9, 0.25]}
CASES = {
    "classes": ("classification", {}),
    "class weights": ("classification", {"kwargs": WEIGHTED}),
    "smoothed": (
        "classification",
        {"kwargs": {**WEIGHTED, "label_smoothing": 0.1, "ignore_index": 1}},
    ),
    "smoothed without weights": (
        "classification",
        {"kwargs": {"label_smoothing": 0.1, "ignore_index": 1}},
    ),
    "tokens": ("tokens", {"kwargs": WEIGHTED}),
    "pixels": ("segmentation", {}),
    "pixels with weights": ("segmentation", {"kwargs": WEIGHTED}),
    "another ignored index": ("segmentation", {"kwargs": {"ignore_index": 1}}),
    "several labels": ("multi_label", {"kwargs": {"pos_weight": [1.0, 5.0, 2.0]}}),
    "mse": ("regression", {}),
    "l1": ("regression", {"name": "l1"}),
    "smooth_l1": ("regression", {"name": "smooth_l1", "kwargs": {"beta": 0.3}}),
    "torch's by target": (
        "segmentation",
        {"target": "torch.nn.CrossEntropyLoss", "kwargs": WEIGHTED},
    ),
    "a function of torch": ("classification", {"target": "torch.nn.functional.cross_entropy"}),
    "mean over samples": ("classification", {"target": f"{OWN}.Focal", "kwargs": {"gamma": 1.5}}),
    "own weight": (
        "classification",
        {"target": f"{OWN}.WeightedFocal", "kwargs": {"weights": [1.0, 9.0, 2.0]}},
    ),
    "own reduction": (
        "classification",
        {"target": f"{OWN}:WithReduction", "kwargs": {"weights": [1.0, 9.0, 2.0]}},
    ),
    "own function": ("classification", {"target": f"{OWN}.summed_or_mean"}),
    "sum": ("regression", {"kwargs": {"reduction": "sum"}}),
}


@pytest.mark.parametrize(("task", "config"), CASES.values(), ids=CASES)
def test_the_mean_over_uneven_parts_is_that_of_the_whole(task, config):
    """Also its gradient, against the loss of the user's own class called once."""
    loss, (outputs, labels) = opened(task, **config), samples(task)
    parts = [slice(0, 1), slice(1, 3), slice(3, 7)]
    weight = StepWeight(loss, len(labels))
    total = weight(dict(enumerate(labels[part] for part in parts)))
    ours = outputs.clone().requires_grad_()
    whole = outputs.clone().requires_grad_()
    sums = [loss(ours[part], labels[part]) for part in parts]
    for each in sums:
        each.backward(torch.tensor(1 / total, dtype=torch.float64))
    expected = plain(task, config)(whole, labels)
    expected.backward()
    assert loss.mean(sum(float(each.detach()) for each in sums), weight.mine) == pytest.approx(
        float(expected.detach()), rel=1e-13
    )
    torch.testing.assert_close(ours.grad, whole.grad, rtol=1e-12, atol=1e-15)


def plain(task: str, config: dict) -> Loss:
    return open_loss(
        LossConfig(**config), SOURCES[task][0].task or "classification", torch.float64, CPU
    )


def test_only_weights_that_depend_on_labels_are_agreed_between_ranks():
    constant = {
        name for name, (task, config) in CASES.items() if opened(task, **config).is_constant
    }
    assert constant == {
        "classes",
        "several labels",
        "mse",
        "l1",
        "smooth_l1",
        "mean over samples",
        "sum",
    }
    messages = []

    class Counting:
        size = 2

        def sum_in_place(self, total) -> None:
            messages.append(total.copy())
            total += 5.0

    labels = {0: samples("classification")[1]}
    assert StepWeight(opened("classification"), 14, Counting())(labels) == 14 and not messages
    loss = opened("classification", kwargs=WEIGHTED)
    mine = sum(WEIGHTED["weight"][label] for label in labels[0].tolist())
    assert StepWeight(loss, 14, Counting())(labels) == mine + 5 and messages == [[mine]]
    assert (
        StepWeight(loss, 14, Counting())({}) == 1.0 and len(messages) == 1
    )  # of a rank that reads no labels


REFUSED = {
    "dice of a batch": (
        "segmentation",
        {"target": f"{OWN}.batch_dice"},
        "loss.target",
        "cannot be summed over micro",
    ),
    "weights of outputs": (
        "classification",
        {"target": f"{OWN}.by_outputs"},
        "loss.target",
        "cannot be summed over",
    ),
    "no scalar": (
        "classification",
        {"kwargs": {"reduction": "none"}},
        "loss.kwargs",
        "gives no scalar",
    ),
    "fails": ("classification", {"target": f"{OWN}.broken"}, "loss.target", "own_losses.py"),
    "parameters": (
        "classification",
        {"target": f"{OWN}.WithParameters"},
        "loss.target",
        "has parameters",
    ),
    "another shape": (
        "regression",
        {"name": "cross_entropy", "kwargs": {"weight": [1.0, 2.0]}},
        "loss.name",
        "shape",
    ),
    "no such argument": (
        "classification",
        {"kwargs": {"gamma": 1}},
        "loss.kwargs",
        "label_smoothing",
    ),
    "no such loss": (
        "classification",
        {"target": f"{OWN}.Focale"},
        "loss.target",
        "nearest: Focal",
    ),
}


@pytest.mark.parametrize(("task", "config", "key", "text"), REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_summed_is_refused_in_one_line(task, config, key, text):
    with pytest.raises(ConfigError) as caught:
        opened(task, **config)
    assert caught.value.key == key and text in str(caught.value) and "\n" not in str(caught.value)


def outputs_of(*names: str):
    return {name: torch.empty(SOURCES["classification"][1], device="meta") for name in names}


def test_a_part_of_the_output_is_taken_by_key_field_or_index():
    outputs, labels = samples("classification")
    expected = float(nn.functional.cross_entropy(outputs, labels, reduction="sum"))
    Pair = collections.namedtuple("Pair", "out aux")
    other = outputs + 1
    for output, given in (
        ("out", {"aux": other, "out": outputs}),
        ("1", (other, outputs)),
        ("out", Pair(outputs, other)),
    ):
        loss = opened("classification", like=given, output=output)
        assert float(loss(given, labels)) == pytest.approx(expected)
        assert torch.equal(loss.scores(given), outputs)
        assert float(loss(outputs, labels)) == pytest.approx(
            expected
        )  # of a model that gives one in evaluation
    alone = opened("classification", like=outputs_of("out"))
    assert float(alone({"out": outputs}, labels)) == pytest.approx(expected)


def test_several_outputs_need_a_name_or_a_loss_that_takes_them():
    like = outputs_of("out", "aux")
    for config, text in (({}, "allowed: out, aux"), ({"output": "features"}, "allowed: out, aux")):
        with pytest.raises(ConfigError, match=rf"loss\.output.*{text}"):
            opened("classification", like=like, **config)
    outputs, labels = samples("classification")
    loss = opened("classification", like=like, target=f"{OWN}.of_two")
    given = {"out": outputs, "aux": outputs * 0}
    alone = nn.functional.cross_entropy(outputs, labels) * 7
    assert float(loss(given, labels)) == pytest.approx(float(alone) + 0.4 * 7 * 1.0986122886681098)


def test_low_precision_outputs_are_scored_in_float32():
    outputs, labels = samples("classification")
    low = outputs.bfloat16()
    exact = nn.functional.cross_entropy(low.double(), labels, reduction="sum")
    found = opened("classification", torch.bfloat16)(low, labels)
    assert found.dtype is torch.float32 and float(found) == pytest.approx(float(exact), rel=1e-6)
    weighted = opened("classification", torch.bfloat16, kwargs=WEIGHTED)
    assert weighted(low, labels).dtype is torch.float32


def test_labels_that_are_all_ignored_leave_no_mean():
    outputs, labels = samples("segmentation")
    loss = opened("segmentation")
    weight = StepWeight(loss, 7)
    assert weight({0: torch.full_like(labels, -1)}) == 0
    assert float(loss(outputs, torch.full_like(labels, -1))) == 0
    assert loss.mean(0.0, 0.0) != loss.mean(0.0, 0.0)


@pytest.mark.cases
def test_a_loss_is_tried_in_the_type_of_the_training():
    outputs, labels = samples("classification")
    loss = opened("classification", torch.float32, target=f"{OWN}.Costs")
    expected = loss.loss.function(outputs.float(), labels) * len(labels)
    assert float(loss(outputs.float(), labels)) == pytest.approx(float(expected), rel=1e-6)
    with pytest.raises(ConfigError, match=r"^loss\.target=.*own_losses\.py"):
        opened("classification", torch.float32, target=f"{OWN}.Costs", kwargs={"dtype": "float64"})
    with pytest.raises(ConfigError, match="cannot be summed over micro"):
        opened("segmentation", torch.float32, target=f"{OWN}.batch_dice")


DIVIDED = {
    "pixels": {},
    "class weights": {"kwargs": WEIGHTED},
    "sum": {"kwargs": {"reduction": "sum"}},
    "another ignored index": {"kwargs": {"ignore_index": 1}},
    "own mean over pixels": {"target": f"{OWN}.Focal"},
    "own weights": {"target": f"{OWN}.WeightedFocal", "kwargs": {"weights": [1.0, 3.0, 0.5]}},
    "own reduction": {"target": f"{OWN}.summed_or_mean"},
}


@pytest.mark.parametrize("name", DIVIDED)
def test_losses_and_weights_of_parts_of_maps_add_up(name: str) -> None:
    loss = opened("segmentation", **DIVIDED[name])
    outputs, labels = samples("segmentation")
    labels = labels.clamp(min=0) if name.startswith("own") else labels
    wanted = loss(outputs, labels), loss.weight(labels)
    assert loss.divides()
    parts = [
        (loss(outputs[:, :, rows, columns], labels[:, rows, columns]), labels[:, rows, columns])
        for rows in (slice(0, 1), slice(1, 6))
        for columns in (slice(0, 3), slice(3, 5))
    ]
    found = sum(value for value, _ in parts), sum(loss.weight(part) for _, part in parts)
    num = 1 if loss.is_sum else 2  # a sum is not divided by the weight
    torch.testing.assert_close(found[:num], wanted[:num], rtol=1e-12, atol=0)
    torch.testing.assert_close((loss(outputs, labels), loss.weight(labels)), wanted, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["image_dice", "worst_pixels", "detached_mean"])
def test_losses_that_need_whole_maps_are_found(name: str) -> None:
    assert not opened("segmentation", target=f"{OWN}.{name}").divides()


def test_losses_of_smaller_maps_or_of_no_maps_are_not_divided() -> None:
    assert not opened("classification").divides()
    half = torch.empty((7, CLASSES, 3, 2), device="meta")
    with pytest.raises(ConfigError):
        opened("segmentation", like=half)

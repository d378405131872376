"""Metrics beside those of the task.

Against scikit-learn's definitions worked out here, and torchmetrics.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gems.config.compose import compose
from gems.config.recipe import FIGURES_OF_TASK, METRICS, TABLES, LossConfig
from gems.config.schema import DataConfig
from gems.engine.evaluation.chosen_metrics import open_metrics, roc_auc
from gems.engine.evaluation.metrics import Metric, compute, metrics_of
from gems.errors import ConfigError
from gems.losses.summed import SummedLoss

torch.manual_seed(0)


def measured(
    chosen: dict[str, Any],
    task: str,
    num_classes: int,
    outputs: Tensor,
    labels: Tensor,
    ranks: int = 3,
) -> dict[str, Any]:
    """The figures of samples that are spread unevenly over ranks, one of which has none."""
    shares = torch.tensor_split(torch.arange(len(labels)), [len(labels) // 4, len(labels) // 4])
    by_rank: list[list[Metric]] = [open_metrics(chosen, task, num_classes) for _ in shares]
    for metrics, share in zip(by_rank, shares, strict=True):
        for part in share.split(7):
            for metric in metrics:
                metric.update(outputs[part], labels[part])
    found: dict[str, Any] = {}
    for copies in zip(*by_rank, strict=True):
        copies[0].join([copy.state() for copy in copies])
        found |= copies[0].compute()
    return found


def area_by_pairs(scores: Tensor, positive: Tensor) -> float:
    """The share of pairs of a positive and a negative sample that are in order; ties count half."""
    pairs = list(itertools.product(scores[positive].tolist(), scores[~positive].tolist()))
    return sum(1.0 if a > b else 0.5 if a == b else 0.0 for a, b in pairs) / len(pairs)


def test_auc_of_an_imbalanced_set_with_ties() -> None:
    """100 negatives and 5 positives, whose scores are rounded so that many are equal."""
    torch.manual_seed(0)
    labels = torch.cat([torch.zeros(100), torch.ones(5)]).long()[torch.randperm(105)]
    scores = ((labels + torch.randn(105)) * 2).round() / 2
    outputs = torch.stack([torch.zeros(105), scores], 1)
    found = measured({"auc": {}}, "classification", 2, outputs, labels)
    assert found["auc"] == pytest.approx(area_by_pairs(scores, labels == 1), abs=1e-12)
    assert 0.5 < found["auc"] < 1


def test_auc_of_several_classes_and_of_several_labels() -> None:
    labels = torch.randint(3, (60,))
    outputs = torch.randn(60, 3)
    found = measured({"auc": {}}, "classification", 3, outputs, labels)
    by_class = [area_by_pairs(outputs.double().softmax(1)[:, k], labels == k) for k in range(3)]
    assert found["auc"] == pytest.approx(sum(by_class) / 3, abs=1e-12)
    several = (torch.rand(60, 2) < 0.3).float()
    found = measured({"auc": {}}, "multi_label", 2, outputs[:, :2], several)
    by_label = [area_by_pairs(outputs[:, k], several[:, k] > 0.5) for k in range(2)]
    assert found["auc"] == pytest.approx(sum(by_label) / 2, abs=1e-12)


@pytest.mark.cases
@pytest.mark.parametrize("task", FIGURES_OF_TASK)
def test_figures_that_can_be_monitored_are_those_that_validation_gives(task: str) -> None:
    """By task, without data: a number of each name, and of no other."""
    data = DataConfig(target="a.B", task=task, num_classes=2, height_px=4, width_px=4)
    like = torch.empty((2, 2, 4, 4) if task == "segmentation" else (2, 2), device="meta")
    loss = SummedLoss(LossConfig(), data, torch.float32, torch.device("cpu"), like)
    given = compute(metrics_of(task, 2, loss))
    assert {f"validation_{name}" for name in FIGURES_OF_TASK[task]} == {
        name for name, value in given.items() if isinstance(value, float)
    }
    chosen = {name: {} for name, tasks in METRICS.items() if task in tasks}
    numbers = compute(open_metrics(chosen, task, 2))
    assert {f"validation_{name}" for name in chosen if name not in TABLES} == {
        name for name, value in numbers.items() if isinstance(value, float)
    }


@pytest.mark.cases
@pytest.mark.parametrize(
    ("words", "says"),
    [
        (
            "train.monitor=f1 metrics=[auc]",
            (
                r"^train\.monitor=f1: allowed: loss, accuracy, majority, auc; ask for another:"
                r" metrics=\[balanced_"
            ),
        ),
        (
            "train.monitor=auc",
            r"^train\.monitor=auc: allowed: loss, accuracy, majority; .*metrics=\[auc,balanced",
        ),
        (
            "train.monitor=confusion_matrix metrics=[confusion_matrix]",
            r"^train\.monitor=confusion_matrix: allowed:",
        ),
        ("metrics=[r2]", r"^metrics\.r2=r2: is for regression; data\.task is classification"),
        (
            "train.monitor=f2 metrics.f1.target=a.F1",
            r"^train\.monitor=f2: allowed: loss, accuracy, majority, f1",
        ),
    ],
)
def test_a_monitor_that_validation_does_not_give_is_refused_at_composition(
    words: str, says: str
) -> None:
    with pytest.raises(ConfigError, match=says):
        compose(["data=synthetic", *words.split()])


@pytest.mark.cases
def test_monitors_by_both_names_and_of_a_metric_of_ones_own() -> None:
    own = ["metrics=[auc]", "metrics.f1.target=a.F1"]
    for monitor in ("loss", "validation_loss", "auc", "f1", "f1_macro"):
        assert (
            compose(["data=synthetic", *own, f"train.monitor={monitor}"]).train.monitor == monitor
        )


def test_auc_without_positives_is_unknown() -> None:
    assert math.isnan(roc_auc(torch.rand(4), torch.zeros(4, dtype=torch.bool)))


def test_confusion_matrix_and_balanced_accuracy() -> None:
    labels = torch.tensor([0] * 6 + [1] * 2 + [2] * 4 + [-1] * 2)
    predicted = torch.tensor([0, 0, 0, 0, 1, 2, 1, 0, 2, 2, 2, 2, 0, 1])
    outputs = torch.nn.functional.one_hot(predicted, 4).float()
    chosen: dict[str, Any] = {"confusion_matrix": {}, "balanced_accuracy": {}}
    found = measured(chosen, "classification", 4, outputs, labels)
    assert found["confusion_matrix"] == [[4, 1, 1, 0], [1, 1, 0, 0], [0, 0, 4, 0], [0, 0, 0, 0]]
    assert found["balanced_accuracy"] == pytest.approx((4 / 6 + 1 / 2 + 1) / 3)


def test_pixels_are_counted_too() -> None:
    labels = torch.randint(2, (8, 5, 4))
    outputs = torch.randn(8, 2, 5, 4)
    found = measured({"confusion_matrix": {}}, "segmentation", 2, outputs, labels)
    pairs = list(zip(labels.flatten().tolist(), outputs.argmax(1).flatten().tolist(), strict=True))
    assert found["confusion_matrix"] == [
        [pairs.count((true, made)) for made in (0, 1)] for true in (0, 1)
    ]


def test_r2_of_values() -> None:
    labels = torch.randn(30, 1)
    outputs = labels + 0.1 * torch.randn(30, 1)
    found = measured({"r2": {}}, "regression", 1, outputs, labels)
    expected = (
        1
        - ((outputs - labels).double() ** 2).sum() / ((labels - labels.mean()).double() ** 2).sum()
    )
    assert found["r2"] == pytest.approx(float(expected), rel=1e-6)


def error_rate(outputs: Tensor, labels: Tensor, scale: float = 1.0) -> float:
    return scale * float((outputs.argmax(1) != labels).double().mean())


def fails(outputs: Tensor, labels: Tensor) -> float:
    raise RuntimeError("no figure")


def test_metrics_of_ones_own() -> None:
    labels = torch.randint(3, (40,))
    outputs = torch.randn(40, 3)
    chosen: dict[str, Any] = {
        "errors": {"target": f"{__name__}.error_rate", "kwargs": {"scale": 100.0}},
        "f1": {
            "target": "torchmetrics.classification.MulticlassF1Score",
            "kwargs": {"num_classes": 3},
        },
    }
    found = measured(chosen, "classification", 3, outputs, labels)
    assert found["errors"] == pytest.approx(error_rate(outputs, labels, 100.0))
    predicted = outputs.argmax(1)
    scores = []
    for k in range(3):
        both = int(((predicted == k) & (labels == k)).sum())
        scores.append(2 * both / int((predicted == k).sum() + (labels == k).sum()))
    assert found["f1"] == pytest.approx(sum(scores) / 3, rel=1e-6)


@pytest.mark.parametrize(
    ("chosen", "says"),
    [
        ({"dice": {}}, r"^metrics\.dice=dice: allowed: auc, .*or give metrics\.dice\.target"),
        ({"r2": {}}, r"^metrics\.r2=r2: is for regression; data\.task is classification"),
        (
            {"mine": {"target": "no.such.Metric"}},
            r"^metrics\.mine\.target=no\.such\.Metric: no module named no",
        ),
        (
            {"bad": {"target": f"{__name__}.fails"}},
            r"^metrics\.bad\.target=.*: fails on .*RuntimeError: no figure",
        ),
    ],
)
def test_refusals(chosen: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        measured(chosen, "classification", 2, torch.rand(8, 2), torch.randint(2, (8,)))


def test_they_are_chosen_by_group_or_by_key() -> None:
    words = [
        "data=synthetic",
        "metrics=[auc,confusion_matrix]",
        "metrics.f1.target=torchmetrics.F1Score",
    ]
    spec = compose([*words, "metrics.f1.kwargs.task=binary"])
    assert spec.metrics == {
        "auc": {"name": "auc"},
        "confusion_matrix": {"name": "confusion_matrix"},
        "f1": {"target": "torchmetrics.F1Score", "kwargs": {"task": "binary"}, "path": None},
    }
    assert compose(["data=synthetic", "metrics=auc"]).metrics == {"auc": {"name": "auc"}}


@pytest.mark.parametrize(
    ("word", "says"),
    [
        ("metrics=[auk]", r"^metrics=auk: allowed: auc, .*nearest: auc"),
        ("metrics.f1.targt=a.B", r"^metrics\.f1\.targt=a\.B: allowed: name, target, kwargs, path"),
        ("metrics.f1=3", r"^metrics\.f1=3: must be a mapping"),
        ("metrics.f1.name=f1", r"^metrics\.f1=f1: allowed: auc, .*or give metrics\.f1\.target"),
    ],
)
def test_mistakes_in_keys(word: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        compose(["data=synthetic", word])

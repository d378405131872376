"""What validation measures of each task, against figures by hand, also when two ranks have a part each."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gems.engine.evaluation.metrics import (
    AbsoluteError,
    ClassAccuracy,
    Dice,
    LabelAccuracy,
    Metric,
    compute,
)

GENERATOR = torch.Generator().manual_seed(0)


def on_two_ranks(make, outputs: torch.Tensor, labels: torch.Tensor) -> dict:
    """Uneven parts on two ranks and a rank without any: all compute the same."""
    ranks: list[Metric] = [make(), make(), make()]
    ranks[0].update(outputs[:1], labels[:1])
    ranks[0].update(outputs[1:3], labels[1:3])
    ranks[1].update(outputs[3:], labels[3:])
    states = [metric.state() for metric in ranks]
    for metric in ranks:
        metric.join(states)
    found = [compute([metric]) for metric in ranks]
    assert found[0] == found[1] == found[2]
    return found[0]


def test_dice_by_class_beside_those_of_constant_predictors() -> None:
    scores = torch.randn(5, 4, 6, 7, generator=GENERATOR)
    labels = torch.randint(3, (5, 6, 7), generator=GENERATOR)  # class 3 is in no mask
    labels[2, :3] = -1
    found = on_two_ranks(lambda: Dice(4), scores, labels.to(torch.int8))
    known = (labels >= 0).numpy()
    wanted = labels.numpy()[known]
    given = scores.argmax(1).numpy()[known]
    by_class = [
        2 * np.sum((given == c) & (wanted == c)) / (np.sum(given == c) + np.sum(wanted == c))
        for c in range(4)
    ]
    constant = [2 * np.sum(wanted == c) / (len(wanted) + np.sum(wanted == c)) for c in range(3)]
    assert found["validation_dice_by_class"] == pytest.approx(by_class)
    assert found["validation_dice"] == pytest.approx(np.mean(by_class))
    assert found["validation_dice_constant_by_class"] == [*map(pytest.approx, constant), None]
    assert found["validation_dice_constant"] == pytest.approx(max(constant) / 3)
    assert found["validation_accuracy"] == pytest.approx(np.mean(given == wanted))
    assert found["validation_majority"] == pytest.approx(max(np.bincount(wanted)) / len(wanted))


def test_classes_of_images_and_places() -> None:
    for shape in ((6, 3), (6, 3, 5)):
        scores = torch.randn(shape, generator=GENERATOR)
        labels = torch.randint(3, (6, *shape[2:]), generator=GENERATOR)
        found = on_two_ranks(lambda: ClassAccuracy(3), scores, labels)
        assert found["validation_accuracy"] == pytest.approx(
            float((scores.argmax(1) == labels).double().mean())
        )
        assert (
            found["validation_majority"]
            == max(torch.bincount(labels.flatten()).tolist()) / labels.numel()
        )


def test_each_of_several_labels() -> None:
    scores = torch.tensor([[1.0, -1.0], [1.0, 1.0], [-1.0, -2.0], [3.0, -1.0]])
    labels = torch.tensor([[1.0, 0.0], [0.0, 0.0], [1.0, 0.0], [1.0, 1.0]])
    found = on_two_ranks(lambda: LabelAccuracy(2), scores, labels)
    assert (
        found["validation_accuracy_by_label"] == [0.5, 0.5] and found["validation_accuracy"] == 0.5
    )
    assert (
        found["validation_majority_by_label"] == [0.75, 0.75]
        and found["validation_majority"] == 0.75
    )


def test_the_error_of_values_beside_that_of_their_mean() -> None:
    outputs, labels = torch.randn(2, 6, 2, generator=GENERATOR).unbind(0)
    found = on_two_ranks(AbsoluteError, outputs, labels)
    assert found["validation_mean_absolute_error"] == pytest.approx(
        np.abs((outputs - labels).numpy()).mean()
    )
    expected = np.abs(labels.numpy() - labels.numpy().mean(0)).mean()
    assert found["validation_mean_absolute_error_constant"] == pytest.approx(expected)


def test_nothing_measured_is_not_a_number() -> None:
    for metric in (ClassAccuracy(2), Dice(2), LabelAccuracy(2), AbsoluteError()):
        first = next(iter(compute([metric]).values()))
        assert first != first

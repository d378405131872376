"""The summed loss of a step, and the validation metrics of outputs and labels, by task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gems.losses.summed import Outputs, SummedLoss, first_tensor
from gems.streaming.block_plan import Box

PREFIX = "validation_"
Scores = Callable[[Outputs], Tensor]
Values = dict[str, Any]  # numbers, or lists with one number or None for each class


@dataclass(slots=True)
class LossSums:
    """The summed losses of micro-batches, kept as tensors.

    Reading each loss would make the host wait for a GPU.
    """

    losses: list[Tensor] = field(default_factory=list)
    _total: float | None = None

    def add(self, loss: Tensor) -> Tensor:
        """Count the loss of a micro-batch, summed over its labels, and return it."""
        self.losses.append(loss.detach())
        return loss

    def loss_gradient(self, weight: float) -> Tensor:
        """Return the gradient of the mean over labels of total `weight` for the last summed loss.

        The gradient is NaN if the weight is 0.
        """
        return torch.full_like(self.losses[-1], 1.0 / weight if weight else math.nan)

    def read(self) -> float:
        """Return the sum of all losses."""
        if self._total is None:
            self.read_with()
        assert self._total is not None
        return self._total

    def read_with(self, *scalars: Tensor) -> list[float]:
        """Return scalars in float64; one wait for a GPU reads them and the sum of all losses."""
        if self.losses:
            scalars = (*scalars, torch.stack(self.losses).double().sum())
        values: list[float] = torch.stack(scalars).tolist() if scalars else []
        self._total = values.pop() if self.losses else 0.0
        return values


class Metric(ABC):
    """A validation metric.

    The ranks of the last stage call `update` for each micro-batch; then all ranks call `compute`.

    Attributes:
        sums: Values that are summed over ranks, in float64.
        by_sample: Tensors that are joined over ranks, with one entry for each sample.
        takes_parts: Whether `update` may be called for the parts of maps, one after the other.
    """

    takes_parts = False

    def __init__(self, num_classes: int = 0, scores: Scores = first_tensor) -> None:
        self._num_classes = num_classes  # or labels
        self._scores = scores
        self.sums = torch.zeros(self._num_sums(), dtype=torch.float64)
        self.by_sample: list[Tensor] = []

    @abstractmethod
    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Count the labels and the model's outputs of some samples."""

    def update_part(self, outputs: Outputs, labels: Tensor, part: Box) -> None:
        """Count a part of the maps of some samples, which has a range along the first axes."""
        self.update(outputs, labels)

    @abstractmethod
    def compute(self) -> Values:
        """Return the figures over all counted samples, by name; NaN or None if there are none."""

    def state(self) -> tuple[NDArray[Any], list[NDArray[Any]]]:
        """Return the state of this rank that the other ranks need."""
        return self.sums.cpu().numpy(), [part.cpu().numpy() for part in self.by_sample]

    def join(self, states: Sequence[tuple[NDArray[Any], list[NDArray[Any]]]]) -> None:
        """Combine the states of all ranks."""
        self.sums = torch.from_numpy(np.sum([sums for sums, _ in states], axis=0))
        self.by_sample = [torch.from_numpy(part) for _, parts in states for part in parts]

    def _num_sums(self) -> int:
        return 0

    def _count(self, *counts: Tensor) -> None:
        self.sums = self.sums.to(counts[0].device) + torch.cat(
            [count.reshape(-1).double() for count in counts]
        )


class MeanLoss(Metric):
    """The mean of the loss over all labels."""

    def __init__(self, loss: SummedLoss) -> None:
        super().__init__()
        self._loss = loss

    @property
    def takes_parts(self) -> bool:  # type: ignore[override]
        """Return whether the loss adds up over the parts of maps."""
        return self._loss.divides()

    def _num_sums(self) -> int:
        return 2

    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Count some samples."""
        self._count(self._loss(outputs, labels).double(), self._loss.weight(labels))

    def compute(self) -> Values:
        """Return the figures by name."""
        return {"loss": self._loss.mean(float(self.sums[0]), float(self.sums[1]))}


class ClassAccuracy(Metric):
    """The share of labels for which the largest score is right, and the majority class's share."""

    def _num_sums(self) -> int:
        return 1 + self._num_classes

    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Count some samples."""
        predicted, known = _classes(self._scores(outputs), labels, self._num_classes)
        self._count((predicted == known).sum(), torch.bincount(known, minlength=self._num_classes))

    def compute(self) -> Values:
        """Return the figures by name."""
        correct, *counts = self.sums.tolist()
        return {
            "accuracy": _ratio(correct, sum(counts)),
            "majority": _ratio(max(counts), sum(counts)),
        }


class Dice(Metric):
    """The Dice coefficient 2 |A and B| / (|A| + |B|) of each class over all pixels, and its mean.

    The coefficients of constant predictors are reported as well: by class, of always predicting
    that class; and of the constant class with the best mean over classes. A class that is neither
    in the masks nor predicted has no coefficient.
    """

    takes_parts = True

    def _num_sums(self) -> int:
        return 3 * self._num_classes

    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Count some samples."""
        predicted, known = _classes(self._scores(outputs), labels, self._num_classes)
        of = (known[predicted == known], predicted, known)
        self._count(*(torch.bincount(classes, minlength=self._num_classes) for classes in of))

    def compute(self) -> Values:
        """Return the figures by name."""
        right, predicted, known = self.sums.reshape(3, -1).tolist()
        total = sum(known)
        by_class = [
            2 * a / (b + c) if b + c else None
            for a, b, c in zip(right, predicted, known, strict=True)
        ]
        constant = [2 * c / (total + c) if c else None for c in known]
        present = sum(c > 0 for c in known)
        return {
            "accuracy": _ratio(sum(right), total),
            "majority": _ratio(max(known), total),
            "dice": _mean(by_class),
            "dice_constant": _ratio(max(share or 0.0 for share in constant), present),
            "dice_by_class": by_class,
            "dice_constant_by_class": constant,
        }


class LabelAccuracy(Metric):
    """The share of right answers to each yes-or-no label, and that of its more frequent answer."""

    def _num_sums(self) -> int:
        return 1 + 2 * self._num_classes

    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Count some samples."""
        is_set = labels > 0.5
        count = torch.tensor(float(len(labels)), device=labels.device)
        self._count(count, ((self._scores(outputs) > 0) == is_set).sum(0), is_set.sum(0))

    def compute(self) -> Values:
        """Return the figures by name."""
        count, *rest = self.sums.tolist()
        right = rest[: len(rest) // 2]
        positive = rest[len(rest) // 2 :]
        by_label = [_ratio(number, count) for number in right]
        majority = [_ratio(max(number, count - number), count) for number in positive]
        return {
            "accuracy": _mean(by_label),
            "majority": _mean(majority),
            "accuracy_by_label": by_label,
            "majority_by_label": majority,
        }


class AbsoluteError(Metric):
    """The mean absolute error of predictions, and that of always predicting the mean label."""

    def _num_sums(self) -> int:
        return 2

    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Count some samples."""
        wanted = labels.double()
        error = (self._scores(outputs).double().reshape(wanted.shape) - wanted).abs().sum()
        self._count(error, torch.tensor(float(labels.numel()), device=labels.device))
        self.by_sample.append(labels)

    def compute(self) -> Values:
        """Return the figures by name."""
        total, count = self.sums.tolist()
        constant = math.nan
        if self.by_sample:
            labels = torch.cat([part.double() for part in self.by_sample])
            constant = float((labels - labels.mean(0)).abs().mean())
        return {
            "mean_absolute_error": _ratio(total, count),
            "mean_absolute_error_constant": constant,
        }


def metrics_of(task: str, num_classes: int, loss: SummedLoss) -> list[Metric]:
    """Return the validation metrics of a task."""
    by_task: dict[str, Callable[[int, Scores], Metric]] = {
        "classification": ClassAccuracy,
        "segmentation": Dice,
        "multi_label": LabelAccuracy,
        "regression": AbsoluteError,
    }
    return [MeanLoss(loss), by_task[task](num_classes, loss.scores)]


def compute(metrics: Sequence[Metric]) -> Values:
    """Return the figures of all metrics, with the names of validation."""
    return {
        f"{PREFIX}{name}": value for metric in metrics for name, value in metric.compute().items()
    }


def _classes(scores: Tensor, labels: Tensor, num_classes: int) -> tuple[Tensor, Tensor]:
    """Return the predicted and the true classes of all labelled elements, as flat tensors."""
    predicted = scores[:, :num_classes].argmax(1)
    is_known = (labels >= 0) & (labels < num_classes)
    return predicted[is_known], labels[is_known].long()


def _mean(values: Sequence[float | None]) -> float:
    known = [value for value in values if value is not None]
    return _ratio(sum(known), len(known))


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else math.nan

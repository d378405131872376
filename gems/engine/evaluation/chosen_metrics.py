"""Metrics of validation that a run asks for beside those of its task.

Some by name, any other by a target.
Each is exact over ranks: counts are summed and samples joined, so that the figure is that of one
process.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from gems.config.recipe import METRICS
from gems.engine.evaluation.metrics import Metric, Scores, Values
from gems.errors import ConfigError, one_of
from gems.losses.summed import Outputs, first_tensor
from gems.utils.targets import call_target, load_target, target_error

Options = Mapping[str, Any]


def open_metrics(
    chosen: Mapping[str, Options], task: str, num_classes: int, scores: Scores = first_tensor
) -> list[Metric]:
    """Return the metrics that a configuration chooses: by name, or by target with kwargs and path.

    Raises:
        ConfigError: an unknown name, one that does not suit the task, or a target that cannot be
        called.
    """
    opened: list[Metric] = []
    for name, options in chosen.items():
        if options.get("target"):
            opened.append(TargetMetric(name, options, scores))
            continue
        kind = options.get("name", name)
        if kind not in _BY_NAME:
            raise ConfigError(
                f"metrics.{name}", kind, one_of(METRICS), f"or give metrics.{name}.target"
            )
        if task not in METRICS[kind]:
            raise ConfigError(
                f"metrics.{name}",
                kind,
                f"is for {' and '.join(METRICS[kind])}",
                f"data.task is {task}",
            )
        opened.append(_BY_NAME[kind](num_classes, scores))
    return opened


class ConfusionMatrix(Metric):
    """Counts of predicted classes (columns) by true class (rows), and the mean recall."""

    takes_parts = True

    def _num_sums(self) -> int:
        return self._num_classes**2

    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Count some samples."""
        predicted = self._scores(outputs)[:, : self._num_classes].argmax(1)
        is_known = (labels >= 0) & (labels < self._num_classes)
        pairs = labels[is_known] * self._num_classes + predicted[is_known]
        self._count(torch.bincount(pairs, minlength=self._num_classes**2))

    def matrix(self) -> Tensor:
        """Return the counts, (true class, predicted class)."""
        return self.sums.reshape(self._num_classes, self._num_classes)

    def compute(self) -> Values:
        """Return the counts."""
        return {
            "confusion_matrix": [[int(count) for count in row] for row in self.matrix().tolist()]
        }


class BalancedAccuracy(ConfusionMatrix):
    """The mean over classes of the share of their labels that the largest score is right for."""

    def compute(self) -> Values:
        """Return the figure; classes without a label are left out."""
        matrix = self.matrix()
        counts = matrix.sum(1)
        recalls = matrix.diagonal()[counts > 0] / counts[counts > 0]
        return {"balanced_accuracy": float(recalls.mean()) if len(recalls) else math.nan}


class Auc(Metric):
    """The area under the ROC curve.

    The chance that a positive sample has a higher score than a negative one.
    Of two classes it is that of the second; of more the mean of each class against all others, by
    its probability; of several labels the mean over labels. A class or label that all samples have,
    or none, is left out.
    """

    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Keep the scores and labels of some samples."""
        scores = self._scores(outputs)[:, : self._num_classes].detach().double()
        if not labels.is_floating_point():
            scores = scores.softmax(1) if self._num_classes > 2 else scores[:, 1:] - scores[:, :1]
            labels = labels[:, None]
        self.by_sample.append(torch.cat([scores, labels.double()], 1))

    def compute(self) -> Values:
        """Return the area."""
        if not self.by_sample:
            return {"auc": math.nan}
        rows = torch.cat(self.by_sample)
        if rows.shape[1] == 2:
            areas = [roc_auc(rows[:, 0], rows[:, 1] == 1)]
        elif rows.shape[1] == self._num_classes + 1:
            areas = [roc_auc(rows[:, k], rows[:, -1] == k) for k in range(self._num_classes)]
        else:
            half = rows.shape[1] // 2
            areas = [roc_auc(rows[:, k], rows[:, half + k] > 0.5) for k in range(half)]
        known = [area for area in areas if not math.isnan(area)]
        return {"auc": sum(known) / len(known) if known else math.nan}


def roc_auc(scores: Tensor, is_positive: Tensor) -> float:
    """Return the area under the ROC curve, by ranks (Mann and Whitney 1947).

    NaN without positives or negatives.
    Equal scores share the mean of their ranks.
    """
    num_positive = int(is_positive.sum())
    num_negative = len(scores) - num_positive
    if not num_positive or not num_negative:
        return math.nan
    _, places, counts = torch.unique(scores, return_inverse=True, return_counts=True)
    ends = counts.cumsum(0).double()
    ranks = (ends - (counts.double() - 1) / 2)[places]
    total = float(ranks[is_positive].sum())
    return (total - num_positive * (num_positive + 1) / 2) / (num_positive * num_negative)


class R2(Metric):
    """The coefficient of determination.

    1 - squared error / squared distance from the mean of the labels.
    """

    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Keep the values and labels of some samples."""
        if not len(labels):
            return
        wanted = labels.double().reshape(len(labels), -1)
        predicted = self._scores(outputs).detach().double().reshape(wanted.shape)
        self.by_sample.append(torch.stack([predicted, wanted], 1))

    def compute(self) -> Values:
        """Return the mean over the values of a sample."""
        if not self.by_sample:
            return {"r2": math.nan}
        predicted, wanted = torch.cat(self.by_sample).unbind(1)
        spread = ((wanted - wanted.mean(0)) ** 2).sum(0)
        return {"r2": float((1 - ((predicted - wanted) ** 2).sum(0) / spread).mean())}


class TargetMetric(Metric):
    """A metric of the user's own.

    A function of (outputs, labels), or a class with update and compute (torchmetrics).
    It is called once, on the host, with the outputs and labels of all samples.
    """

    def __init__(self, name: str, options: Options, scores: Scores) -> None:
        super().__init__(scores=scores)
        self._name = name
        self._key = f"metrics.{name}.target"
        self._options = options
        self._labels: list[Tensor] = []
        load_target(self._key, str(options["target"]), options.get("path"))

    def update(self, outputs: Outputs, labels: Tensor) -> None:
        """Keep the outputs and labels of some samples."""
        scores = self._scores(outputs).detach()
        self.by_sample += [
            scores.float() if scores.dtype in (torch.bfloat16, torch.float16) else scores,
            labels,
        ]

    def compute(self) -> Values:
        """Return the figures of the user's metric, under its name."""
        if not self.by_sample:
            return {self._name: math.nan}
        outputs, labels = (
            torch.cat([part.cpu() for part in self.by_sample[start::2]]) for start in (0, 1)
        )
        target = str(self._options["target"])
        kwargs = dict(self._options.get("kwargs") or {})
        make: Callable[..., Any] = load_target(self._key, target, self._options.get("path"))
        try:
            if isinstance(make, type):
                metric = call_target(self._key, target, kwargs, self._options.get("path"))
                metric.update(outputs, labels)
                value = metric.compute()
            else:
                value = make(outputs, labels, **kwargs)
        except ConfigError:
            raise
        except Exception as error:
            raise target_error(
                self._key, target, "fails on the validation's outputs and labels", error
            ) from error
        if isinstance(value, Mapping):
            return {f"{self._name}_{key}": _plain(each) for key, each in value.items()}
        return {self._name: _plain(value)}


def _plain(value: Any) -> Any:
    """Return a number, or a list of numbers."""
    if isinstance(value, Tensor):
        return float(value) if value.ndim == 0 else value.tolist()
    return (
        float(value)
        if isinstance(value, int | float) or getattr(value, "ndim", None) == 0
        else value
    )


_BY_NAME: dict[str, Callable[[int, Scores], Metric]] = {
    "auc": Auc,
    "balanced_accuracy": BalancedAccuracy,
    "confusion_matrix": ConfusionMatrix,
    "r2": R2,
}

"""Metrics of a step: the loss at the last stage and what is counted with it."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as functional
from torch import Tensor

from gems.data.dataset import NO_LABEL as NO_LABEL


@dataclass(slots=True)
class Metrics:
    """Sums over the labels that a rank has seen at the last stage: one per image, or one per token."""

    loss_sum: float = 0.0
    num_correct: int = 0
    num_labels: int = 0


@dataclass(slots=True)
class MetricSums:
    """Sums as tensors: reading them at each micro-batch would make the host wait for a GPU."""

    losses: list[Tensor] = field(default_factory=list)
    hits: list[Tensor] = field(default_factory=list)
    labels: list[Tensor] = field(default_factory=list)

    def add(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of a micro-batch, summed over its labels, and count it."""
        loss = summed_loss(logits, labels)
        self.losses.append(loss.detach())
        self.hits.append((logits.detach().argmax(1) == labels).sum())
        self.labels.append((labels != NO_LABEL).sum())
        return loss

    def loss_gradient(self, labels_per_step: int) -> Tensor:
        """Return the gradient of a micro-batch's summed loss in the mean over all labels of the step."""
        return torch.full_like(self.losses[-1], 1.0 / labels_per_step)

    def read(self) -> Metrics:
        """Return the sums as numbers."""
        if not self.losses:
            return Metrics()
        loss = float(torch.stack(self.losses).double().sum())
        return Metrics(loss, int(torch.stack(self.hits).sum()), int(torch.stack(self.labels).sum()))


def summed_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy summed over the labels, computed in float32 at least."""
    wide = logits.float() if logits.dtype is torch.bfloat16 else logits
    return functional.cross_entropy(wide, labels, reduction="sum", ignore_index=NO_LABEL)

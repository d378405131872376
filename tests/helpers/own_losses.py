"""Losses as users write them, for images of classes and of pixels."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class Focal(nn.Module):
    """A mean over samples, as most are written."""

    def __init__(self, gamma: float = 2.0) -> None:
        super().__init__()
        self.gamma = gamma

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = functional.cross_entropy(logits, labels, reduction="none")
        return ((1 - torch.exp(-each)) ** self.gamma * each).mean()


class WeightedFocal(Focal):
    """A mean by the labels' weights, which the loss tells."""

    def __init__(self, weights: list[float], gamma: float = 2.0) -> None:
        super().__init__(gamma)
        self.register_buffer("weights", torch.tensor(weights))

    def weight(self, labels: Tensor) -> Tensor:
        return self.weights[labels].sum()

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        each = functional.cross_entropy(logits, labels, reduction="none")
        return (self.weights[labels] * each).sum() / self.weight(labels)


class WithReduction(nn.Module):
    """A mean by the labels' weights, with torch's argument."""

    def __init__(self, weights: list[float], reduction: str = "mean") -> None:
        super().__init__()
        self.inner = nn.CrossEntropyLoss(torch.tensor(weights), reduction=reduction)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.inner(logits, labels)


def summed_or_mean(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """A function, whose mean counts the first class twice."""
    weights = 1.0 + (labels == 0)
    total = (weights * functional.cross_entropy(logits, labels, reduction="none")).sum()
    return total if reduction == "sum" else total / weights.sum()


def batch_dice(logits: Tensor, labels: Tensor) -> Tensor:
    """The Dice loss over all that it is called with: of two halves it is no mean."""
    share = logits.softmax(1)[:, 1]
    return 1 - 2 * (share * labels).sum() / (share.sum() + labels.sum() + 1)


def image_dice(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of the Dice losses of images."""
    share = logits.softmax(1)[:, 1]
    both, sums = ((share * (labels == 1)).sum((1, 2)), share.sum((1, 2)))
    return (1 - 2 * both / (sums + (labels == 1).sum((1, 2)) + 1)).mean()


def worst_pixels(logits: Tensor, labels: Tensor) -> Tensor:
    """The mean of the larger half of each image's losses."""
    each = functional.cross_entropy(logits, labels, reduction="none").flatten(1)
    return each.topk(each.shape[1] // 2)[0].mean()


def detached_mean(logits: Tensor, labels: Tensor) -> Tensor:
    """A mean over pixels whose gradient alone depends on other pixels."""
    each = functional.cross_entropy(logits, labels, reduction="none")
    spread = each.mean((1, 2), keepdim=True)
    return (each + (spread - spread.detach()) * each.detach()).mean()


def by_outputs(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    """A mean whose weights come from the outputs."""
    weights = logits.detach().softmax(1)[:, 0]
    total = (weights * functional.cross_entropy(logits, labels, reduction="none")).sum()
    return total if reduction == "sum" else total / weights.sum()


def of_two(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """A loss of a model with two outputs."""
    return functional.cross_entropy(outputs["out"], labels) + 0.4 * functional.cross_entropy(
        outputs["aux"], labels
    )


def of_pixels_and_image(outputs: dict[str, Tensor], labels: Tensor) -> Tensor:
    """A loss of a model that gives scores for pixels and for the image, whose class is that of its first pixel."""
    of_image = functional.cross_entropy(outputs["aux"], labels[:, 0, 0])
    return functional.cross_entropy(outputs["out"], labels) + 0.4 * of_image


class Costs(nn.Module):
    """Constants in a type of their own, as from a list or from numpy, which the toolkit does not convert."""

    def __init__(self, dtype: str = "float32") -> None:
        super().__init__()
        self.costs = [[0.0, 1.0, 2.0], [1.0, 0.0, 1.0], [2.0, 1.0, 0.0]]
        self.dtype = getattr(torch, dtype)

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        costs = torch.tensor(self.costs, dtype=self.dtype)[labels]
        return torch.einsum("nc,nc->n", logits.softmax(1), costs).mean()


def broken(logits: Tensor, labels: Tensor) -> Tensor:
    return logits.view(-1, 7) - labels


class WithParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, logits: Tensor, labels: Tensor) -> Tensor:
        return self.scale * functional.cross_entropy(logits, labels)

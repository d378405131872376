"""Networks as users write them: some that can be cut into layers, and some that cannot."""

from __future__ import annotations

import torch
import torch.nn.functional as functional
from torch import Tensor, nn


def chain(width: int = 4, num_classes: int = 2) -> nn.Sequential:
    """A Sequential with a Sequential in it, and an activation in place at the beginning of a layer."""
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1),
        nn.Sequential(
            nn.ReLU(inplace=True),
            nn.Conv2d(width, width, 3, stride=2, padding=1),
            nn.ReLU(inplace=True),
        ),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Linear(4 * width, num_classes),
    )


class Cell(nn.Module):
    """Takes the last two maps and gives the last one and a new one.

    Chooses by values that nobody traces.
    """

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(2 * width, width, 3, padding=1)

    def forward(self, maps: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        before, last = maps
        return last, torch.tanh(self.conv(torch.cat([before, last], dim=1)))


class Twice(nn.Module):
    """A block that returns its map twice."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, width, 3, padding=1)

    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        out = self.conv(image)
        return out, out


class Vote(nn.Module):
    """Logits from two maps."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.linear = nn.Linear(2 * width, 2)

    def forward(self, maps: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(torch.cat(maps, dim=1).mean(dim=(2, 3)))


def cells(width: int = 4) -> nn.Sequential:
    """A Sequential whose layers hand on pairs."""
    return nn.Sequential(Twice(width), Cell(width), Cell(width), Vote(width))


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(width, width, 3, padding=1)
        self.norm = nn.GroupNorm(2, width)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.relu(self.norm(self.conv(x)))


class Backbone(nn.Module):
    """A stem and two lists of blocks."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, padding=1)
        self.stages = nn.ModuleList(nn.Sequential(Block(width), Block(width)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for stage in self.stages:
            x = stage(x)
        return x


class Wrapped(nn.Module):
    """A backbone, one activation used everywhere, dropout that its forward applies, and a choice by shape."""

    def __init__(self, width: int = 4, drop: float = 0.0) -> None:
        super().__init__()
        self.drop = drop
        self.backbone = Backbone(width)
        self.activation = nn.ReLU()
        self.mix = nn.Conv2d(width, width, 1)
        self.head = nn.Linear(width, 2)
        self.unused = nn.Linear(3, 3)
        self.register_buffer("scale", torch.full((width, 1, 1), 2.0))

    def forward(self, image: Tensor) -> Tensor:
        x = self.backbone(image)
        if x.shape[-1] % 2:
            x = functional.pad(x, (0, 1))
        x = self.activation(self.mix(self.activation(x)) * self.scale)
        x = functional.dropout(x, self.drop, training=self.training)
        return self.head(x.flatten(2).mean(dim=2))


class Tied(nn.Module):
    """One convolution used by the first and the third of four layers."""

    def __init__(self) -> None:
        super().__init__()
        self.shared = nn.Conv2d(3, 3, 3, padding=1)
        self.middle = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, 2)

    def forward(self, image: Tensor) -> Tensor:
        x = self.shared(torch.tanh(self.middle(self.shared(image))))
        return self.head(x.mean(dim=(2, 3)))


class Carried(nn.Module):
    """One parameter used in every layer, and a tensor changed in place after a later layer has got it."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.randn(3, 1, 1))
        self.first = nn.Conv2d(3, 3, 3, padding=1)
        self.second = nn.Conv2d(3, 3, 3, padding=1)
        self.head = nn.Linear(3, 2)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image + self.bias)
        y = self.second(x * 1.0)
        x += self.bias
        return self.head((y + x + self.bias).mean(dim=(2, 3)))


class Early(nn.Module):
    """Ends with a layer whose output nobody uses, after the logits are there."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 2, 3, padding=1)
        self.second = nn.Conv2d(2, 2, 3, padding=1)
        self.watched = nn.Conv2d(2, 2, 3, padding=1)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        logits = self.second(x).mean(dim=(2, 3))
        self.watched(x.detach())
        return logits


class Written(nn.Module):
    """Writes into a part of what another layer gave, by an index and by a view of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Linear(4, 2)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        y = self.second(x * 2)
        x[:, :2] = y[:, 2:]
        x.flatten(2).add_(1)
        return self.third((x + y).mean(dim=(2, 3)))


class Aliased(nn.Module):
    """Hands on a map and a view of it, and changes the one while the other is still needed."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(3, 4, 3, padding=1)
        self.second = nn.Conv2d(4, 4, 3, padding=1)
        self.third = nn.Conv2d(4, 4, 3, padding=1)
        self.head = nn.Linear(4, 2)

    def forward(self, image: Tensor) -> Tensor:
        x = self.first(image)
        rows = x.flatten(2)
        y = self.second(image.mean(dim=1, keepdim=True).expand(-1, 4, -1, -1))
        x *= 2
        y = self.third(y)
        return self.head(rows.mean(dim=2) + y.mean(dim=(2, 3)))


class Named(nn.Module):
    """Two layers between which a dictionary crosses."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Split()
        self.second = nn.Conv2d(3, 3, 3, padding=1)
        self.third = Join()

    def forward(self, image: Tensor) -> Tensor:
        named = self.first(image)
        return self.third(self.second(image), named)


class Split(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 3, 3, padding=1)

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        return {"map": self.conv(image)}


class Join(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)

    def forward(self, x: Tensor, named: dict[str, Tensor]) -> Tensor:
        return self.linear((x + named["map"]).mean(dim=(2, 3)))


class Normed(nn.Module):
    """Batch norm over what global pooling leaves: one value a channel for each image."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.head = nn.Linear(3, 2)

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.norm(image.mean(dim=(2, 3))))


class ReadsItself(nn.Module):
    """A constructor that reads values, which the meta device does not have, and draws from numpy as well."""

    def __init__(self) -> None:
        super().__init__()
        import numpy as np

        self.rates = [rate.item() for rate in torch.linspace(0, 1, 3)]
        self.conv = nn.Conv2d(3, 2, 1)
        self.offset = nn.Parameter(torch.tensor(np.random.standard_normal(2), dtype=torch.float32))

    def forward(self, image: Tensor) -> Tensor:
        return self.conv(image).mean(dim=(2, 3)) * self.rates[1] + self.offset


class _Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 2, 1)
        self.more = nn.Conv2d(2, 2, 1)


class ChoosesByValue(_Base):
    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image)
        if x.mean() > 0:  # the choice
            x = self.more(x)
        return x.mean(dim=(2, 3))


class CountsPixels(_Base):
    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image)
        for _ in range(x.shape[2]):  # the count
            x = self.more(x)
        return x.mean(dim=(2, 3))


class MakesTensor(_Base):
    def forward(self, image: Tensor) -> Tensor:
        x = self.more(self.conv(image))
        return (x + torch.randn(2, 1, 1)).mean(dim=(2, 3))  # the tensor


class Mismatched(_Base):
    def forward(self, image: Tensor) -> Tensor:
        return self.conv(self.conv(image)).mean(dim=(2, 3))  # the mismatch


class TwoOutputs(_Base):
    def forward(self, image: Tensor) -> tuple[Tensor, Tensor]:
        x = self.conv(image)
        return x.mean(dim=(2, 3)), x


class NoTensor(_Base):
    def forward(self, image: Tensor) -> dict[str, int]:
        self.conv(image)
        return {"scores": 3}


class OnlyInTraining(_Base):
    def forward(self, image: Tensor) -> Tensor:
        x = self.conv(image)
        if self.training:
            x = self.more(x)
        return x.mean(dim=(2, 3))


class FailsToBeMade(nn.Module):
    def __init__(self, size: int = 3) -> None:
        super().__init__()
        raise ValueError("cannot be that small")  # the failure


class HasNoParameters(nn.Module):
    def forward(self, image: Tensor) -> Tensor:
        return image.mean(dim=(2, 3))[:, :2]


def lazy() -> nn.Module:
    """A network that learns its shapes from its first images."""
    return nn.Sequential(nn.Flatten(), nn.LazyLinear(2))


def gives_a_number(size: int = 3) -> int:
    """A function that gives no module."""
    return size


NOT_CALLABLE = 3


class KeepsNormFrozen(nn.Module):
    """A backbone whose batch norm stays in evaluation and is not trained, as in fine-tuning, and dropout."""

    def __init__(self, rate: float = 0.5) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.Dropout2d(rate)
        )
        self.block = nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU())
        self.drop = nn.Dropout(rate)
        self.head = nn.Linear(4, 2)
        self.stem[1].running_mean.fill_(0.3)
        self.stem[1].requires_grad_(False)

    def train(self, mode: bool = True) -> KeepsNormFrozen:
        super().train(mode)
        self.stem[1].eval()
        return self

    def forward(self, image: Tensor) -> Tensor:
        return self.head(self.drop(self.block(self.stem(image)).mean(dim=(2, 3))))

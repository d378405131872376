"""Networks as users write them that need the whole image nowhere, so that they can run in strips."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional


class FrozenNorm(nn.BatchNorm2d):
    """A batch norm with the statistics that it came with, as in fine-tuning of one image at a time."""

    def __init__(self, channels: int) -> None:
        super().__init__(channels)
        nn.init.normal_(self.running_mean)
        nn.init.uniform_(self.running_var, 0.5, 2.0)
        self.train()

    def train(self, mode: bool = True) -> FrozenNorm:
        return super().train(False)


class StandardConv(nn.Conv2d):
    """A convolution with standardised weights."""

    def forward(self, x: Tensor) -> Tensor:
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), keepdim=True)
        weight = (self.weight - mean) * torch.rsqrt(variance + 1e-4)
        return functional.conv2d(
            x, weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


class DropPath(nn.Module):
    """Drops a branch for some images."""

    def forward(self, x: Tensor) -> Tensor:
        if not self.training:
            return x
        return (
            x * torch.empty(len(x), 1, 1, 1, dtype=x.dtype, device=x.device).bernoulli_(0.7) / 0.7
        )


class Block(nn.Module):
    """A residual block, which may halve the map."""

    def __init__(
        self, channels: int, width: int, stride: int, conv: type[nn.Conv2d], norm: type[nn.Module]
    ) -> None:
        super().__init__()
        self.first, self.norm1 = conv(channels, width, 3, stride, 1), norm(width)
        self.second, self.norm2 = conv(width, width, 3, 1, 1), norm(width)
        self.skip = (
            conv(channels, width, 1, stride) if stride > 1 or channels != width else nn.Identity()
        )
        self.relu = nn.ReLU(inplace=True)
        self.drop = DropPath()

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.norm1(self.first(x)))
        return self.relu(self.drop(self.norm2(self.second(y))) + self.skip(x))


class Residual(nn.Module):
    """A ResNet with frozen norms or none.

    A 7x7 stem of stride 2, overlapping pooling, residual blocks and dropout.
    """

    def __init__(self, num_classes: int = 3, width: int = 4, is_frozen: bool = True) -> None:
        super().__init__()
        conv = nn.Conv2d if is_frozen else StandardConv
        norm = FrozenNorm if is_frozen else nn.Identity
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3), norm(width)
        self.pool = nn.MaxPool2d(3, 2, 1)
        self.block1 = Block(width, width, 1, conv, norm)
        self.drop = nn.Dropout2d(0.2)
        self.block2 = Block(width, 2 * width, 2, conv, norm)
        self.block3 = Block(2 * width, 2 * width, 1, conv, norm)
        self.mean = nn.AdaptiveAvgPool2d(1)
        self.forget = nn.Dropout(0.3)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.pool(self.norm(self.stem(images)).relu())
        x = self.block3(self.block2(self.drop(self.block1(x))))
        return self.head(self.forget(self.mean(x).flatten(1)))


class Pooled(nn.Module):
    """Residual blocks with gated attention over all positions, beside their largest values.

    With a `gate`, squeeze-and-excitation and group norm stand before it.
    """

    def __init__(self, num_classes: int = 3, width: int = 4, gate: bool = False) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 3, 2, 1)
        self.block1 = Block(width, width, 1, nn.Conv2d, FrozenNorm)
        self.block2 = Block(width, 2 * width, 2, nn.Conv2d, FrozenNorm)
        self.gate = nn.Conv2d(2 * width, 2 * width, 1) if gate else None
        self.norm = nn.GroupNorm(2, 2 * width) if gate else nn.Identity()
        self.value, self.weight = nn.Linear(2 * width, 3), nn.Linear(2 * width, 3)
        self.score = nn.Linear(3, 1)
        self.head = nn.Linear(6 * width, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.block2(self.block1(self.stem(images).relu()))
        if self.gate is not None:
            x = x * torch.sigmoid(self.gate(x.mean((2, 3), keepdim=True)))
        tokens = self.norm(x).flatten(2).transpose(1, 2)
        scores = self.score(torch.tanh(self.value(tokens)) * torch.sigmoid(self.weight(tokens)))
        attended = torch.bmm(torch.softmax(scores.transpose(1, 2), -1), tokens).squeeze(1)
        largest = tokens.topk(3, 1).values.mean(1)
        return self.head(torch.cat([attended, x.amax((2, 3)), largest], 1))


class Dilated(nn.Module):
    """A segmenter: dilated convolutions with a long skip around them, and a transposed one up to all pixels.

    `has_class` gives scores for the whole image beside those of pixels.
    """

    def __init__(self, num_classes: int = 2, width: int = 4, has_class: bool = False) -> None:
        super().__init__()
        self.down = nn.Conv2d(3, width, 4, 2, 1)
        self.wide = nn.Conv2d(width, width, 3, padding=2, dilation=2)
        self.wider = nn.Conv2d(width, width, 3, padding=4, dilation=4, groups=2)
        self.up = nn.ConvTranspose2d(2 * width, width, 4, 2, 1)
        self.head = nn.Conv2d(width + 3, num_classes, 3, padding=1)
        self.whole = nn.Linear(width, num_classes) if has_class else None

    def forward(self, images: Tensor) -> Tensor | dict[str, Tensor]:
        x = self.down(images).relu()
        y = torch.sigmoid(self.wider(self.wide(x).relu()))
        z = self.up(torch.cat([x, y], 1))
        scores = self.head(torch.cat([images, z], 1))
        if self.whole is None:
            return scores
        return {"out": scores, "aux": self.whole(y.mean((2, 3)))}


class DropValues(nn.Module):
    """Drops single values of a map."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.conv, self.drop, self.head = (
            nn.Conv2d(3, 4, 3),
            nn.Dropout(0.5),
            nn.Linear(4, num_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.drop(self.conv(images)).mean((2, 3)))


class WholeInEvaluation(nn.Module):
    """Takes what is most of the whole map, in evaluation alone."""

    def __init__(self, num_classes: int = 3) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3), nn.Linear(4, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv(images)
        return self.head((x if self.training else x.sort(2).values[:, :, 1:]).mean((2, 3)))

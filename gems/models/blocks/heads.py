"""Classifiers: a pooled head, fully connected layers, and a head with an auxiliary loss."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.nn import functional

from gems.models.blocks.parts import conv2d, dropout, hidden_linear, norm2d

_AUXILIARY_SIDE = 5
_AUXILIARY_STRIDE = 3


class Head(nn.Module):
    """Global average pooling, dropout and one linear map.

    If `activate`, norm and ReLU come first (ResNet version 2). Input (N, in_channels, H, W), output
    logits (N, num_classes); the loss applies log-softmax.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        norm: str,
        activate: bool,
        dropout_rate: float = 0.0,
    ) -> None:
        super().__init__()
        self.activation = (
            nn.Sequential(norm2d(norm, in_channels), nn.ReLU()) if activate else nn.Identity()
        )
        self.dropout = dropout(dropout_rate)
        self.linear = nn.Linear(in_channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.linear(self.dropout(self.activation(x).mean(dim=(2, 3))))
        return out


class Flatten(nn.Module):
    """An average pooling of a map of any size to `side_px` per side, and a flattening.

    It gives the linear map that follows a fixed size. Input (N, C, H, W), output (N, C x side_px x
    side_px). At the published size the pooling changes no value.
    """

    def __init__(self, side_px: int) -> None:
        super().__init__()
        self.side_px = side_px

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[2:] != (self.side_px, self.side_px):
            x = functional.adaptive_avg_pool2d(x, self.side_px)
        return x.flatten(1)


class FullyConnected(nn.Sequential):
    """Dropout, a linear map, and a ReLU unless `is_last`.

    If `map_px` is not 0, `Flatten` comes first. Input (N, in_features) or a map (N, in_features /
    map_px^2, H, W), output (N, out_features).
    """

    def __init__(
        self, in_features: int, out_features: int, map_px: int, dropout_rate: float, is_last: bool
    ) -> None:
        steps: dict[str, nn.Module] = {
            "flatten": Flatten(map_px) if map_px else nn.Identity(),
            "dropout": dropout(dropout_rate),
            "linear": (nn.Linear if is_last else hidden_linear)(in_features, out_features),
            "activation": nn.Identity() if is_last else nn.ReLU(),
        }
        super().__init__(OrderedDict(steps))


class Auxiliary(nn.Module):
    """The auxiliary classifier of Inception v3.

    Source: Szegedy et al. 2015 (arXiv 1512.00567), section 4 and figure 8. It consists of a 5x5
    average pooling of stride 3, a 1x1 and a 5x5 convolution, a global average and a linear map. At
    the published 17x17 the last map is 1x1. A map too small for these windows is averaged to 5x5
    first. The input (N, in_channels, H, W) is passed on unchanged, next to logits (N, num_classes).
    """

    output_names = ("main", "auxiliary")

    def __init__(
        self, in_channels: int, inner_channels: int, out_channels: int, num_classes: int, norm: str
    ) -> None:
        super().__init__()
        self.features = nn.Sequential(
            conv2d(in_channels, inner_channels, 1, 1, norm),
            norm2d(norm, inner_channels),
            nn.ReLU(),
            conv2d(inner_channels, out_channels, _AUXILIARY_SIDE, 1, norm, padding=0),
            norm2d(norm, out_channels),
            nn.ReLU(),
        )
        self.linear = nn.Linear(out_channels, num_classes)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        height, width = x.shape[2:]
        if min(height, width) >= _AUXILIARY_SIDE + (_AUXILIARY_SIDE - 1) * _AUXILIARY_STRIDE:
            pooled = functional.avg_pool2d(x, _AUXILIARY_SIDE, _AUXILIARY_STRIDE)
        else:
            pooled = functional.adaptive_avg_pool2d(x, _AUXILIARY_SIDE)
        return x, self.linear(self.features(pooled).mean(dim=(2, 3)))


class AuxiliaryHead(Head):
    """A pooled head that combines its logits with those of an auxiliary classifier.

    In training the output is scores (N, num_classes + 1), whose cross-entropy is exactly the
    cross-entropy of the main logits plus `weight` times that of the auxiliary logits (see
    `joined_scores`). In evaluation the output is the main logits alone.
    """

    def __init__(
        self,
        in_channels: int,
        num_classes: int,
        norm: str,
        activate: bool,
        dropout_rate: float,
        weight: float,
    ) -> None:
        super().__init__(in_channels, num_classes, norm, activate, dropout_rate)
        self.weight = weight

    def forward(self, x: Tensor, auxiliary: Tensor) -> Tensor:  # type: ignore[override]
        logits = super().forward(x)
        return joined_scores(logits, auxiliary, self.weight) if self.training else logits


def joined_scores(main: Tensor, auxiliary: Tensor, weight: float) -> Tensor:
    """Return scores whose cross-entropy is the weighted sum of two classifiers' cross-entropies.

    cross-entropy(scores) = cross-entropy(main) + weight x cross-entropy(auxiliary). Both inputs are
    logits (N, C); the scores are (N, C + 1). The score of a class is log p(main) + weight log
    p(auxiliary). The exponentials of these scores sum to Z <= 1. A last column log(1 - Z), "none of
    the classes", completes the sum to one. The log-softmax of the scores is then the scores
    themselves, and the normaliser has no gradient. If 1 - Z is below its rounding error, the column
    is a constant.
    """
    wide = torch.promote_types(main.dtype, torch.float32)
    joint = main.to(wide).log_softmax(1) + weight * auxiliary.to(wide).log_softmax(1)
    rest = -torch.expm1(joint.logsumexp(1, keepdim=True))
    return torch.cat([joint, rest.clamp_min(torch.finfo(wide).eps).log()], 1)

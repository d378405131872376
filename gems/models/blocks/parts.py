"""Convolutions, linear maps and norms that all blocks share.

Weights before a ReLU are initialized as in He et al. 2015 (arXiv 1502.01852): from a normal
distribution of variance 2 / fan-in, with zero biases.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any, Self

import torch
from torch import Tensor, nn
from torch.nn import functional

from gems.streaming.ghost_norm import GhostBatchNorm2d

LAYER_NORM_EPS = 1e-6  # as in ConvNeXt; torch's default is 1e-5
# 1 / standard deviation of the ReLU of a standard normal variable
RELU_GAIN = math.sqrt(2 / (1 - 1 / math.pi))
_MIN_VARIANCE = 1e-4
_MAX_GROUPS = 8


def conv2d(
    in_channels: int,
    out_channels: int,
    kernel: int | tuple[int, int],
    stride: int,
    norm: str,
    padding: int | tuple[int, int] | None = None,
    scale: float = 1.0,
) -> nn.Conv2d:
    """Return a convolution, padded to keep the size unless `padding` is given.

    It has a bias only if no norm follows that has one. `scale` applies to standardized weights
    (`norm` "normalizer_free"): it compensates for the standard deviation of the input.
    """
    height, width = (kernel, kernel) if isinstance(kernel, int) else kernel
    pad = (height // 2, width // 2) if padding is None else padding
    has_bias = norm in ("none", "normalizer_free")
    options: dict[str, Any] = {
        "kernel_size": (height, width),
        "stride": stride,
        "padding": pad,
        "bias": has_bias,
    }
    if norm == "normalizer_free":
        conv: nn.Conv2d = ScaledStdConv2d(in_channels, out_channels, scale=scale, **options)
    else:
        conv = nn.Conv2d(in_channels, out_channels, **options)
    nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
    if conv.bias is not None:
        nn.init.zeros_(conv.bias)
    return conv


class ScaledStdConv2d(nn.Conv2d):
    """A convolution with standardized weights.

    Source: Brock, De and Smith 2021 (arXiv 2101.08692), section 4. The weights of an output channel
    have mean 0 and standard deviation scale / sqrt(fan-in), times a trained gain. Input of variance
    1 / scale^2 then gives output of variance 1, whatever its mean.
    """

    def __init__(self, in_channels: int, out_channels: int, scale: float, **options: Any) -> None:
        super().__init__(in_channels, out_channels, **options)
        self.scale = scale
        self.gain = nn.Parameter(torch.ones(out_channels))

    def forward(self, input: Tensor) -> Tensor:
        """Convolve with the standardized weights."""
        variance, mean = torch.var_mean(self.weight, dim=(1, 2, 3), correction=0, keepdim=True)
        fan_in = self.weight[0].numel()
        factor = torch.rsqrt((variance * fan_in).clamp_min(_MIN_VARIANCE)) * self.gain.view(
            -1, 1, 1, 1
        )
        weight = (self.weight - mean) * (self.scale * factor)
        return functional.conv2d(
            input, weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )


def hidden_linear(in_features: int, out_features: int) -> nn.Linear:
    """Return a linear map that is followed by a ReLU."""
    linear = nn.Linear(in_features, out_features)
    nn.init.kaiming_normal_(linear.weight, nonlinearity="relu")
    nn.init.zeros_(linear.bias)
    return linear


class _Frozen(nn.Module):
    def train(self, mode: bool = True) -> Self:
        """Stay in evaluation mode."""
        return super().train(False)


class FrozenBatchNorm2d(_Frozen, nn.BatchNorm2d):
    """Batch norm that uses its running statistics in training too.

    This is common in fine-tuning with few images at a time. Unlike torchvision's class of this
    name, it trains its weight and bias, unless optimizer.frozen says otherwise.
    """


def freeze_batch_norms(root: nn.Module) -> int:
    """Make all batch norms of a network use running statistics, and return their number."""
    norms = [
        module for module in root.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)
    ]
    for norm in norms:
        kind: Any = type(norm)
        norm.__class__ = _frozen(kind)
        norm.eval()
    return len(norms)


@cache
def _frozen(kind: Any) -> Any:
    if issubclass(kind, _Frozen):
        return kind
    return type(f"Frozen{kind.__name__}", (_Frozen, kind), {"__module__": kind.__module__})


def ghost_batch_norms(root: nn.Module) -> int:
    """Make the batch norms of a network normalize by strips, and return their number.

    User-defined classes, and norms without momentum, stay unchanged.
    """
    norms = [
        module
        for module in root.modules()
        if type(module) is nn.BatchNorm2d and module.momentum is not None
    ]
    for norm in norms:
        norm.__class__ = GhostBatchNorm2d
    return len(norms)


class LayerNorm2d(nn.LayerNorm):
    """Layer norm over the channels of each pixel, as in ConvNeXt.

    Source: Liu et al. 2022 (arXiv 2201.03545).
    """

    def __init__(self, channels: int) -> None:
        super().__init__(channels, LAYER_NORM_EPS)

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a feature map (samples, channels, height, width)."""
        return super().forward(input.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def norm2d(norm: str, channels: int) -> nn.Module:
    """Return the norm of a feature map for a value of `model.norm`.

    The name is one of "batch", "ghost_batch" (per strip), "frozen_batch" (running statistics),
    "group" (8 groups, or as many as divide the channels), "layer" (over channels), or, for no norm,
    "none" and "normalizer_free".
    """
    if norm == "batch":
        return nn.BatchNorm2d(channels)
    if norm == "ghost_batch":
        return GhostBatchNorm2d(channels)
    if norm == "frozen_batch":
        return FrozenBatchNorm2d(channels).train()
    if norm == "layer":
        return LayerNorm2d(channels)
    if norm == "group":
        return nn.GroupNorm(math.gcd(_MAX_GROUPS, channels), channels)
    return nn.Identity()


def dropout(rate: float) -> nn.Module:
    """Return dropout of a share `rate` of the values, or the identity if the rate is 0."""
    return nn.Dropout(rate) if rate else nn.Identity()


class StochasticDepth(nn.Module):
    """A layer that drops a residual branch for a share `p` of the samples, in training.

    Source: Huang et al. 2016 (arXiv 1603.09382).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, branch: Tensor) -> Tensor:
        if not self.training:
            return branch
        kept = torch.empty(
            (len(branch), 1, 1, 1), dtype=branch.dtype, device=branch.device
        ).bernoulli_(1 - self.p)
        return branch * kept / (1 - self.p)


def tame(last: nn.Conv2d, norm: str, num_blocks: int) -> None:
    """Scale down a branch without a norm by 1 / sqrt(`num_blocks`).

    Otherwise the variance would double at each of the `num_blocks` blocks. Frozen statistics count
    as no norm, because they reflect no data until weights are loaded.
    """
    if norm in ("none", "frozen_batch"):
        with torch.no_grad():
            last.weight.mul_(num_blocks**-0.5)

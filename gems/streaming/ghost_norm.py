"""A batch norm that runs in strips."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional


class GhostBatchNorm2d(nn.BatchNorm2d):
    """Batch norm with the statistics of each strip of rows.

    Source: ghost batch norm (Hoffer et al. 2017, arXiv 1705.08741). The rows of an
    image that run together in a strip are normalized together; this is a different model from batch
    norm of whole images. Each strip updates the running statistics in proportion to its rows.
    `num_batches_tracked` is never updated, because nothing reads it.

    Attributes:
        row_ends: The end row of each strip, so that whole images are normalized as in strips; None
            to normalize all rows together.
    """

    row_ends: tuple[int, ...] | None = None

    def forward(self, input: Tensor) -> Tensor:
        """Normalize a feature map (samples, channels, height, width)."""
        height = input.shape[2]
        if not self.training or self.row_ends is None:
            return self._normalize(input, 1.0)
        spans = [(begin, end) for begin, end in pairwise((0, *self.row_ends)) if begin < end]
        return torch.cat(
            [
                self._normalize(input[:, :, slice(*span)], (span[1] - span[0]) / height)
                for span in spans
            ],
            2,
        )

    def _normalize(self, rows: Tensor, share: float) -> Tensor:
        return functional.batch_norm(
            rows,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            share * (self.momentum or 0.0),
            self.eps,
        )


def set_row_ends(name: str, root: nn.Module, norm_ends: Mapping[str, tuple[int, ...]]) -> None:
    """Let the norms by strip of a layer divide whole images as a streaming form divides them."""
    for path, norm in root.named_modules():
        if isinstance(norm, GhostBatchNorm2d):
            norm.row_ends = norm_ends.get(f"{name}.{path}" if path else name)

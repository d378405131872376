"""gems.models.blocks.parts: the norms of `model.norm` beside their definitions."""

from __future__ import annotations

import torch
from torch import nn

from gems.models.blocks.parts import norm2d

IMAGES = torch.randn(2, 6, 3, 4, dtype=torch.float64)


def test_frozen_batch_norm_uses_its_running_statistics_in_training_too_and_trains_its_weight() -> None:
    norm = norm2d("frozen_batch", 6).double()
    norm.running_mean.copy_(torch.arange(6.0))
    norm.running_var.copy_(torch.arange(1.0, 7.0))
    norm.train()
    before = norm.running_mean.clone()
    out = norm(IMAGES)
    wanted = (IMAGES - before[:, None, None]) / (norm.running_var[:, None, None] + norm.eps).sqrt()
    torch.testing.assert_close(out, wanted)
    assert torch.equal(norm.running_mean, before)
    out.sum().backward()
    assert norm.weight.grad is not None and norm.bias.grad is not None


def test_layer_norm_is_over_the_channels_of_each_pixel() -> None:
    norm = norm2d("layer", 6).double()
    wanted = nn.functional.layer_norm(IMAGES.permute(0, 2, 3, 1), [6], eps=1e-6).permute(0, 3, 1, 2)
    torch.testing.assert_close(norm(IMAGES), wanted)

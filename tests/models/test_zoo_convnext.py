"""ConvNeXt: torchvision's outputs and gradients for the same weights, stochastic depth, and cuts that change no bit."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from gems.config.schema import DataConfig, ModelConfig
from gems.engine.checkpoint.state_dict import whole_model
from gems.models import layers_of
from gems.models.blocks.parts import StochasticDepth
from tests.helpers.cutting import DTYPE

SMALL = ModelConfig(name="convnext", depth=18, width=8, norm="layer")


def test_it_computes_what_torchvision_does(torchvision: Any) -> None:
    """Tensors come in the same order.

    Branches count for more than the 1e-6 that they are scaled by at first.
    """
    data = DataConfig(num_classes=5)
    convnext = torchvision.models.convnext
    setting = [
        convnext.CNBlockConfig(8 << stage, 16 << stage if stage < 3 else None, blocks)
        for stage, blocks in enumerate((3, 3, 9, 3))
    ]
    torch.manual_seed(0)
    theirs = convnext.ConvNeXt(setting, num_classes=5).to(DTYPE)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.2)
    ours = whole_model(SMALL, data).to(DTYPE)
    ours.load_state_dict(dict(zip(ours.state_dict(), theirs.state_dict().values(), strict=True)))
    images = torch.randn(2, 3, 70, 65, dtype=DTYPE)
    wanted = theirs(images)
    found = ours(images)
    (wanted**2).sum().backward()
    (found**2).sum().backward()
    torch.testing.assert_close(found, wanted, rtol=1e-10, atol=0)
    for parameter, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(
            parameter.grad, other.grad, rtol=1e-8, atol=1e-12 * float(other.grad.abs().max())
        )


def test_samples_skip_branches_at_rates_that_rise_from_none_to_that_of_the_last_block() -> None:
    model = ModelConfig(name="convnext", depth=18, width=4, norm="layer", stochastic_depth=0.34)
    rates = [
        dict(layer.options)["drop_rate"]
        for layer in layers_of(model, DataConfig())
        if layer.kind == "residual"
    ]
    assert rates == [0.34 * index / 17 for index in range(18)]
    drop = StochasticDepth(0.25)
    torch.manual_seed(0)
    made = drop(torch.ones(4000, 2, 3, 3))
    kept = made[:, 0, 0, 0] > 0
    assert torch.equal(made, kept[:, None, None, None] * torch.full_like(made, 1 / 0.75))
    assert abs(float(kept.float().mean()) - 0.75) < 0.03
    assert torch.equal(drop.eval()(made), made)

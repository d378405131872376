"""The average of the weights beside torch's own."""

from __future__ import annotations

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from gems.engine.optimization.ema import WeightAverage


def test_average_is_torchs_and_weights_come_back():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()
    theirs = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.8))
    theirs.n_averaged += 1  # begin with the weights of now, not with those after the first step
    ours = WeightAverage(module.parameters(), 0.8)
    ours.values()
    for _ in range(5):
        for parameter in module.parameters():
            parameter.data.add_(torch.randn_like(parameter))
        ours.update()
        theirs.update_parameters(module)
    x = torch.randn(2, 3).double()
    plain = module(x)
    with ours.applied():
        torch.testing.assert_close(module(x), theirs.module(x), rtol=1e-14, atol=0)
    assert torch.equal(module(x), plain)


def test_small_steps_of_bfloat16_weights_are_not_lost():
    parameter = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    average = WeightAverage([parameter], 0.999)
    average.values()
    parameter.data.fill_(1.0078125)
    for _ in range(100):
        average.update()
    (value,) = average.values()
    assert value.dtype is torch.float32 and average.num_bytes == 16
    torch.testing.assert_close(value, torch.full((4,), 1 + 0.0078125 * (1 - 0.999**100)))
    with average.applied():
        assert parameter.dtype is torch.bfloat16

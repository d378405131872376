"""Layers played both ways, with a full backward and with a split one, and held against each other bit by bit."""

from __future__ import annotations

import copy

import torch
from torch import nn

from gems.engine.stages.whole import WholeStage

SEED = 5


def make_stage(modules: list[nn.Module], is_first: bool = False) -> WholeStage:
    return WholeStage(nn.ModuleList(modules), is_first, lambda: None)


def random_like(tensors, generator) -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(t.shape, generator=generator).to(t.dtype) for t in tensors)


def play(modules, batches, is_split: bool, is_first: bool = False, order=None):
    """Run all micro-batches and gives ([outputs, input gradients, parameter gradients], the stage)."""
    torch.manual_seed(SEED)  # for dropout
    stage = make_stage(modules, is_first)
    outputs = [stage.forward(m, batch, None, is_split) for m, batch in enumerate(batches)]
    generator = torch.Generator().manual_seed(SEED)
    seeds = [random_like([t for t in out if t.is_floating_point()], generator) for out in outputs]
    given_back: dict[int, tuple[torch.Tensor, ...]] = {}
    for m in order or range(len(batches)):
        if is_split:
            before = [
                None if p.grad is None else p.grad.clone() for p in stage.modules.parameters()
            ]
            given_back[m], _ = stage.backward_input(m, seeds[m])
            for parameter, old in zip(stage.modules.parameters(), before, strict=True):
                if is_deferred(stage, parameter):
                    assert (parameter.grad is None) == (old is None)
                    assert old is None or torch.equal(parameter.grad, old)
        else:
            given_back[m], _ = stage.backward(m, seeds[m])
    if is_split:
        for m in order or range(len(batches)):
            stage.backward_weight(m)
    assert stage.num_in_flight == 0
    parameters = [p.grad for p in stage.modules.parameters()]
    inputs = [gradient for m in sorted(given_back) for gradient in given_back[m]]
    return [[t for out in outputs for t in out], inputs, parameters], stage


def is_deferred(stage: WholeStage, parameter: nn.Parameter) -> bool:
    norms = nn.modules.batchnorm._NormBase | nn.GroupNorm | nn.LayerNorm | nn.RMSNorm
    whole = set(stage.split_layers().unsplit)
    return not any(
        parameter is own
        and (isinstance(module, norms) or name in whole or key in ("bias_k", "bias_v"))
        for name, module in stage.modules.named_modules()
        for key, own in module.named_parameters(recurse=False)
    )


def check(modules, batches, is_first: bool = False, order=None, unsplit=()) -> None:
    plain = copy.deepcopy(modules)
    expected, _ = play(plain, batches, False, is_first, order)
    got, stage = play(modules, batches, True, is_first, order)
    for ours, theirs in zip(got, expected, strict=True):
        for value, wanted in zip(ours, theirs, strict=True):
            assert (value is None) == (wanted is None)
            assert value is None or torch.equal(value, wanted)
    assert any(value is not None and bool(value.abs().max() > 0) for value in got[2])
    assert stage.split_layers().unsplit == tuple(unsplit)


def batches_of(
    *shapes: tuple[int, ...], dtype=torch.float32, num: int = 3
) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(1)
    return [
        tuple(torch.randn(s, generator=generator).to(dtype) for s in shapes) for _ in range(num)
    ]

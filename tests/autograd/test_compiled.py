"""Layers through torch.compile: which are compiled, what that leaves as it was, and what it needs."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

from gems.autograd.compiled import check_compiler, compile_layers
from gems.autograd.random_draws import RandomDraws
from gems.errors import ConfigError


class Noise(nn.Module):
    """Draws in its own forward, without a rate."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.rand_like(x)


class Scaled(nn.Module):
    """Draws nothing, and counts its calls in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return x.relu_() * 2


@pytest.mark.timeout(120)
def test_layers_that_draw_stay_and_the_others_are_compiled() -> None:
    layers = [
        Scaled(),
        nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)),
        Noise(),
        nn.Linear(4, 4),
        nn.BatchNorm1d(4),
    ]
    draws = RandomDraws(0)
    for number, layer in enumerate(layers):
        draws.watch(f"layer{number}", layer.train())
    before = torch.full((3, 4), -1.0)
    state = torch.get_rng_state()
    given = before.clone()
    assert compile_layers(layers, [given], draws.is_drawing, backend="eager") == [
        layers[1],
        layers[2],
    ]
    assert ["forward" in vars(layer) for layer in layers] == [True, False, False, True, True]
    assert torch.equal(given, before), "the first layer works in place"
    assert (
        layers[0].calls == 0
        and layers[4].num_batches_tracked == 0
        and torch.equal(torch.get_rng_state(), state)
    )
    assert not any("forward" in name for layer in layers for name in layer.state_dict())
    draws.at(0, 0)
    first = layers[2](layers[1](layers[0](given.clone())))
    assert layers[0].calls == 1
    draws.at(0, 0)
    assert torch.equal(layers[2](layers[1](layers[0](given.clone()))), first), (
        "the streams of modules are as ever"
    )


def test_a_layer_may_be_compiled_for_as_many_shapes_as_there_are_layers() -> None:
    with torch._dynamo.config.patch(recompile_limit=8):
        compile_layers([nn.Identity() for _ in range(20)], [torch.ones(1)], lambda layer: True)
        assert torch._dynamo.config.recompile_limit == 160


def test_a_machine_that_cannot_compile_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(
        ConfigError,
        match=r"train.compile=true: needs a C\+\+ compiler, and no-such-compiler is not",
    ):
        check_compiler(torch.device("cpu"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"train.compile=true: needs the package triton on a GPU"):
        check_compiler(torch.device("cuda", 0))


@pytest.mark.timeout(240)
def test_kernels_are_those_of_the_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """On this processor without its vector instructions, whose headers take half a minute to compile."""
    try:
        check_compiler(torch.device("cpu"))
    except ConfigError as error:
        pytest.skip(str(error))
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.cpp.vec_isa_ok", False)
    torch.manual_seed(0)
    layer = nn.Sequential(nn.Linear(5, 4), nn.Tanh()).double()
    given = torch.randn(3, 5, dtype=torch.float64)
    expected = layer(given)
    expected.square().sum().backward()
    gradients = [parameter.grad for parameter in layer.parameters()]
    layer.zero_grad()
    assert compile_layers([layer], [given], lambda layer: False) == []
    found = layer(given)
    found.square().sum().backward()
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)
    for parameter, gradient in zip(layer.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, gradient, rtol=1e-12, atol=1e-12)

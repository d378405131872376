"""What needs the whole image is refused in one line: which layer, why, and what to do."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gems.config.schema import DataConfig, ModelConfig
from gems.errors import ConfigError
from gems.models import layers_of
from gems.models.build import build_layers
from gems.models.mixed import Precision, compute_in
from gems.models.streaming_errors import config_errors, until_in
from gems.streaming.errors import StreamingError
from tests.helpers.strips_rig import Function, cut_stages


class SqueezeExcite(nn.Module):
    def __init__(self, pools_by_module: bool) -> None:
        super().__init__()
        self.pools_by_module = pools_by_module
        self.pool, self.gate = nn.AdaptiveAvgPool2d(1), nn.Conv2d(4, 4, 1)

    def forward(self, x: Tensor) -> Tensor:
        pooled = self.pool(x) if self.pools_by_module else x.mean((2, 3), keepdim=True)
        return x * torch.sigmoid(self.gate(pooled))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        out: Tensor = self.attend(tokens, tokens, tokens)[0]
        return out


def pixels(self: nn.Module, tokens: Tensor) -> Tensor:
    return tokens.transpose(1, 2).reshape(2, 4, 14, 14)


def writes(self: nn.Module, x: Tensor) -> Tensor:
    flat = x.flatten(2)
    x += 1
    return flat.mean(2)


REFUSED: dict[str, tuple[nn.Module | Callable[..., Any], str, str]] = {
    "batch_norm": (
        nn.BatchNorm2d(4),
        "b.1 (BatchNorm2d: batch_norm)",
        "model.norm=frozen_batch|none|layer|ghost_batch, or parallel.strips_until=<a layer",
    ),
    "group_norm": (
        nn.GroupNorm(2, 4),
        "b.1 (GroupNorm: group_norm)",
        "model.norm=frozen_batch|none|layer",
    ),
    "instance_norm": (
        nn.InstanceNorm2d(4),
        "(InstanceNorm2d: instance_norm)",
        "model.norm=frozen_batch|none|layer",
    ),
    "attention": (
        nn.Sequential(Attention(), Function(pixels), nn.Conv2d(4, 4, 3)),
        "b.1.0.attend (MultiheadAttention: bmm) is attention over the whole image",
        "set parallel.strips_until=<a layer before it>, or set parallel.strips=1",
    ),
    "attention_by_hand": (
        lambda self, x: x @ x.transpose(2, 3),
        "attention over the whole image",
        "set parallel.strips=1",
    ),
    "squeeze_excite": (
        SqueezeExcite(True),
        "b.1 (SqueezeExcite: mul) joins a map with what is pooled over the whole image",
        "set parallel.strips_until=<a layer before it>, or set parallel.strips=1",
    ),
    "squeeze_excite_by_mean": (
        SqueezeExcite(False),
        "squeeze-and-excitation",
        "set parallel.strips=1",
    ),
    "circular": (
        nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular"),
        "rows of the bottom",
        "parallel.strips=1",
    ),
    "sorted": (
        lambda self, x: x.sort(1)[0],
        "sort) is an operation without a streaming form",
        "parallel.strips=1",
    ),
    "normalised_rows": (
        lambda self, x: torch.softmax(x, 2),
        "reaches over all rows",
        "parallel.strips=1",
    ),
    "largest": (
        lambda self, x: x.norm(dim=(2, 3)),
        "needs all rows of the map at once",
        "parallel.strips=1",
    ),
    "other_name": (writes, "changes in place", "parallel.strips=1"),
    "stacked": (lambda self, x: torch.cat([x, x], 2), "on top of each other", "parallel.strips=1"),
    "by_value": (
        lambda self, x: x if x.sum() > 0 else -x,
        "layer b cannot be traced",
        "parallel.strips=1",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_one_line_names_the_layer_and_what_to_do(name: str) -> None:
    made, *words = REFUSED[name]
    module = made if isinstance(made, nn.Module) else Function(made)
    layers = [("a", nn.Conv2d(3, 4, 3)), ("b", nn.Sequential(nn.ReLU(), module))]
    with pytest.raises(ConfigError) as caught, config_errors(2):
        cut_stages(layers, torch.zeros(2, 3, 16, 16), (8, 16))
    text = str(caught.value)
    assert text.startswith("parallel.strips=2: ") and "\n" not in text
    assert all(word in text for word in words), text


def test_the_same_layers_stream_where_nothing_needs_the_whole_image() -> None:
    """In evaluation batch norm has its statistics.

    Over what a global pooling leaves a norm sees no rows.
    """
    head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.BatchNorm1d(4), nn.Linear(4, 2))
    layers = [("a", nn.Conv2d(3, 4, 3)), ("b", nn.BatchNorm2d(4).eval()), ("c", head)]
    cut_stages(layers, torch.zeros(2, 3, 16, 16), (8, 16))


def test_casts_within_an_operation_are_refused() -> None:
    """In mixed precision einsum computes a product, which is cast, of what it makes of its arguments on the way."""
    weight = nn.Parameter(torch.ones(3, 3))
    layer = Function(lambda self, x: x + torch.einsum("ij,kj->ik", self.weight, self.weight).mean())
    layer.weight = weight
    with pytest.raises(
        StreamingError,
        match=r"layer a \(Function: aten.einsum.*is cast in parts by mixed precision",
    ):
        cut_stages(
            [("a", compute_in(layer, Precision.of("bf16_mixed")))],
            torch.zeros(1, 3, 8, 8).bfloat16(),
            (4, 8),
        )


def test_autocast_without_mixed_precision_is_refused() -> None:
    def run(self: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return x * 2

    with pytest.raises(StreamingError, match="layer a turns autocast on"):
        cut_stages([("a", Function(run))], torch.zeros(1, 3, 8, 8), (4, 8))


def test_a_network_of_the_zoo_with_batch_norm_is_refused_at_its_first_norm() -> None:
    model = ModelConfig(name="resnet", depth=20, width=4)
    data = DataConfig(height_px=32, width_px=32)
    layers = layers_of(model, data)
    modules = build_layers(layers, 0, len(layers), 0)
    named = [(layer.name, module) for layer, module in zip(layers, modules, strict=True)]
    with pytest.raises(StreamingError, match=r"layer stem\.activation\.0 "):
        cut_stages(named, torch.zeros(1, 3, 32, 32), (16, 32))


def test_stages_before_and_after_the_layer_of_strips_until() -> None:
    names = ["stem", "block1", "block10", "head"]
    stages = [names[:1], names[1:3], names[3:]]
    for until in ("block1", "block1.conv", "block10"):
        assert [until_in(stage, names, until) for stage in stages] == [None, until, ""]
    assert until_in(names, names, None) is None
    with pytest.raises(ConfigError, match=r"^parallel\.strips_until=block2: is no layer; give one"):
        until_in(names, names, "block2")

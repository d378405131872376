"""Networks in strips, in one stage and in several, equal themselves on the whole image."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.storages import StashMeter
from gems.config.schema import ModelConfig
from gems.models.blocks.convnext import Block as ConvNeXtBlock
from gems.models.imported import parts
from gems.streaming.axis_rules import even_ends
from gems.streaming.strip_sample import StripSample
from tests.helpers.strips_rig import (
    DTYPE,
    TOLERANCE,
    Function,
    Layers,
    cut_stages,
    error,
    run_whole,
    spans,
    zoo,
)

COUNTS = (2, 3, 7, 16)


def convnext(image: Tensor) -> Layers:
    """Branches count for more than the 1e-6 that they are scaled by at first."""
    model = ModelConfig(name="convnext", depth=18, width=4, norm="layer")
    layers = zoo(model, *image.shape[2:])
    for _, module in layers:
        if isinstance(module, ConvNeXtBlock):
            nn.init.constant_(module.scale, 0.5)
    return layers


class OwnNet(nn.Module):
    """A user's own network: dilated convolutions, dense joins, an up-convolution to a skip, two outputs by rows."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, width, 5, stride=2, padding=2)
        self.dilated = nn.ModuleList(
            nn.Conv2d(width * (1 + step), width, 3, padding=2**step, dilation=2**step)
            for step in range(3)
        )
        self.down = nn.Sequential(
            nn.Conv2d(4 * width, width, 3, 2, 1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2)
        )
        self.up = nn.ConvTranspose2d(width, width, 8, stride=4, padding=1, output_padding=1)
        self.mix = nn.Conv2d(5 * width, 3, 3, padding=1, groups=1)

    def forward(self, image: Tensor) -> Tensor:
        x = functional.elu(self.stem(image))
        for conv in self.dilated:
            x = torch.cat([x, functional.relu(conv(x))], dim=1)
        wide = self.up(self.down(x))
        wide = functional.pad(wide, (0, x.shape[3] - wide.shape[3], 0, x.shape[2] - wide.shape[2]))
        return self.mix(torch.cat([x, wide], 1))


def own(image: Tensor) -> Layers:
    _, height, width = image.shape[1:]
    request = {
        "target": f"{__name__}.OwnNet",
        "kwargs": {},
        "path": None,
        "norm": "batch",
        "image": [3, height, width],
    }
    _, layers = parts.whole_with_parts(json.dumps(request), 0, DTYPE, torch.device("cpu"))
    return [(f"part{number}", layer) for number, layer in enumerate(layers)]


SMALL = ModelConfig(width=4, norm="none")
NETWORKS: dict[str, tuple[Callable[[Tensor], Layers], int, int]] = {
    "vgg16": (lambda x: zoo(replace(SMALL, name="vgg", depth=16), *x.shape[2:]), 70, 33),
    "alexnet": (lambda x: zoo(replace(SMALL, name="alexnet", width=8), *x.shape[2:]), 99, 67),
    "googlenet": (lambda x: zoo(replace(SMALL, name="googlenet", width=8), *x.shape[2:]), 69, 32),
    "resnet8": (lambda x: zoo(replace(SMALL, name="resnet", depth=8), *x.shape[2:]), 34, 32),
    "resnet11_v2": (
        lambda x: zoo(
            replace(SMALL, name="resnet", depth=11, version=2, norm="batch"), *x.shape[2:]
        ),
        34,
        8,
    ),
    "resnet50": (
        lambda x: zoo(replace(SMALL, name="resnet_imagenet", depth=50, norm="batch"), *x.shape[2:]),
        65,
        32,
    ),
    "nf_resnet18": (
        lambda x: zoo(
            ModelConfig(
                name="resnet_imagenet", depth=18, version=2, width=4, norm="normalizer_free"
            ),
            *x.shape[2:],
        ),
        65,
        32,
    ),
    "unet": (lambda x: zoo(replace(SMALL, name="unet", depth=4), *x.shape[2:]), 45, 24),
    "inception_v3": (
        lambda x: zoo(
            replace(SMALL, name="inception_v3", norm="batch", auxiliary=True), *x.shape[2:]
        ),
        99,
        75,
    ),
    "amoebanet": (
        lambda x: zoo(ModelConfig(name="amoebanet", depth=3, width=8), *x.shape[2:]),
        37,
        16,
    ),
    "convnext": (convnext, 67, 32),
    "own": (own, 61, 24),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_strips_equal_the_whole_image(name: str) -> None:
    """Four counts of strips, of which the height is no multiple, in one stage and in three.

    Some layers wait. Of the two largest networks it is the last two counts.
    """
    torch.manual_seed(0)
    make, height, width = NETWORKS[name]
    image = torch.randn(1, 3, height, width, dtype=DTYPE)
    layers = make(image)
    ways = zip(COUNTS, (1, 3, 3, 1), (1, 64, 16, 16), strict=True)
    cases = [(even_ends(height, strips), num_stages, least) for strips, num_stages, least in ways]
    if name in ("inception_v3", "amoebanet"):
        cases = cases[2:]
    assert error(layers, image, cases) <= TOLERANCE


def test_strips_of_any_height_and_more_of_them_than_rows_of_deep_layers() -> None:
    torch.manual_seed(0)
    image = torch.randn(2, 3, 40, 32, dtype=DTYPE)
    layers = zoo(replace(SMALL, name="resnet_imagenet", depth=18), 40, 32)
    assert error(layers, image, [((1, 2, 9, 10, 39, 40), 2), (tuple(range(1, 41)), 2)]) <= TOLERANCE


def test_thin_layers_wait_for_more_strips() -> None:
    """The last map has a position in each of 8 strips."""
    image = torch.randn(1, 3, 128, 64, dtype=DTYPE)
    layers = zoo(replace(SMALL, name="resnet_imagenet", depth=18), 128, 64)
    ends = even_ends(128, 8)
    for least, wanted in ((1, 1), (4, 4), (16, 8)):
        (stage,) = cut_stages(layers, image, ends, min_positions=least)
        last = [
            (at_once, made)
            for name, at_once, made in stage.work()
            if name.startswith("stage4") and at_once > 1
        ]
        assert {at_once for at_once, _ in last} == ({wanted} if wanted > 1 else set())
        for at_once, made in last:
            assert all(not made[strip] for strip in range(7) if (strip + 1) % at_once)
            assert sum(made)


@pytest.mark.parametrize(
    ("name", "most"), [("resnet50", 1.12), ("vgg16", 1.12), ("convnext", 1.12)]
)
def test_what_is_saved_for_backward(name: str, most: float) -> None:
    """Of 16 strips of a high image, over what the whole image saves."""
    make, _, width = NETWORKS[name]
    image = torch.randn(1, 3, 1024, width)
    layers = [(label, module.float()) for label, module in make(image)]
    known = [tensor for _, module in layers for tensor in (*module.parameters(), *module.buffers())]
    with StashMeter(known) as whole:
        run_whole(layers, image)
    ends = even_ends(1024, 16)
    (stage,) = cut_stages(layers, image, ends)
    sample = StripSample(stage, has_input_gradients=False)
    with StashMeter(known) as strips:
        for first, last in spans(ends):
            sample.forward([image[:, :, first:last].clone()])
    assert strips.saved_bytes <= most * whole.saved_bytes


def test_several_outputs_keep_their_structure_and_run_without_gradients() -> None:
    image = torch.randn(1, 3, 9, 8, dtype=DTYPE)
    layer = Function(lambda self, x: {"map": x * 2, "rest": [x.mean((2, 3)), x[:, :, ::2]]})
    (stage,) = cut_stages([("a", layer)], image, (4, 9))
    with torch.no_grad():
        first, kept = stage.forward(0, [image[:, :, :4]])
        last, _ = stage.forward(1, [image[:, :, 4:]], kept)
    assert first[1] is None
    found = stage.joined([first, last])
    wanted = layer(image)
    assert torch.equal(found["map"], wanted["map"])
    assert torch.allclose(found["rest"][0], wanted["rest"][0], rtol=1e-12)
    assert torch.equal(found["rest"][1], wanted["rest"][1])


def test_weight_gradients_that_wait() -> None:
    """Split backward by strips: convolutions and linear maps add their weights' gradients later, all of them once."""
    torch.manual_seed(0)
    image = torch.randn(1, 3, 33, 32, dtype=DTYPE)
    layers = [*zoo(replace(SMALL, name="resnet_imagenet", depth=18), 33, 32)]
    parameters = [parameter for _, module in layers for parameter in module.parameters()]
    (output,) = run_whole(layers, image)
    output.sum().backward()
    expected = [parameter.grad for parameter in parameters]
    for parameter in parameters:
        parameter.grad = None
    ends = even_ends(33, 3)
    (stage,) = cut_stages(layers, image, ends)
    sample = StripSample(stage)
    deferred = [DeferredGradients() for _ in ends]
    for (first, last), waits in zip(spans(ends), deferred, strict=True):
        sample.forward([image[:, :, first:last]], waits)
    for strip in reversed(range(3)):
        sample.backward([torch.ones_like(output) if strip == 2 else None])
    assert all(parameter.grad is None for parameter in parameters)
    for waits in deferred:
        waits.run(lambda: None)
    for parameter, wanted in zip(parameters, expected, strict=True):
        assert parameter.grad is not None and wanted is not None
        assert torch.allclose(parameter.grad, wanted, rtol=1e-12, atol=1e-14)

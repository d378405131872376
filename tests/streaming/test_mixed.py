"""Mixed precision in strips: the same operations at the same types as on the whole image."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gems.autograd.mixed import low_copies
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.models.mixed import Precision, compute_in
from gems.streaming.axis_rules import even_ends
from gems.streaming.strip_sample import StripSample
from tests.helpers.strips_rig import (
    Function,
    Layers,
    cut_stages,
    relative,
    run_strips,
    run_whole,
    spans,
)
from tests.streaming.test_networks import NETWORKS

LOW = torch.bfloat16
EPS = torch.finfo(LOW).eps


def mixed(layers: Layers, precision: str = "bf16_mixed") -> Layers:
    return [(name, compute_in(module.float(), Precision.of(precision))) for name, module in layers]


def parameters_of(layers: Layers) -> list[nn.Parameter]:
    return list(chain.from_iterable(module.parameters() for _, module in layers))


def taken(layers: Layers) -> list[Tensor]:
    """Return the gradients of parameters, and forget them."""
    found = []
    for parameter in parameters_of(layers):
        found.append(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        parameter.grad = None
    return found


def of_whole(
    layers: Layers, image: Tensor, given: Sequence[Tensor] | None = None
) -> tuple[list[Tensor], list[Tensor]]:
    """Return outputs and the gradients of image and parameters, and the gradients that outputs are given."""
    leaf = image.clone().requires_grad_()
    outputs = run_whole(layers, leaf)
    given = [torch.randn_like(output) for output in outputs] if given is None else given
    torch.autograd.backward(
        outputs, [each.to(output.dtype) for each, output in zip(given, outputs, strict=True)]
    )
    assert leaf.grad is not None
    return [*(output.detach() for output in outputs), leaf.grad, *taken(layers)], list(given)


def of_strips(
    layers: Layers, image: Tensor, given: Sequence[Tensor], ends: tuple[int, ...], stages: int
) -> list[Tensor]:
    outputs, gradient = run_strips(cut_stages(layers, image, ends, stages), image, ends, given)
    return [*outputs, gradient, *taken(layers)]


class Casting(nn.Module):
    """Weights of its own as arguments of products, a part without autocast, changes in place, float32 in between."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, 3, 3) / 5)
        self.scale = nn.Parameter(torch.rand(4, 1, 1))
        self.conv = nn.Conv2d(4, 4, 3, padding=1)
        self.tied = nn.Conv2d(4, 4, 3, padding=1)
        self.tied.weight = self.conv.weight
        self.norm = nn.LayerNorm(32)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.conv2d(x, self.weight, padding=1) + functional.conv2d(
            x, self.weight.flip(3), padding=1
        )
        wide = self.scale * x
        low = self.conv(wide)
        low += wide
        with torch.autocast("cpu", enabled=False):
            wide = self.norm(low.to(self.scale.dtype)).exp()
        return torch.cat([self.tied(wide), low], 1)


WIDTHS = {"amoebanet": 32}  # of maps of one column oneDNN's convolutions of bfloat16 return garbage


def made(name: str) -> tuple[Layers, Tensor]:
    torch.manual_seed(0)
    if name == "casting":
        head = nn.Sequential(
            nn.Conv2d(8, 4, 3, 2, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 3)
        )
        return [("a", Casting()), ("b", head)], torch.randn(2, 3, 21, 32)
    make, height, width = NETWORKS[name]
    image = torch.randn(1, 3, height, WIDTHS.get(name, width))
    return make(image.double()), image


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "bf16_mixed") for name in ("vgg16", "resnet11_v2", "convnext", "own", "casting")),
        *((name, "fp16_mixed") for name in ("resnet11_v2", "nf_resnet18", "unet", "casting")),
    ],
)
def test_one_strip_has_the_bits_of_the_whole_image(name: str, precision: str) -> None:
    layers, image = made(name)
    layers = mixed(layers, precision)
    image = image.to(Precision.of(precision).compute)
    wanted, given = of_whole(layers, image)
    found = of_strips(layers, image, given, (image.shape[2],), 1)
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))
    assert all(parameter.dtype is torch.float32 for parameter in parameters_of(layers))


@pytest.mark.parametrize("name", ["resnet50", "googlenet", "unet", "convnext", "own"])
def test_strips_have_the_bits_of_the_whole_image_forward(name: str) -> None:
    """Convolutions, activations, norms over channels and frozen ones, poolings to the maximum.

    No sum over rows.
    """
    layers, image = made(name)
    layers = mixed(layers if name == "own" else layers[:-1])
    image = image.to(LOW)
    for strips in (2, 5):
        ends = even_ends(image.shape[2], strips)
        with torch.no_grad():
            wanted = run_whole(layers, image)
            (stage,) = cut_stages(layers, image, ends)
            sample = StripSample(stage)
            outputs = [sample.forward([image[:, :, first:last]]) for first, last in spans(ends)]
        for place, whole in enumerate(wanted):
            assert torch.equal(torch.cat([each[place] for each in outputs], 2), whole)  # type: ignore[misc]


@pytest.mark.parametrize(
    "name", [*(name for name in NETWORKS if name not in ("inception_v3", "resnet50")), "casting"]
)
def test_strips_are_as_near_to_float64_as_the_whole_image(name: str) -> None:
    """The error of all outputs and gradients together.

    16 bits round once more where two strips have read a row.
    """
    layers, image = made(name)
    layers = [(label, module.double()) for label, module in layers]
    image = image.to(LOW)
    _, given = of_whole(layers, image.double())
    given = [each.to(LOW) for each in given]
    exact, _ = of_whole(layers, image.double(), given)
    layers = mixed(layers)
    whole, _ = of_whole(layers, image, given)
    limit = 1.5 * distance(whole, exact) + EPS
    for strips, stages in ((2, 1), (7, min(3, len(layers)))):
        found = of_strips(layers, image, given, even_ends(image.shape[2], strips), stages)
        assert [each.dtype for each in found] == [each.dtype for each in whole]
        assert distance(found, exact) <= limit


def distance(found: Sequence[Tensor], exact: Sequence[Tensor]) -> float:
    pairs = list(zip(found, exact, strict=True))
    error = sum(float((one.double() - other).square().sum()) for one, other in pairs)
    return (error / sum(float(other.square().sum()) for _, other in pairs)) ** 0.5


def test_pooling_over_many_strips_sums_in_float32() -> None:
    """A mean of 256 strips is that of the whole image, but for one rounding."""
    image = torch.rand(1, 3, 512, 4).to(LOW)
    layers = mixed([("a", nn.Sequential(nn.ReLU(), nn.AdaptiveAvgPool2d((3, 1))))])
    wanted, given = of_whole(layers, image)
    found = of_strips(layers, image, given, even_ends(512, 256), 1)
    assert max(relative(one, other) for one, other in zip(found, wanted, strict=True)) <= EPS


class Copies(TorchDispatchMode):
    """Counts the casts of weights."""

    num = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_copy = (
            func is torch.ops.aten.copy_.default
            and args[0].dtype is LOW
            and args[1].dtype is torch.float32
        )
        self.num += is_copy
        return func(*args, **(kwargs or {}))


def test_weights_are_copied_once_a_step_and_gradients_arrive_in_float32() -> None:
    """With weight gradients that wait, too.

    They are those that do not, but for the order of their sums.
    """
    torch.manual_seed(0)
    layers = mixed(made("resnet50")[0])
    image = torch.randn(1, 3, 65, 32).to(LOW)
    wanted, given = of_whole(layers, image)
    ends = even_ends(65, 4)
    (stage,) = cut_stages(layers, image, ends)
    for step in range(2):
        sample = StripSample(stage)
        deferred = [DeferredGradients() for _ in ends]
        with Copies() as copies:
            for (first, last), waits in zip(spans(ends), deferred, strict=True):
                sample.forward([image[:, :, first:last]], waits)
        assert copies.num == step * sum(len([*low_copies(module)]) for _, module in layers)
        for strip in reversed(range(4)):
            sample.backward([given[0] if strip == 3 else None])
        for waits in deferred:
            waits.run(lambda: None)
        found = taken(layers)
        assert all(each.dtype is torch.float32 for each in found)
        if step == 0:
            assert distance(found, [each.double() for each in wanted[2:]]) <= EPS
        with torch.no_grad():
            for weight in parameters_of(layers):
                weight.mul_(0.5)


def test_an_embedding_of_rows_is_read_by_rows() -> None:
    layer = Function(lambda self, x: self.conv(x + self.bias), conv=nn.Conv2d(3, 4, 3, padding=1))
    layer.bias = nn.Parameter(torch.randn(3, 16, 1))
    image = torch.randn(1, 3, 16, 8).to(LOW)
    layers = mixed([("a", layer)])
    wanted, given = of_whole(layers, image)
    found = of_strips(layers, image, given, (3, 4, 16), 1)
    assert torch.equal(found[0], wanted[0])
    assert distance(found, [each.double() for each in wanted]) <= EPS

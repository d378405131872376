"""Small layers of every kind of sharing, their profiles on fake tensors, and what a whole stage really holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from gems.autograd.outputs import as_tuple
from gems.engine.stages.whole import WholeStage
from gems.models import Layer
from gems.models.build import boundary_shapes, build_layers
from gems.profile import ModelProfile
from gems.profile.profilers.chain import Lab, profile_chain
from gems.profile.profilers.fake import made_fake, on_meta
from gems.profile.profilers.layer_run import give_gradients, static_tensors, training_loss
from gems.profile.profilers.live_bytes import LiveBytes

SHAPE = (2, 3, 32, 32)
HOST = torch.device("cpu")
Parts = tuple[tuple[int, ...], tuple[int, ...]]


class ConvRelu(nn.Module):
    def __init__(self, i: int, o: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(i, o, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.conv(x))


class Down(nn.Module):
    """Hands its feature map on as a skip beside its half; `is_raw` makes it one that nothing saves."""

    def __init__(self, i: int, o: int, is_raw: bool = False) -> None:
        super().__init__()
        self.conv, self.norm, self.is_raw = nn.Conv2d(i, o, 3, padding=1), nn.BatchNorm2d(o), is_raw

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        y = self.conv(x) if self.is_raw else torch.relu(self.norm(self.conv(x)))
        return functional.avg_pool2d(torch.relu(y), 2), *skips, y


class Middle(nn.Module):
    """Works on the first tensor and carries the others."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(i, i, 3, padding=1)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        return torch.relu(self.conv(x)), *skips


class Up(nn.Module):
    """Joins the last skip, whose gradient is then a view of a larger one."""

    def __init__(self, i: int, skip: int, o: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(i + skip, o, 3, padding=1)

    def forward(self, x: Tensor, *skips: Tensor) -> tuple[Tensor, ...]:
        *rest, skip = skips
        wide = torch.cat([functional.interpolate(x, scale_factor=2.0), skip], 1)
        return torch.relu(self.conv(wide)), *rest


class Cell(nn.Module):
    """Takes the last two feature maps and hands on its own and the newer of them, as AmoebaNet's cells do."""

    def __init__(self, i: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(i, i, 3, padding=1), nn.BatchNorm2d(i)

    def forward(self, x: Tensor, before: Tensor | None = None) -> tuple[Tensor, Tensor]:
        older = x if before is None else before
        return self.norm(self.conv(torch.relu(x))) + functional.avg_pool2d(older, 3, 1, 1), x


class Head(nn.Module):
    """Reads the first tensor only."""

    def __init__(self, i: int, classes: int) -> None:
        super().__init__()
        self.linear = nn.Linear(i, classes)

    def forward(self, x: Tensor, *_: Tensor) -> Tensor:
        return self.linear(x.mean((2, 3)))


class Flat(nn.Module):
    """Hands on a view of what it is given."""

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1)


def layer(class_name: str, name: str | None = None, **options: object) -> Layer:
    return Layer(
        name or class_name.lower(), "toy", f"{__name__}:{class_name}", tuple(options.items())
    )


def skipping() -> tuple[Layer, ...]:
    """A U-Net of two levels, one of whose skips nothing saves."""
    return (
        layer("Down", "down1", i=3, o=8, is_raw=True),
        layer("Down", "down2", i=8, o=16),
        layer("Middle", "middle1", i=16),
        layer("Middle", "middle2", i=16),
        layer("Up", "up2", i=16, skip=16, o=8),
        layer("Up", "up1", i=8, skip=8, o=8),
        layer("Head", i=8, classes=3),
    )


def celled() -> tuple[Layer, ...]:
    """A stem, cells of two inputs, and a head that drops one."""
    cells = (layer("Cell", f"cell{number}", i=8) for number in range(4))
    return (layer("ConvRelu", i=3, o=8), *cells, layer("Head", i=8, classes=3))


def viewed() -> tuple[Layer, ...]:
    """A chain with a view between its layers."""
    return (
        layer("ConvRelu", "one", i=3, o=4),
        layer("Flat"),
        Layer("linear", "toy", "torch.nn:Linear", (("in_features", 4096), ("out_features", 5))),
    )


def fake_chain(layers: Sequence[Layer], shape: tuple[int, ...] = SHAPE) -> ModelProfile:
    """Profile layers on fake tensors, without times and without what kernels use within themselves."""
    mode = FakeTensorMode()

    def build(one: Layer, _: int) -> nn.Module:
        module = on_meta(one, torch.float32)
        with mode:
            return made_fake(module)

    images = torch.empty(shape, device="meta")
    chain = profile_chain(layers, [images], Lab(build, HOST, mode=mode))
    return ModelProfile(
        "toy",
        *shape[2:],
        shape[0],
        "float32",
        "cpu",
        "fake",
        chain,
        images.numel() * images.element_size(),
    )


@dataclass(frozen=True, slots=True)
class Truth:
    stash_bytes: int
    forward_peak_bytes: int
    backward_peak_bytes: int
    held_for_weights_bytes: int


def whole_stage(
    layers: Sequence[Layer], first: int, end: int, shape: tuple[int, ...] = SHAPE
) -> Truth:
    """Run layers first up to end as the engine's stage does, with the gradients of its outputs in hand."""
    specs = boundary_shapes(layers, shape)
    shapes = [spec.shape for spec in specs[first - 1]] if first else [shape]
    loss = training_loss if end == len(layers) else None
    modules = nn.ModuleList(build_layers(layers, first, end, seed=0))
    give_gradients(modules)
    stage = WholeStage(modules, first == 0, lambda: None)
    inputs = [torch.randn(one) for one in shapes]
    gradients = [torch.ones(()) if loss else torch.ones(spec.shape) for spec in specs[end - 1]]
    with LiveBytes([*inputs, *static_tensors(modules)]) as live:
        stage.forward(0, inputs, loss)
        forward_peak = live.peak_bytes
        for gradient in gradients:
            live.count(gradient)
        live.restart()
        stage.backward(0, gradients)
        backward_peak = live.peak_bytes
    stage.forward(0, inputs, loss, is_split=True)
    stage.backward_input(0, gradients)
    return Truth(
        stage.stash_bytes or 0, forward_peak, backward_peak, stage.held_for_weights_bytes or 0
    )


def saved_by_parts(
    layers: Sequence[Layer], cuts: Sequence[int], shape: tuple[int, ...] = SHAPE
) -> dict[Parts, int]:
    """Run the parts of a model one behind the other, each with a graph of its own.

    Gives the bytes of storages, but for parameters and images, by where they are seen: the parts
    that save them, and the parts that hand them on.
    """
    modules = nn.ModuleList(build_layers(layers, 0, len(layers), seed=0))
    values: tuple[Tensor, ...] = (torch.randn(shape),)
    known = {
        tensor.untyped_storage().data_ptr()
        for tensor in (*values, *modules.parameters(), *modules.buffers())
    }
    held: list[Tensor] = []  # so that no address is used twice
    sizes: dict[int, int] = {}
    saved: dict[int, set[int]] = {}
    handed: dict[int, set[int]] = {}

    def note(where: dict[int, set[int]], tensor: Tensor, part: int) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in known and tensor.untyped_storage().nbytes():
            held.append(tensor)
            sizes[address] = tensor.untyped_storage().nbytes()
            where.setdefault(address, set()).add(part)
        return tensor

    for part, (first, end) in enumerate(pairwise(cuts)):
        values = tuple(
            value.detach().requires_grad_(part > 0 and value.is_floating_point())
            for value in values
        )
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, part=part: note(saved, tensor, part), lambda kept: kept
        ):
            for module in modules[first:end]:
                values = as_tuple(module(*values))
            values = (training_loss(values[0]),) if end == len(layers) else values
        for value in values if end < len(layers) else ():
            note(handed, value, part)
    found: dict[Parts, int] = {}
    for address, num_bytes in sizes.items():
        parts = (tuple(sorted(saved.get(address, ()))), tuple(sorted(handed.get(address, ()))))
        found[parts] = found.get(parts, 0) + num_bytes
    return found

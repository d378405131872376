"""`stream`: a module in strips for a user of torch alone, with the results of the module itself."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gems.config.schema import ModelConfig
from gems.streaming import Streamed, StreamingError, buffers, stream
from gems.streaming.strip_stage import StripStage
from tests.helpers.own_unet import OwnUNet
from tests.helpers.strips_rig import DTYPE, freeze, zoo

SIDE = 32


class Small(nn.Module):
    """Two outputs, in a dict, of which one is pooled over the whole image; and a scale beside the image."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 4, 3, stride=2, padding=1), nn.Linear(4, 2)

    def forward(self, image: Tensor, scale: Tensor) -> dict[str, Tensor]:
        features = torch.tanh(self.conv(image))
        pooled = features.mean((2, 3))
        return {"map": features, "scores": self.head(pooled) * scale}


class Chain(nn.Sequential):
    """Layers that are modules of one network."""


def resnet() -> nn.Module:
    layers = zoo(ModelConfig(name="resnet", depth=8, width=4, norm="frozen_batch"), SIDE, SIDE)
    return Chain(*(module for _, module in layers))


def unet() -> nn.Module:
    network = OwnUNet()
    for norm in network.modules():
        if isinstance(norm, nn.BatchNorm2d):
            freeze(norm)
    return network


NETWORKS: dict[str, Any] = {
    "resnet": (resnet, ((2, 3, SIDE, SIDE),), 8),
    "unet": (unet, ((1, 3, SIDE, SIDE),), 5),
    "small": (Small, ((2, 3, 19, 16), (1,)), 4),
}


def outputs_of(made: Any) -> list[Tensor]:
    return list(made.values()) if isinstance(made, dict) else [made]


def results(module: nn.Module, inputs: list[Tensor]) -> list[Tensor]:
    """Return outputs and the gradients of inputs and parameters, for a loss of all outputs."""
    leaves = [each.clone().requires_grad_() for each in inputs]
    outputs = outputs_of(module(*(each.clone() for each in leaves)))
    loss = sum((each * torch.arange(each.numel()).view_as(each).sin()).sum() for each in outputs)
    module.zero_grad()
    loss.backward()  # type: ignore[union-attr]
    found = [*outputs, *(each.grad for each in leaves), *(p.grad for p in module.parameters())]
    return [each.detach() for each in found]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", NETWORKS)
def test_results_are_those_of_the_module(name: str) -> None:
    make, shapes, divisions = NETWORKS[name]
    torch.manual_seed(0)
    module = make().to(DTYPE)
    twin = copy.deepcopy(module)
    inputs = [torch.randn(shape, dtype=DTYPE) for shape in shapes]
    sample = [torch.empty(shape, dtype=DTYPE, device="meta") for shape in shapes]
    streamed = stream(module, sample, divisions)
    for _ in range(2):
        for found, wanted in zip(results(streamed, inputs), results(twin, inputs), strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
    streamed.eval()
    twin.eval()
    with torch.no_grad():
        for found, wanted in zip(
            outputs_of(streamed(*inputs)), outputs_of(twin(*inputs)), strict=True
        ):
            torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)


def conv_net(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    return Chain(nn.Conv2d(3, 8, 3, padding=1), *layers, nn.Conv2d(8, 8, 3, padding=1)).to(DTYPE)


def peak_of_saved(module: nn.Module, image: Tensor) -> int:
    """Return the most bytes that graphs hold for backward at a time, without parameters."""
    held: dict[int, int] = {}
    parameters = {each.data_ptr() for each in module.parameters()}
    peak = 0

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal peak
            self.tensor = tensor
            if tensor.data_ptr() not in parameters:
                held[id(self)] = tensor.numel() * tensor.element_size()
                peak = max(peak, sum(held.values()))

        def __del__(self) -> None:
            held.pop(id(self), None)

    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        made = module(image)
        made.sum().backward()
    return peak


def test_the_graph_of_one_strip_is_held_at_a_time() -> None:
    module = conv_net(nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1), nn.Tanh())
    image = torch.randn(1, 3, 128, 16, dtype=DTYPE)
    whole = peak_of_saved(module, image)
    none, last, every = (
        peak_of_saved(stream(module, image, 16, kept=kept, min_positions=1), image)
        for kept in (0, 1, 16)
    )
    assert none == last < whole / 3
    assert every > 0.9 * whole


@pytest.mark.parametrize(("kept", "again"), [(0, 4), (1, 3), (4, 0)])
def test_the_last_strips_do_not_run_again(
    kept: int, again: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = conv_net(nn.ReLU())
    image = torch.randn(1, 3, 16, 8, dtype=DTYPE)
    parameters = list(module.parameters())
    wanted = torch.autograd.grad(module(image).square().sum(), parameters)
    runs = []
    forward = StripStage.forward

    def counted(stage: StripStage, strip: int, *rest: Any) -> Any:
        runs.append(strip)
        return forward(stage, strip, *rest)

    streamed = stream(module, image, 4, check=False, kept=kept)
    monkeypatch.setattr(StripStage, "forward", counted)
    found = torch.autograd.grad(streamed(image).square().sum(), parameters)
    assert runs == [*range(4), *reversed(range(again))]
    torch.testing.assert_close(found, wanted)


def test_more_strips_to_keep_than_there_are_is_refused_in_one_line() -> None:
    image = torch.zeros(1, 3, 16, 8, dtype=DTYPE)
    with pytest.raises(StreamingError, match=r"kept=5.*from 0 to 4"):
        stream(conv_net(), image, [2, 2], kept=5)


def test_gradients_can_be_asked_for_without_adding_to_the_parameters() -> None:
    module = conv_net(nn.ReLU())
    image = torch.randn(1, 3, 16, 8, dtype=DTYPE)
    parameters = list(module.parameters())
    wanted = torch.autograd.grad(module(image).square().sum(), parameters)
    found = torch.autograd.grad(stream(module, image, 4)(image).square().sum(), parameters)
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)
    assert all(each.grad is None for each in parameters)


def test_dropped_channels_are_the_same_in_all_strips_and_in_backward() -> None:
    module = conv_net(nn.Dropout2d(0.5))
    image = torch.ones(1, 3, 16, 8, dtype=DTYPE)
    streamed = stream(module, image, 4)
    kept = set()
    for _ in range(8):
        made = streamed(image)
        module.zero_grad()
        made.sum().backward()
        weight = module[2].weight  # type: ignore[index]
        used = weight.grad.abs().sum((0, 2, 3)) > 0
        with torch.no_grad():
            mask = used.to(DTYPE).view(1, -1, 1, 1) * 2
            torch.testing.assert_close(made, module[2](module[0](image) * mask))  # type: ignore[index]
        kept.add(tuple(used.tolist()))
    assert len(kept) > 1


def test_a_changed_parameter_is_found_before_backward() -> None:
    module = conv_net()
    image = torch.randn(1, 3, 16, 8, dtype=DTYPE)
    made = stream(module, image, 4)(image)
    with torch.no_grad():
        next(module.parameters()).add_(1)
    with pytest.raises(RuntimeError, match="changed in place"):
        made.sum().backward()


def test_a_difference_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    forward, _ = buffers._FROM_OUTPUT["sigmoid"]
    monkeypatch.setitem(
        buffers._FROM_OUTPUT, "sigmoid", (forward, lambda gradient, made: gradient * made)
    )
    image = torch.randn(1, 3, 16, 8, dtype=DTYPE)
    module = conv_net(nn.Sigmoid())
    with pytest.raises(StreamingError, match="Chain in strips differs from itself, by"):
        stream(module, image, 4)
    assert isinstance(stream(module, image, 4, check=False), Streamed)


@pytest.mark.parametrize(
    ("layer", "shape", "divisions", "text"),
    [
        (nn.ReLU(), (1, 3, 16, 8), 17, "divisions=17 of .* from 1 part of an axis to its size"),
        (nn.ReLU(), (1, 3, 16, 8), 0, "divisions=0 of"),
        (nn.ReLU(), (3, 16), 2, r"give images \(N, C, H, W\)"),
        (
            nn.BatchNorm2d(8),
            (1, 3, 16, 8),
            2,
            "layer Chain.1 .*statistics of the whole.*GhostBatch",
        ),
        (nn.GroupNorm(2, 8), (1, 3, 16, 8), 2, "layer Chain.1 .*needs statistics of the whole"),
    ],
)
def test_what_cannot_be_divided_is_refused_in_one_line(
    layer: nn.Module, shape: tuple[int, ...], divisions: int, text: str
) -> None:
    with pytest.raises(StreamingError, match=text) as refusal:
        stream(conv_net(layer), torch.zeros(shape, dtype=DTYPE), divisions)
    assert "\n" not in str(refusal.value)


def test_other_inputs_than_the_sample_are_refused_in_one_line() -> None:
    image = torch.zeros(1, 3, 16, 8, dtype=DTYPE)
    streamed = stream(conv_net(), image, 4)
    for other in ((image.float(),), (image[:, :, :8],), (image, image)):
        with pytest.raises(StreamingError, match="stream the module again") as refusal:
            streamed(*other)
        assert "\n" not in str(refusal.value)
    with torch.autocast("cpu", torch.bfloat16), pytest.raises(StreamingError, match="autocast"):
        streamed(image)

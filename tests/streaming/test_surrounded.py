"""Networks whose modules do more than operations.

In strips, split and evaluated they equal themselves, or are refused.
The layer is refused by name, and no module is changed by being traced.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint

from gems.engine.stages.whole import WholeStage
from gems.streaming.errors import StreamingError
from gems.streaming.strip_stage import Boundary, StripStage
from tests.helpers.strips_rig import DTYPE, TOLERANCE, Function, relative, run_strips

pytestmark = pytest.mark.cases
ENDS = (3, 4, 8, 12)


def conv(channels: int = 4, out: int = 4, **kwargs: Any) -> nn.Conv2d:
    return nn.Conv2d(channels, out, 3, padding=1, **kwargs)


class Reversed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 1.0

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return -gradient


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.round()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient


reverse = Reversed.apply


def frozen(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        return torch.relu(self.conv(x))


@torch.no_grad()
def decorated(self: Any, x: Tensor) -> Any:
    return self.conv(x)


def nested(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = self.conv(x)
        with torch.enable_grad():
            z = self.conv(x) * y
        w = torch.sigmoid(z)
    return z + w


def set_mode(self: Any, x: Tensor) -> Any:
    before = torch.is_grad_enabled()
    torch.set_grad_enabled(False)
    y = self.conv(x)
    torch.set_grad_enabled(before)
    return y * self.conv(x)


def half_frozen(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        y = functional.max_pool2d(self.conv(x), 3, 1, 1)
    return x * y + self.conv(x)


def asked(self: Any, x: Tensor) -> Any:
    return self.conv(x) * 2 if torch.is_grad_enabled() else self.conv(x)


def inference(self: Any, x: Tensor) -> Any:
    with torch.inference_mode():
        y = self.conv(x)
    return x + y.clone()


def in_place_without(self: Any, x: Tensor) -> Any:
    y = self.conv(x)
    with torch.no_grad():
        y.mul_(0.5)
    return y


def clipped_weight(self: Any, x: Tensor) -> Any:
    with torch.no_grad():
        self.conv.weight.clamp_(-0.1, 0.1)
    return self.conv(x)


def tensor_hook(self: Any, x: Tensor) -> Any:
    y = self.conv(x)
    if y.requires_grad:
        y.register_hook(lambda gradient: gradient * 0.5)
    return y


def data_of(self: Any, x: Tensor) -> Any:
    return self.conv(x).data * x


def straight_through(self: Any, x: Tensor) -> Any:
    y = self.conv(x)
    return y + (y.sign() - y).detach()


def inner_gradient(self: Any, x: Tensor) -> Any:
    y = x.detach().requires_grad_()
    with torch.enable_grad():
        (gradient,) = torch.autograd.grad((y * y * y).sum(), y)
    return self.conv(x) + gradient


def graph_hook(self: Any, x: Tensor) -> Any:
    y = self.conv(x)
    if y.grad_fn is not None:
        y.grad_fn.register_prehook(lambda gradients: (gradients[0] * 2,))
    return y


def saved_otherwise(self: Any, x: Tensor) -> Any:
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor * 2, lambda tensor: tensor):
        return self.conv(x) ** 2


def frozen_weight(self: Any, x: Tensor) -> Any:
    self.conv.weight.requires_grad_(False)
    y = self.conv(x)
    self.conv.weight.requires_grad_(True)
    return y


def constant_kernel(self: Any, x: Tensor) -> Any:
    row = torch.tensor([1.0, 2.0, 1.0], dtype=x.dtype, device=x.device)
    return functional.conv2d(self.conv(x), row.repeat(4, 1, 3, 1), padding=1, groups=4)


def over_images(self: Any, x: Tensor) -> Any:
    return torch.vmap(lambda image: self.conv(image) * 2)(x)


def tangent(self: Any, x: Tensor) -> Any:
    made, along = torch.func.jvp(self.conv, (x,), (torch.cos(x),))
    return made * along


def dual(self: Any, x: Tensor) -> Any:
    with forward_ad.dual_level():
        pair = forward_ad.unpack_dual(self.conv(forward_ad.make_dual(x, torch.cos(x))))
        return pair.primal * pair.tangent


def double(weight: Tensor) -> None:
    assert weight.grad is not None
    weight.grad.mul_(2)


class Buffered(nn.Module):
    def __init__(self, change: Callable[[Any, Tensor], Any]) -> None:
        super().__init__()
        self.conv = conv()
        self.change = change
        self.register_buffer("seen", torch.ones(4, 1, 1))

    def forward(self, x: Tensor) -> Any:
        made = self.change(self, x)
        return self.conv(x if made is None else made)


def rebound(self: Any, x: Tensor) -> None:
    self.seen = self.seen + 1


def counted(self: Any, x: Tensor) -> None:
    self.seen.add_(1)


def changed_twice(self: Any, x: Tensor) -> None:
    self.seen.mul_(0.9)
    self.seen.add_(0.1)


def averaged(self: Any, x: Tensor) -> None:
    with torch.no_grad():
        self.seen.mul_(0.9).add_(x.mean((2, 3)).mean(0).view(4, 1, 1) * 0.1)


def read_and_changed(self: Any, x: Tensor) -> Any:
    y = x + self.seen
    self.seen.add_(1)
    return y


def changed_by_data(self: Any, x: Tensor) -> None:
    self.seen.data.mul_(2)


def changed_out(self: Any, x: Tensor) -> Any:
    torch.mul(self.seen, 0.5, out=self.seen)
    return x + self.seen.clone()


class Twice(nn.Module):
    """One convolution by two names, by an attribute, and its weight in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.first = conv()
        self.second = self.first
        self.body = nn.Sequential(self.first, nn.ReLU(), self.first)
        self.weights = [self.first.weight]

    def forward(self, x: Tensor) -> Tensor:
        return functional.conv2d(self.body(self.second(x)), self.weights[0], padding=1)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = conv(bias=False), nn.ConvTranspose2d(4, 4, 3, padding=1, bias=False)
        self.up.weight = self.down.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.up(torch.relu(self.down(x)))


class Stateful(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.conv = conv()
        self.kind = kind
        self.calls = 0
        self.kept = None
        self.sizes: list[Any] = []
        self.counts, self.place = {"calls": 0}, SimpleNamespace(calls=0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        self.calls += 1
        self.sizes.append(tuple(x.shape))
        if self.kind == "scaled":
            return y * self.calls
        if self.kind == "hidden":
            y = y if self.kept is None else y + self.kept
            self.kept = y
        if self.kind == "scaled_by_dict":
            self.counts["calls"] += 1
            y = y * self.counts["calls"]
        if self.kind == "scaled_by_object":
            self.place.calls += 1
            y = y * self.place.calls
        if self.kind == "shown":
            self.kept = y
        return y


class Coordinates(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv(5)
        self.register_buffer(
            "rows", torch.linspace(-1, 1, ENDS[-1])[None, None, :, None].repeat(1, 1, 1, 8)
        )

    def forward(self, x: Tensor) -> Any:
        return self.conv(torch.cat([self.rows.expand(len(x), -1, -1, -1), x], 1))


class Squared(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x


class Tripled(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = super().__torch_function__(func, types, args, kwargs or {})  # type: ignore[no-untyped-call]
        return made * 3 if func is functional.conv2d else made


class OwnTensor(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv = conv()
        self.conv.weight = nn.Parameter(self.conv.weight.detach().as_subclass(Tripled))

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).as_subclass(Tensor)


def hooked(register: str, hook: Callable[..., Any], *path: str) -> nn.Module:
    module = nn.Sequential(conv(), nn.ReLU())
    getattr(module.get_submodule("0"), register)(hook)
    return module


def weight_hook(register: str, hook: Callable[..., Any]) -> nn.Module:
    module = conv()
    getattr(module.weight, register)(hook)
    return module


def parametrized(module: nn.Module, how: nn.Module) -> nn.Module:
    parametrize.register_parametrization(module, "weight", how)
    return module


def with_conv(function: Callable[..., Any]) -> Function:
    return Function(function, conv=conv())


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    "function": lambda: with_conv(lambda self, x: reverse(self.conv(x))),
    "function_with_context_apart": lambda: with_conv(lambda self, x: Rounded.apply(self.conv(x))),
    "function_without_gradients": lambda: with_conv(
        lambda self, x: self.conv(x) + reverse(x.detach())
    ),
    "frozen": lambda: with_conv(frozen),
    "decorated": lambda: with_conv(decorated),
    "nested": lambda: with_conv(nested),
    "set_mode": lambda: with_conv(set_mode),
    "half_frozen": lambda: with_conv(half_frozen),
    "asked": lambda: with_conv(asked),
    "inference": lambda: with_conv(inference),
    "in_place_without": lambda: with_conv(in_place_without),
    "clipped_weight": lambda: with_conv(clipped_weight),
    "checkpoint": lambda: with_conv(lambda self, x: checkpoint(self.conv, x, use_reentrant=False)),
    "checkpoint_reentrant": lambda: with_conv(
        lambda self, x: checkpoint(self.conv, x, use_reentrant=True)
    ),
    "tensor_hook": lambda: with_conv(tensor_hook),
    "data": lambda: with_conv(data_of),
    "straight_through": lambda: with_conv(straight_through),
    "inner_gradient": lambda: with_conv(inner_gradient),
    "pre_hook": lambda: hooked("register_forward_pre_hook", lambda module, given: (given[0] * 2,)),
    "forward_hook": lambda: hooked("register_forward_hook", lambda module, given, made: made * 2),
    "backward_hook": lambda: hooked(
        "register_full_backward_hook", lambda module, to, came: (to[0] * 2,)
    ),
    "backward_pre_hook": lambda: hooked(
        "register_full_backward_pre_hook", lambda module, came: (came[0] * 2,)
    ),
    "old_spectral_norm": lambda: nn.utils.spectral_norm(conv()),
    "old_weight_norm": lambda: nn.utils.weight_norm(conv()),
    "pruned": lambda: prune.l1_unstructured(conv(), "weight", 0.5),
    "weight_hook": lambda: weight_hook("register_hook", lambda gradient: gradient.clamp(-0.1, 0.1)),
    "weight_post_hook": lambda: weight_hook("register_post_accumulate_grad_hook", double),
    "spectral_norm": lambda: parametrizations.spectral_norm(conv()),
    "weight_norm": lambda: parametrizations.weight_norm(conv()),
    "orthogonal": lambda: parametrizations.orthogonal(nn.Conv2d(4, 4, 1)),
    "squared": lambda: parametrized(conv(), Squared()),
    "squared_twice": lambda: parametrized(parametrized(conv(), Squared()), nn.Tanh()),
    "rebound": lambda: Buffered(rebound),
    "counted": lambda: Buffered(counted),
    "changed_twice": lambda: Buffered(changed_twice),
    "averaged": lambda: Buffered(averaged),
    "read_and_changed": lambda: Buffered(read_and_changed),
    "changed_by_data": lambda: Buffered(changed_by_data),
    "changed_out": lambda: Buffered(changed_out),
    "twice": Twice,
    "tied": Tied,
    "scaled": lambda: Stateful("scaled"),
    "hidden": lambda: Stateful("hidden"),
    "shown": lambda: Stateful("shown"),
    "coordinates": Coordinates,
    "graph_hook": lambda: with_conv(graph_hook),
    "saved_otherwise": lambda: with_conv(saved_otherwise),
    "frozen_weight": lambda: with_conv(frozen_weight),
    "constant_kernel": lambda: with_conv(constant_kernel),
    "over_images": lambda: with_conv(over_images),
    "tangent": lambda: with_conv(tangent),
    "dual": lambda: with_conv(dual),
    "by_name": lambda: with_conv(lambda self, x: self.conv(input=x)),
    "scaled_by_dict": lambda: Stateful("scaled_by_dict"),
    "scaled_by_object": lambda: Stateful("scaled_by_object"),
    "own_tensor": OwnTensor,
    "scripted": lambda: Function(
        lambda self, x: self.conv(x), conv=torch.jit.trace(conv(), torch.ones(1, 4, 5, 5))
    ),
}
REFUSED = {
    "function": "applies a custom autograd function (Reversed)",
    "function_with_context_apart": "applies a custom autograd function (Rounded)",
    "inference": "inference mode",
    "in_place_without": "changes in place (aten.mul_.Tensor) without gradients",
    "clipped_weight": "changes weight, which the layer uses elsewhere too",
    "checkpoint_reentrant": "use_reentrant=False",
    "tensor_hook": "registers a hook on a tensor",
    "inner_gradient": "computes gradients in its forward",
    "pre_hook": "has a forward pre-hook",
    "forward_hook": "has a forward hook",
    "backward_hook": "has a full backward hook",
    "backward_pre_hook": "has a full backward pre-hook",
    "old_spectral_norm": "use torch.nn.utils.parametrizations.spectral_norm",
    "old_weight_norm": "use torch.nn.utils.parametrizations.weight_norm",
    "pruned": "has a forward pre-hook (L1Unstructured)",
    "weight_hook": "has a hook on the gradient of its weight",
    "weight_post_hook": "has a hook on the gradient of its weight",
    "rebound": "puts another tensor in place of its buffer seen",
    "averaged": "changes seen, which the layer uses elsewhere too",
    "read_and_changed": "changes seen, which the layer uses elsewhere too",
    "changed_by_data": "a parameter or buffer by another name",
    "scaled": "computes with what an earlier call has left (calls)",
    "hidden": "computes with what an earlier call has left",
    "graph_hook": "reads the graph of autograd",
    "saved_otherwise": "changes what is saved for backward",
    "frozen_weight": "sets requires_grad of a parameter",
    "constant_kernel": "makes a tensor of numbers in its forward",
    "over_images": "cannot be traced into operations",
    "tangent": "an operation without a streaming form",
    "dual": "an operation without a streaming form",
    "scaled_by_dict": "computes with what an earlier call has left (calls)",
    "scaled_by_object": "computes with what an earlier call has left (calls)",
    "own_tensor": "has weight as a Tripled",
    "scripted": "layer middle.conv is TorchScript",
}
UNSPLIT = ("weight_hook", "weight_post_hook")
Layers = list[tuple[str, nn.Module]]


def network(name: str) -> Layers:
    torch.manual_seed(0)
    modules = conv(3), NETWORKS[name](), nn.Sequential(nn.ReLU(), conv(out=2, stride=2))
    return [
        (layer, module.to(DTYPE))
        for layer, module in zip(("stem", "middle", "head"), modules, strict=True)
    ]


def whole(layers: Layers, image: Tensor) -> Any:
    for _, module in layers:
        image = module(image)
    return image


def values_of(layers: Layers) -> list[Tensor | None]:
    modules = [module for _, module in layers]
    gradients = [each.grad for module in modules for each in module.parameters()]
    return [
        *gradients,
        *(each for module in modules for each in (*module.parameters(), *module.buffers())),
    ]


def attributes(layers: Layers) -> list[Any]:
    """Return all that the modules have, with copies of tensors and of what lists and dicts hold."""
    held = []
    for _, layer in layers:
        for module in layer.modules():
            for key, value in vars(module).items():
                held.append(
                    (
                        id(module),
                        key,
                        id(value),
                        copy.copy(value) if isinstance(value, dict | list) else None,
                    )
                )
            held += [
                (id(each), each._version, str(each.device))
                for each in (*module.parameters(), *module.buffers())
            ]
    return held


def form_of(layers: Layers, image: Tensor) -> StripStage:
    before = attributes(layers)
    try:
        return StripStage(layers, [Boundary(tuple(image.shape), image.dtype, (ENDS,))], len(ENDS))
    finally:
        assert attributes(layers) == before


def differ(found: list[Tensor | None], wanted: list[Tensor | None]) -> float:
    return max(relative(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.parametrize("name", NETWORKS)
def test_networks_in_strips_split_and_evaluated(name: str) -> None:
    image = torch.randn(2, 3, ENDS[-1], 8, dtype=DTYPE, generator=torch.Generator().manual_seed(1))
    plain, streamed, split = (network(name) for _ in range(3))
    wanted = whole(plain, image)
    back = torch.randn(wanted.shape, dtype=DTYPE, generator=torch.Generator().manual_seed(2))
    if wanted.requires_grad:
        wanted.backward(back)

    stage = WholeStage(nn.ModuleList([module for _, module in split]), True, lambda: None)
    (made,) = stage.forward(0, (image,), None, True)
    stage.backward_input(0, (back,))
    stage.backward_weight(0)
    assert differ([made, *values_of(split)], [wanted, *values_of(plain)]) <= TOLERANCE
    if name in UNSPLIT:
        assert stage.split_layers().unsplit == ("1",)

    if name in REFUSED:
        with pytest.raises(StreamingError, match="layer middle") as refusal:
            form_of(streamed, image)
        assert REFUSED[name] in str(refusal.value)
    else:
        form = form_of(streamed, image)
        (joined,), _ = run_strips([form], image, ENDS, [back])
        assert differ([joined, *values_of(streamed)], [wanted, *values_of(plain)]) <= TOLERANCE

    evaluated = network(name)
    for _, module in (*plain, *evaluated):
        module.eval()
    for (_, module), (_, other) in zip(plain, evaluated, strict=True):
        other.load_state_dict(module.state_dict())
    with torch.no_grad():
        try:
            form = form_of(evaluated, image)
        except StreamingError as refusal:
            assert "layer middle" in str(refusal)
            assert name in REFUSED
            return
        carries: tuple[Tensor, ...] = ()
        strips = []
        for strip, (begin, end) in enumerate(zip((0, *ENDS), ENDS, strict=False)):
            outputs, carries = form.forward(strip, (image[:, :, begin:end],), carries)
            strips.append(outputs)
        assert relative(form.joined(strips), whole(plain, image)) <= TOLERANCE

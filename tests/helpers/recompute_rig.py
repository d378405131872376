"""Layers that are run twice, and a step of theirs beside that of layers that are run once."""

from __future__ import annotations

import copy
from collections import Counter

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from gems.autograd.outputs import as_tuple
from gems.autograd.recompute.matmul_outputs import is_matmul
from gems.autograd.recompute.recompute import Recomputation
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.layers import SplitLayers

SEED = 7
SIZE = 2
CHANNELS = 4
SIDE = 8
SHAPE = (SIZE, CHANNELS, SIDE, SIDE)


class Residual(nn.Module):
    """A block that adds in place, behind a batch norm that works on what its convolution gave."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(CHANNELS)

    def forward(self, x: Tensor) -> Tensor:
        out = self.norm(self.conv(x))
        out += x
        return functional.relu(out)


class Biased(nn.Module):
    """Adds to what a convolution gave, in place and before anything reads it; then reads it twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1)
        self.shift = nn.Parameter(torch.randn(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        out.view(SIZE, CHANNELS, -1).add_(self.shift.view(CHANNELS, 1))
        return torch.sigmoid(out) * out


class ReadFirst(nn.Module):
    """Reads what a convolution gave and only then changes it in place."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(CHANNELS, CHANNELS, 1)

    def forward(self, x: Tensor) -> Tensor:
        out = self.conv(x)
        gate = torch.tanh(out)
        return out.mul_(2.0) * gate


class Centred(nn.Module):
    """Subtracts a running mean that its own forward moves, so that a run depends on those before; and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("mean", torch.zeros(CHANNELS, 1, 1))
        self.register_buffer("last", torch.zeros(CHANNELS, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        mean = x.detach().mean((0, 2, 3)).view(CHANNELS, 1, 1)
        self.mean.mul_(0.9).add_(mean, alpha=0.1)
        out = (x - self.mean) * self.calls + self.last
        self.last = mean
        return out


class Head(nn.Module):
    """Attends over pixels, and maps them without a contiguous input."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(CHANNELS, 2, dropout=0.3, batch_first=True)
        self.linear = nn.Linear(CHANNELS, 3)

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(2).transpose(1, 2)
        return self.linear(tokens) + self.linear(
            self.attention(tokens, tokens, tokens, need_weights=False)[0]
        )


def conv(**more: object) -> nn.Conv2d:
    return nn.Conv2d(CHANNELS, CHANNELS, 3, padding=1, **more)


NETS = {
    "norm_dropout_pool": lambda: [
        conv(bias=False),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(),
        nn.Dropout(0.4),
        nn.MaxPool2d(2),
        conv(),
        nn.AvgPool2d(2),
        nn.Flatten(),
        nn.Linear(16, 5),
        nn.Dropout(0.5),
    ],
    "in_place": lambda: [
        conv(),
        nn.ReLU(inplace=True),
        conv(),
        nn.Dropout(0.3, inplace=True),
        conv(),
        nn.BatchNorm2d(CHANNELS),
        nn.ReLU(inplace=True),
        Residual(),
        Residual(),
    ],
    "in_place_on_products": lambda: [
        conv(),
        nn.SiLU(inplace=True),
        Biased(),
        ReadFirst(),
        conv(),
        nn.RReLU(inplace=True),
    ],
    "own_state": lambda: [
        conv(),
        Centred(),
        nn.InstanceNorm2d(CHANNELS, affine=True, track_running_stats=True),
        nn.utils.parametrizations.spectral_norm(conv()),
        nn.BatchNorm2d(CHANNELS, momentum=None),
        Centred(),
    ],
    "attention": lambda: [conv(), nn.GroupNorm(2, CHANNELS), Head()],
    "frozen_norm": lambda: [
        conv(),
        nn.BatchNorm2d(CHANNELS).eval(),
        nn.ReLU(),
        conv(),
        nn.BatchNorm2d(CHANNELS),
    ],
}


class Calls(TorchDispatchMode):
    """Counts the kernels that run under everything else, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.num_matmuls = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names[func.overloadpacket.__name__] += 1
        self.num_matmuls += is_matmul(func)
        return func(*args, **(kwargs or {}))


class OneRun:
    """What is compared with: the layers run once, and their graph kept."""

    def __init__(self, modules: nn.ModuleList) -> None:
        self._modules = modules

    def forward(self, leaves: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        values = leaves
        for module in self._modules:
            values = as_tuple(module(*values))
        return tuple(value.detach() for value in values), values

    def recompute(self, leaves: tuple[Tensor, ...], kept: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        return kept


def modules_of(name: str, dtype=torch.float32, layout=torch.contiguous_format) -> nn.ModuleList:
    torch.manual_seed(SEED)
    return nn.ModuleList(NETS[name]()).to(dtype=dtype, memory_format=layout)


def batches(num: int, dtype=torch.float32, layout=torch.contiguous_format) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [
        torch.randn(SHAPE, generator=generator).to(dtype=dtype, memory_format=layout)
        for _ in range(num)
    ]


def play(
    runner, modules, inputs, order=None, is_split=False, needs_gradient=True
) -> dict[str, Tensor]:
    """Run all forwards, then second run and backward of each in `order`.

    Gives all that came of it, by name.
    """
    torch.manual_seed(SEED)
    layers = SplitLayers(modules) if is_split else None
    leaves = [(tensor.clone().requires_grad_(needs_gradient),) for tensor in inputs]
    later = {m: DeferredGradients() if is_split else None for m in range(len(inputs))}
    found: dict[str, Tensor] = {}
    kept = {}
    for m, leaf in enumerate(leaves):
        if layers is None or isinstance(runner, Recomputation):
            outputs, kept[m] = runner.forward(leaf)
        else:
            with layers.defer_to(later[m]):
                outputs, kept[m] = runner.forward(leaf)
        found |= {f"output {m}.{k}": tensor.clone() for k, tensor in enumerate(outputs)}
    found["random number"] = torch.rand(3)
    generator = torch.Generator().manual_seed(SEED)
    for m in order or range(len(inputs)):
        if layers is None:
            made = runner.recompute(leaves[m], kept.pop(m))
        else:
            with layers.defer_to(later[m]):
                made = runner.recompute(leaves[m], kept.pop(m))
        seeds = [torch.randn(tensor.shape, generator=generator).to(tensor.dtype) for tensor in made]
        torch.autograd.backward(made, seeds)
        found |= {f"again {m}.{k}": tensor.detach() for k, tensor in enumerate(made)}
        if later[m] is not None:
            later[m].run(lambda: None)
    found |= {
        f"input gradient {m}": leaf.grad
        for m, (leaf,) in enumerate(leaves)
        if leaf.grad is not None
    }
    found |= {
        f"gradient of {name}": p.grad
        for name, p in modules.named_parameters()
        if p.grad is not None
    }
    found |= {f"buffer {name}": buffer.clone() for name, buffer in modules.named_buffers()}
    found |= {
        f"calls {k}": torch.tensor(m.calls) for k, m in enumerate(modules) if isinstance(m, Centred)
    }
    return found | {"next random number": torch.rand(3)}


def check_equal(got: dict[str, Tensor], wanted: dict[str, Tensor]) -> None:
    assert got.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(got[name], wanted[name])] == []


def check(name: str, is_selective: bool, **options) -> None:
    kinds = {key: options.pop(key) for key in ("dtype", "layout") if key in options}
    plain = modules_of(name, **kinds)
    twice = copy.deepcopy(plain)
    inputs = batches(3, **kinds)
    wanted = play(OneRun(plain), plain, inputs, **options)
    check_equal(play(Recomputation(twice, is_selective), twice, inputs, **options), wanted)
    assert any(
        bool(value.abs().max() > 0) for key, value in wanted.items() if key.startswith("gradient")
    )

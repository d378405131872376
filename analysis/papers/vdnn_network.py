"""A network as calls: the convolutions, activations, poolings and norms that cuDNN runs one by one, and their buffers.

vDNN decides for each such call (Rhu et al. 2016, arXiv 1602.08124, section III), and a layer of the
zoo may hold many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import NamedTuple

from gems.errors import ConfigError
from gems.models.layer import Layer
from gems.models.steps import Conv, Fork, Pool, Step, channels_after, side_after

ITEM_BYTES = 4  # float32
_CHAIN = "Chain"
_CLASSIFIER = {
    "FullyConnected": ("in_features", "out_features"),
    "Head": ("in_channels", "num_classes"),
}


class CallKind(StrEnum):
    """What a call computes; `RELU` changes the buffer that it reads."""

    CONV = "conv"
    RELU = "relu"
    POOL = "pool"
    NORM = "norm"
    LINEAR = "linear"


@dataclass(frozen=True, slots=True)
class Window:
    """The shape of a convolution.

    Images (N, in_channels, in_px) to maps (N, channels, out_px), sides in pixels.
    """

    images: int
    in_channels: int
    channels: int
    kernel: tuple[int, int]
    stride: int
    padding: tuple[int, int]
    in_px: tuple[int, int]
    out_px: tuple[int, int]

    @property
    def flops(self) -> int:
        """Multiplication and additions of forward."""
        return (
            2
            * self.images
            * self.in_channels
            * self.channels
            * prod(self.kernel)
            * prod(self.out_px)
        )

    @property
    def param_bytes(self) -> int:
        """Bytes of weight and bias."""
        return ITEM_BYTES * self.channels * (self.in_channels * prod(self.kernel) + 1)


@dataclass(frozen=True, slots=True)
class Call:
    """One call: it reads one buffer and writes one, whole or, in a branch of a fork, a slice of the joined one.

    `flops` and `moved_bytes` are those of forward, the bytes what it reads and writes; a ReLU is
    counted with its convolution.
    """

    name: str
    kind: CallKind
    reads: int
    writes: int
    moved_bytes: int = 0
    flops: int = 0
    param_bytes: int = 0
    window: Window | None = None


@dataclass(frozen=True, slots=True)
class Network:
    """The calls in the order of forward, and the bytes of each buffer; buffer 0 holds the images."""

    calls: tuple[Call, ...]
    buffer_bytes: tuple[int, ...]

    @property
    def managed(self) -> frozenset[int]:
        """The buffers that vDNN manages.

        The images, and what the calls before the classifier write.
        """
        return frozenset(
            {0, *(call.writes for call in self.calls if call.kind is not CallKind.LINEAR)}
        )

    @property
    def map_bytes(self) -> int:
        """Bytes of the managed buffers together: the images and every feature map."""
        return sum(self.buffer_bytes[buffer] for buffer in self.managed)

    @property
    def param_bytes(self) -> int:
        """Bytes of the parameters, the classifier's among them."""
        return sum(call.param_bytes for call in self.calls)

    @property
    def gradient_bytes(self) -> int:
        """Bytes of the two buffers, as large as the largest map, in which a gradient goes from call to call."""
        return 2 * max(self.buffer_bytes[buffer] for buffer in self.managed if buffer)


def network_of(layers: Sequence[Layer], image: tuple[int, int, int], num_images: int) -> Network:
    """Return the calls of a mini-batch of a chain of convolutions, poolings and inceptions with its classifier.

    Args:
        layers: of the zoo.
        image: (channels, height, width), in pixels.
        num_images: of the mini-batch.

    Raises:
        ConfigError: a layer of another kind, or with a norm that needs statistics.
    """
    made = _Builder(num_images)
    now = made.new(image[0], image[1:])
    for layer in layers:
        options = dict(layer.options)
        target = layer.target.rpartition(":")[2]
        if target == _CHAIN and options["norm"] == "none" and not options["carried"]:
            for step in options["steps"]:
                now = made.step(layer.name, step, now)
        elif target in _CLASSIFIER:
            now = made.linear(layer.name, now, *(options[key] for key in _CLASSIFIER[target]))
        else:
            raise ConfigError(
                "model",
                layer.name,
                "vDNN's study has chains of convolution, pooling and inception without norm",
            )
    return Network(tuple(made.calls), tuple(made.buffer_bytes))


class _Map(NamedTuple):
    """A buffer of shape (N, channels, height, width)."""

    buffer: int
    channels: int
    px: tuple[int, int]


class _Builder:
    def __init__(self, num_images: int) -> None:
        self.num_images = num_images
        self.calls: list[Call] = []
        self.buffer_bytes: list[int] = []

    def new(self, channels: int, px: tuple[int, int]) -> _Map:
        self.buffer_bytes.append(ITEM_BYTES * self.num_images * channels * prod(px))
        return _Map(len(self.buffer_bytes) - 1, channels, px)

    def linear(self, name: str, given: _Map, in_features: int, out_features: int) -> _Map:
        into = self.new(out_features, (1, 1))
        flops = 2 * self.num_images * in_features * out_features
        params = ITEM_BYTES * out_features * (in_features + 1)
        moved = params + self._moved(given, into)
        self.calls.append(
            Call(name, CallKind.LINEAR, given.buffer, into.buffer, moved, flops, params)
        )
        return into

    def step(self, name: str, step: Step, given: _Map, into: _Map | None = None) -> _Map:
        """Add the calls of a step that reads `given` and writes `into`, a slice of it, or a map of its own."""
        height_px, width_px = (side_after(px, (step,)) for px in given.px)
        channels = channels_after(given.channels, (step,))
        px = (height_px, width_px)
        into = into or self.new(channels, px)
        if isinstance(step, Fork):
            for number, branch in enumerate(step.branches, 1):
                now = given
                for each in branch[:-1]:
                    now = self.step(f"{name}.{number}", each, now)
                self.step(f"{name}.{number}", branch[-1], now, into)
            return into
        moved = self._moved(given, _Map(into.buffer, channels, px))
        if isinstance(step, Conv):
            window = Window(
                self.num_images,
                given.channels,
                channels,
                step.kernel,
                step.stride,
                step.padding,
                given.px,
                px,
            )
            flops = window.flops
            params = window.param_bytes
            self.calls.append(
                Call(name, CallKind.CONV, given.buffer, into.buffer, moved, flops, params, window)
            )
            self.calls.append(Call(f"{name}.relu", CallKind.RELU, into.buffer, into.buffer))
        else:
            kind = CallKind.POOL if isinstance(step, Pool) else CallKind.NORM
            self.calls.append(Call(f"{name}.{kind}", kind, given.buffer, into.buffer, moved))
        return into

    def _moved(self, *maps: _Map) -> int:
        return sum(ITEM_BYTES * self.num_images * each.channels * prod(each.px) for each in maps)


@dataclass(frozen=True, slots=True)
class Device:
    """The rates that kernels and copies reach: floating-point operations and bytes per second."""

    flops_per_s: float
    memory_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float

    def forward_s(self, call: Call) -> float:
        """Return the seconds of a call.

        Of a convolution by its arithmetic alone, of others by the bytes they move.
        A ReLU takes none: the rate of convolutions is that of whole networks, their ReLUs among it.
        """
        if call.kind is CallKind.CONV:
            return call.flops / self.flops_per_s
        return max(call.flops / self.flops_per_s, call.moved_bytes / self.memory_bytes_per_s)

    def backward_s(self, call: Call) -> float:
        """Return the seconds of a backward call.

        Twice forward's, except that images need no gradient.
        """
        is_first = call.kind is CallKind.CONV and call.reads == 0
        return (1 if is_first else 2) * self.forward_s(call)

"""A network as calls: the convolutions, activations, poolings and norms that cuDNN runs one by one, and their buffers.

vDNN decides for each such call (Rhu et al. 2016, arXiv 1602.08124, section III), and a layer of the zoo may hold many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from math import prod

from gems.errors import ConfigError
from gems.models.layer import Layer
from gems.models.steps import Conv, Fork, Pool, Step, channels_after, side_after

ITEM_BYTES = 4  # float32
_CHAIN = "Chain"
_CLASSIFIER = {"FullyConnected": ("in_features", "out_features"), "Head": ("in_channels", "num_classes")}


class CallKind(StrEnum):
    """What a call computes; `RELU` changes the buffer that it reads."""

    CONV = "conv"
    RELU = "relu"
    POOL = "pool"
    NORM = "norm"
    LINEAR = "linear"


@dataclass(frozen=True, slots=True)
class Window:
    """The shape of a convolution: images (N, in_channels, in_px) to maps (N, channels, out_px), sides in pixels."""

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
        return 2 * self.images * self.in_channels * self.channels * prod(self.kernel) * prod(self.out_px)

    @property
    def param_bytes(self) -> int:
        """Bytes of weight and bias."""
        return ITEM_BYTES * self.channels * (self.in_channels * prod(self.kernel) + 1)


@dataclass(frozen=True, slots=True)
class Call:
    """One call: it reads one buffer and writes one, whole or, in a branch of a fork, a slice of the joined one.

    `flops` and `moved_bytes` are those of forward, the bytes what it reads and writes; a ReLU is counted with its
    convolution.
    """

    name: str
    kind: CallKind
    reads: int
    writes: int
    moved_bytes: int = 0
    flops: int = 0
    param_bytes: int = 0
    window: Window | None = None

    @property
    def is_feature(self) -> bool:
        """Whether vDNN manages it: everything before the classifier."""
        return self.kind is not CallKind.LINEAR


@dataclass(frozen=True, slots=True)
class Network:
    """The calls in the order of forward, and the bytes of each buffer; buffer 0 holds the images."""

    calls: tuple[Call, ...]
    buffer_bytes: tuple[int, ...]

    @property
    def managed(self) -> frozenset[int]:
        """The buffers that vDNN manages: the images, and what feature calls write."""
        return frozenset({0, *(call.writes for call in self.calls if call.is_feature)})

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
    maker = _Maker(num_images, image)
    for layer in layers:
        options, target = dict(layer.options), layer.target.rpartition(":")[2]
        if target == _CHAIN and options["norm"] == "none" and not options["carried"]:
            maker.run(layer.name, options["steps"])
        elif target in _CLASSIFIER:
            maker.linear(layer.name, *(options[key] for key in _CLASSIFIER[target]))
        else:
            raise ConfigError(
                "model", layer.name, "vDNN's study has chains of convolution, pooling and inception without norm"
            )
    return Network(tuple(maker.calls), tuple(maker.buffer_bytes))


@dataclass(frozen=True, slots=True)
class _Map:
    """A buffer of shape (N, channels, height, width)."""

    buffer: int
    channels: int
    px: tuple[int, int]


class _Maker:
    """Writes the calls down one after another."""

    def __init__(self, num_images: int, image: tuple[int, int, int]) -> None:
        self.num_images = num_images
        self.calls: list[Call] = []
        self.buffer_bytes: list[int] = []
        self.now = self._new(image[0], image[1:])

    def run(self, name: str, steps: Sequence[Step]) -> None:
        """Add the calls of one layer behind those that are there."""
        for step in steps:
            into = self._after(self.now, step)
            self._step(name, step, self.now, into)
            self.now = into

    def linear(self, name: str, in_features: int, out_features: int) -> None:
        """Add one of the classifier's matrix products."""
        into = self._new(out_features, (1, 1))
        flops = 2 * self.num_images * in_features * out_features
        params = ITEM_BYTES * out_features * (in_features + 1)
        moved = params + self._moved(self.now, into)
        self.calls.append(Call(name, CallKind.LINEAR, self.now.buffer, into.buffer, moved, flops, params))
        self.now = into

    def _new(self, channels: int, px: tuple[int, int]) -> _Map:
        self.buffer_bytes.append(ITEM_BYTES * self.num_images * channels * prod(px))
        return _Map(len(self.buffer_bytes) - 1, channels, px)

    def _after(self, given: _Map, step: Step) -> _Map:
        return self._new(*_shape_after(given, step))

    def _moved(self, *maps: _Map) -> int:
        return sum(ITEM_BYTES * self.num_images * each.channels * prod(each.px) for each in maps)

    def _step(self, name: str, step: Step, given: _Map, into: _Map) -> None:
        """Add the calls of a step that reads `given` and writes `into`, or a slice of it."""
        if isinstance(step, Fork):
            for number, branch in enumerate(step.branches, 1):
                self._branch(f"{name}.{number}", branch, given, into)
            return
        made = _Map(into.buffer, *_shape_after(given, step))
        moved = self._moved(given, made)
        if not isinstance(step, Conv):
            kind = CallKind.POOL if isinstance(step, Pool) else CallKind.NORM
            self.calls.append(Call(f"{name}.{kind}", kind, given.buffer, into.buffer, moved))
            return
        window = Window(
            self.num_images, given.channels, made.channels, step.kernel, step.stride, step.padding, given.px, made.px
        )  # fmt: skip
        flops, params = window.flops, window.param_bytes
        self.calls.append(Call(name, CallKind.CONV, given.buffer, into.buffer, moved, flops, params, window))
        self.calls.append(Call(f"{name}.relu", CallKind.RELU, into.buffer, into.buffer))

    def _branch(self, name: str, steps: Sequence[Step], given: _Map, joined: _Map) -> None:
        for step in steps[:-1]:
            into = self._after(given, step)
            self._step(name, step, given, into)
            given = into
        self._step(name, steps[-1], given, joined)


def _shape_after(given: _Map, step: Step) -> tuple[int, tuple[int, int]]:
    """Return channels, and height and width in pixels, behind a step."""
    height_px, width_px = (side_after(px, (step,)) for px in given.px)
    return channels_after(given.channels, (step,)), (height_px, width_px)


@dataclass(frozen=True, slots=True)
class Device:
    """The rates that kernels and copies reach: floating-point operations and bytes per second."""

    flops_per_s: float
    memory_bytes_per_s: float
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float

    def forward_s(self, call: Call) -> float:
        """Return the seconds of a call: of a convolution by its arithmetic alone, of others by the bytes they move.

        A ReLU takes none: the rate of convolutions is that of whole networks, their ReLUs among it.
        """
        if call.kind is CallKind.CONV:
            return call.flops / self.flops_per_s
        return max(call.flops / self.flops_per_s, call.moved_bytes / self.memory_bytes_per_s)

    def backward_s(self, call: Call) -> float:
        """Return the seconds of a backward call.

        It takes twice as long as forward, except that the first convolution takes as long as forward: its images need
        no gradient.
        """
        is_first = call.kind is CallKind.CONV and call.reads == 0
        return (1 if is_first else 2) * self.forward_s(call)

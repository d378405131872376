"""The studies of the vDNN paper (Rhu et al. 2016, arXiv 1602.08124), on a simulated Titan X.

Counted are the bytes that vDNN manages: the images, the feature maps, their gradients and the
convolutions' workspace, but neither parameters nor the classifier. The baseline holds all of it for
the whole step: every map, two buffers as large as the largest map for the gradients, and one
workspace. Under vDNN a buffer lives from the call that fills it to the last that needs it, and
convolutions run without workspace. Everything is float32; a ReLU works in place, and the branches
of an inception write into one joined map.

Why figures differ: the paper does not say over what it averages, so averages are shown over calls,
each counted once, and over time, in which the large first maps weigh more. The workspaces that
cuDNN 4 took are not known: here each convolution has the algorithm that operations and bytes make
the fastest (implicit matrix product, Fourier transform, or that in tiles of 32 px). All
convolutions run at one rate, 0.75 of the data sheet's, which the public timing of VGG-16 gave.
vdnn_dyn chooses between conv and all, so a published loss belongs between these two.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from typing import NamedTuple

from gems import compose
from gems.memory.policies.vdnn import prefetch_window
from gems.models import layers_of
from gems.models.steps import Conv, Fork, Pool, Step, channels_after, side_after
from gems.utils.tables import RIGHT, table

GB = 1e9
ITEM_BYTES = 4
CONV = "conv"
RELU = "relu"
POOL = "pool"
NORM = "norm"
LINEAR = "linear"
MACHINE = compose(["machine=titan_x"]).machine
FLOPS_PER_S = MACHINE.flops_per_s * MACHINE.efficiency
BYTES_PER_S = MACHINE.memory_bytes_per_s * MACHINE.efficiency
# of a padded map that cuDNN transforms as a whole
TILE_PX = 32
LARGEST_PX = 256


class Load(NamedTuple):
    """A network of the paper: its name there, `model=`, the images' side, and the mini-batch."""

    title: str
    model: str
    side_px: int
    images: int


ALEXNET = Load("AlexNet", "alexnet", 224, 128)
OVERFEAT = Load("OverFeat", "overfeat", 231, 128)
GOOGLENET = Load("GoogLeNet", "googlenet", 224, 128)
VGG16_64, VGG16_128, VGG16 = (Load("VGG-16", "vgg16", 224, images) for images in (64, 128, 256))
DEEP = tuple(Load(f"VGG-{depth}", f"vgg{depth}", 224, 32) for depth in (116, 216, 316, 416))
LOADS = (ALEXNET, OVERFEAT, GOOGLENET, VGG16_64, VGG16_128, VGG16, *DEEP)


class Map(NamedTuple):
    """A buffer of shape (N, channels, height, width)."""

    buffer: int
    channels: int
    px: tuple[int, int]


class Call(NamedTuple):
    """A call of cuDNN: it reads one buffer and writes one, or a part of one.

    Times and bytes are those of forward.
    """

    kind: str
    reads: int
    writes: int
    forward_s: float = 0.0
    param_bytes: int = 0
    workspace_bytes: int = 0

    @property
    def backward_s(self) -> float:
        """Twice forward's, except that images need no gradient."""
        return (1 if self.kind == CONV and self.reads == 0 else 2) * self.forward_s


class Network:
    """The calls of one forward, and the bytes of their buffers; buffer 0 holds the images."""

    def __init__(self, load: Load) -> None:
        self.images = load.images
        self.calls: list[Call] = []
        self.buffer_bytes: list[int] = []
        sides = f"data.height_px={load.side_px} data.width_px={load.side_px}"
        spec = compose(f"model={load.model} data=synthetic data.num_classes=1000 {sides}".split())
        now = self._new(3, (load.side_px, load.side_px))
        for layer in layers_of(spec.model, spec.data):
            options = dict(layer.options)
            for step in options.get("steps", ()):
                now = self._add(step, now)
            if "steps" not in options:
                features = options.get("in_features") or options["in_channels"]
                now = self._add_linear(
                    now, features, options.get("out_features") or options["num_classes"]
                )

    @property
    def managed(self) -> set[int]:
        """The buffers that vDNN manages."""
        return {0, *(call.writes for call in self.calls if call.kind != LINEAR)}

    def _new(self, channels: int, px: tuple[int, int]) -> Map:
        new = Map(len(self.buffer_bytes), channels, px)
        self.buffer_bytes.append(self._bytes(new))
        return new

    def _bytes(self, *maps: Map) -> int:
        return sum(ITEM_BYTES * self.images * map_.channels * math.prod(map_.px) for map_ in maps)

    def _add_linear(self, given: Map, in_features: int, out_features: int) -> Map:
        into = self._new(out_features, (1, 1))
        params = ITEM_BYTES * out_features * (in_features + 1)
        moved_s = (params + self._bytes(given, into)) / BYTES_PER_S
        flops_s = 2 * self.images * in_features * out_features / FLOPS_PER_S
        self.calls.append(Call(LINEAR, given.buffer, into.buffer, max(flops_s, moved_s), params))
        return into

    def _add(self, step: Step, given: Map, into: Map | None = None) -> Map:
        """Add the calls of a step that reads `given` and writes `into`, or a map of its own."""
        height_px, width_px = (side_after(px, (step,)) for px in given.px)
        out = Map(-1, channels_after(given.channels, (step,)), (height_px, width_px))
        into = into or self._new(out.channels, out.px)
        if isinstance(step, Fork):
            for branch in step.branches:
                now = given
                for layer in branch[:-1]:
                    now = self._add(layer, now)
                self._add(branch[-1], now, into)
        elif isinstance(step, Conv):
            weights = given.channels * math.prod(step.kernel)
            seconds = 2 * self.images * weights * out.channels * math.prod(out.px) / FLOPS_PER_S
            params = ITEM_BYTES * out.channels * (weights + 1)
            algorithms = [(seconds, 0), *self._transforms(step, given, out)]
            self.calls += [
                Call(CONV, given.buffer, into.buffer, seconds, params, min(algorithms)[1]),
                Call(RELU, into.buffer, into.buffer),
            ]
        else:
            kind = POOL if isinstance(step, Pool) else NORM
            moved_s = self._bytes(given, out) / BYTES_PER_S
            self.calls.append(Call(kind, given.buffer, into.buffer, moved_s))
        return into

    def _transforms(self, step: Conv, given: Map, out: Map) -> Iterator[tuple[float, int]]:
        """Yield seconds and workspace bytes of FFT convolutions of the whole map and of tiles."""
        if step.stride != 1:
            return
        padded = [side + 2 * edge for side, edge in zip(given.px, step.padding, strict=True)]
        shapes = []
        if max(padded) <= LARGEST_PX:
            shapes.append(([1 << (side - 1).bit_length() for side in padded], 1))
        if max(step.kernel) <= TILE_PX:
            sides = zip(out.px, step.kernel, strict=True)
            tiles = math.prod(math.ceil(side / (TILE_PX - kernel + 1)) for side, kernel in sides)
            shapes.append(([TILE_PX, TILE_PX], tiles))
        for (height_px, width_px), tiles in shapes:
            size = height_px * width_px
            spectrum = height_px * (width_px // 2 + 1)
            maps = tiles * self.images
            transforms = maps * (given.channels + out.channels) + given.channels * out.channels
            products = 8 * spectrum * maps * given.channels * out.channels  # of complex numbers
            flops = transforms * 2.5 * size * math.log2(size) + products
            spectra_bytes = 8 * spectrum * transforms
            yield flops / FLOPS_PER_S + 2 * spectra_bytes / BYTES_PER_S, spectra_bytes


class Outcome(NamedTuple):
    """A simulated step: mean managed bytes on the device, over time and calls, and the peak."""

    step_s: float
    lost: float
    by_time: float
    by_calls: float
    peak_bytes: int


def offloads(network: Network, policy: str) -> list[bool]:
    """Return for each call whether it is the last in forward to read its input buffer."""
    leaving = [False] * len(network.calls)
    readers: dict[int, list[int]] = {}
    for at, call in enumerate(network.calls):
        if call.kind != RELU:  # it works in place
            readers.setdefault(call.reads, []).append(at)
    for reading in readers.values():
        kinds = {network.calls[at].kind for at in reading}
        leaving[reading[-1]] = LINEAR not in kinds and (
            policy == "all" or (policy == "conv" and CONV in kinds)
        )
    return leaving


def play(network: Network, policy: str) -> Outcome:
    """Simulate a step under `none`, `all` or `conv`.

    Forward, then backward, with a barrier after each call.
    """
    calls = network.calls
    leaving = offloads(network, policy)
    managed = network.managed
    window = prefetch_window([call.kind == CONV for call in calls], leaving)
    first_writer: dict[int, int] = {}
    last_need: dict[int, int] = {}  # in backward, which goes from the last call to the first
    for at, call in enumerate(calls):
        first_writer.setdefault(call.writes, at)
        last_need.setdefault(call.reads, at)
        if call.kind in (POOL, NORM):
            last_need.setdefault(call.writes, at)
    # on the device
    maps = {0}
    gradients = set[int]()
    moments: list[tuple[float, int]] = []

    def wait(seconds: float) -> None:
        sizes = [network.buffer_bytes[index] for index in (*maps, *gradients) if index in managed]
        moments.append((seconds, sum(sizes)))

    def fetch(buffer: int) -> float:
        copied = 0 if buffer in maps else network.buffer_bytes[buffer]
        maps.add(buffer)
        return copied / MACHINE.h2d_bytes_per_s

    for call, leaves in zip(calls, leaving, strict=True):
        maps.add(call.writes)
        copied = network.buffer_bytes[call.reads] if leaves else 0
        wait(max(call.forward_s, copied / MACHINE.d2h_bytes_per_s))
        if leaves:
            maps.remove(call.reads)
    for at, call in reversed(list(enumerate(calls))):
        if call.reads not in maps:  # no call has prefetched it
            wait(fetch(call.reads))
        if call.reads:
            gradients.add(call.reads)
        ahead = window[at]
        wait(max(call.backward_s, 0.0 if ahead is None else fetch(calls[ahead].reads)))
        for buffer in {call.reads, call.writes}:
            if last_need.get(buffer) == at:
                maps.remove(buffer)
            if first_writer.get(buffer) == at:
                gradients.discard(buffer)
    step_s = sum(seconds for seconds, _ in moments)
    lost = 1.0 - sum(call.forward_s + call.backward_s for call in calls) / step_s
    timed = [num_bytes for seconds, num_bytes in moments if seconds]
    by_time = sum(seconds * num_bytes for seconds, num_bytes in moments) / step_s
    return Outcome(step_s, lost, by_time, sum(timed) / len(timed), max(timed))


class Study:
    """The bytes of a network's baseline, and its step under each policy."""

    def __init__(self, load: Load) -> None:
        network = Network(load)
        sizes = [network.buffer_bytes[buffer] for buffer in sorted(network.managed)]
        self.workspace_bytes = max(call.workspace_bytes for call in network.calls)
        self.params_bytes = 2 * sum(
            call.param_bytes for call in network.calls
        )  # and their gradients
        self.managed_bytes = sum(sizes) + 2 * max(sizes[1:]) + self.workspace_bytes
        self.total_bytes = self.managed_bytes + self.params_bytes
        self.none, self.all, self.conv = (
            play(network, policy) for policy in ("none", "all", "conv")
        )

    def saved(self, held_bytes: float) -> float:
        """Return the percentage of the baseline's managed bytes that is saved."""
        return 100 * (1.0 - held_bytes / self.managed_bytes)


study = cache(Study)


def rows() -> Iterator[tuple[Load | None, str, str, float, float]]:
    """Yield network, quantity, unit, our figure and the paper's."""
    for load, published in ((ALEXNET, 89.0), (OVERFEAT, 91.0), (GOOGLENET, 95.0)):
        step = study(load).all
        yield (
            load,
            "all: average saved, over calls",
            "%",
            study(load).saved(step.by_calls),
            published,
        )
        yield load, "all: average saved, over time", "%", study(load).saved(step.by_time), published
    vgg = study(VGG16)
    yield VGG16, "conv: throughput lost", "%", 100 * vgg.conv.lost, 1.0
    yield VGG16, "all: throughput lost", "%", 100 * vgg.all.lost, 18.0
    yield (
        VGG16,
        "all: peak with parameters",
        "GB",
        (vgg.all.peak_bytes + vgg.params_bytes) / GB,
        12.0,
    )
    for load, published in ((ALEXNET, 81.0), (VGG16, 96.0)):
        share = 100 * study(load).managed_bytes / study(load).total_bytes
        yield load, "feature layers' share", "%", share, published
    for load, published in ((VGG16, 28.0), (DEEP[-1], 67.1)):  # the second is recalled
        studies = study(load)
        yield (
            load,
            "baseline without workspace",
            "GB",
            (studies.total_bytes - studies.workspace_bytes) / GB,
            published,
        )
        yield load, "baseline", "GB", studies.total_bytes / GB, published
    assert MACHINE.device_bytes is not None
    beyond = [study(load) for load in LOADS if study(load).total_bytes > MACHINE.device_bytes]
    saved = [
        studies.saved(step.by_time) for studies in beyond for step in (studies.conv, studies.all)
    ]
    yield None, "how many of the ten exceed the card", "", len(beyond), 6
    yield None, "of these: average saved, least", "%", min(saved), 73.0
    yield None, "of these: average saved, most", "%", max(saved), 98.0
    for load, published in (
        (ALEXNET, 90.1),
        (OVERFEAT, 276.5),
        (GOOGLENET, 450.6),
        (VGG16_64, 1133.0),
    ):
        yield (
            load,
            "step without vDNN (public timing)",
            "ms",
            1e3 * study(load).none.step_s,
            published,
        )


def main() -> None:
    """Print the table."""
    columns = {
        "network": "",
        "images": "d",
        "quantity": "",
        "unit": "",
        "ours": RIGHT,
        "published": RIGHT,
    }
    cells = [
        (
            load and load.title,
            load and load.images,
            quantity,
            unit,
            f"{ours:.1f}",
            f"{published:.1f}",
        )
        for load, quantity, unit, ours, published in rows()
    ]
    print(table(columns, cells, title="vDNN's studies, SIMULATED on a Titan X"))


if __name__ == "__main__":
    main()

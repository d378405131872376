"""The work of a model's layers as operators, from which times follow at any rates and any size.

A profile has times of one device and one size of micro-batch. The operators of two sizes give those
of any size, since their work is linear in the samples, while their times are not: a kernel takes
the longest of its products, its memory traffic, its launch and a round of the multiprocessors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gems.profile.kernel_work import FULL, KernelWork
from gems.profile.model_profile import ModelProfile
from gems.profile.scaling import extrapolate


class Operator(NamedTuple):
    """The work and memory traffic of an operator.

    `channels` is the least number of channels of a convolution's or batch norm's images.
    """

    flops: float
    moved_bytes: float
    channels: float = math.inf
    is_product: bool = False
    work: KernelWork = FULL


@dataclass(frozen=True, slots=True)
class Rates:
    """The rates of a machine for one dtype, and its launch costs.

    They are floating-point operations, and bytes of device memory moved, per second. The host takes
    `launch_s` to launch an operator, None if unknown. On the device an operator takes at least
    `operator_s`, and bytes move at half the rate with `half_rate_channels` channels. Kernels of few
    blocks do not fill the `multiprocessors`, None if unknown.
    """

    flops_per_s: float
    memory_bytes_per_s: float
    launch_s: float | None = None
    operator_s: float = 0.0
    half_rate_channels: float = 0.0
    multiprocessors: int | None = None
    has_winograd: bool = False

    def seconds(
        self, flops: float, moved_bytes: float, channels: float = math.inf, work: KernelWork = FULL
    ) -> float:
        """Return the time of one operator on the device, in seconds."""
        slower = 1.0 + self.half_rate_channels / channels
        longer = 1.0 if self.multiprocessors is None else work.slowdown(self.multiprocessors)
        return max(
            longer * flops / self.flops_per_s,
            slower * moved_bytes / self.memory_bytes_per_s,
            self.operator_s,
        )

    def pass_s(self, operators: Sequence[Operator]) -> float:
        """Return the time of operators in a row, which the host launches ahead of the device."""
        device_s = sum(
            self.seconds(operator.flops, operator.moved_bytes, operator.channels, operator.work)
            for operator in operators
        )
        return max(device_s, len(operators) * (self.launch_s or 0.0))


class LayerWork(NamedTuple):
    """The operators of a layer's forward, whole backward, and backward of its inputs alone."""

    forward: tuple[Operator, ...]
    backward: tuple[Operator, ...]
    input_grad: tuple[Operator, ...]

    def times(self, rates: Rates) -> dict[str, float]:
        """Return the times of the layer's passes in seconds, by field of a profile."""
        forward_s = rates.pass_s(self.forward)
        input_grad_s = rates.pass_s(self.input_grad)
        cheap = [operator for operator in self.forward if not operator.is_product]
        return {
            "forward_s": forward_s,
            "input_grad_s": input_grad_s,
            "weight_grad_s": max(0.0, rates.pass_s(self.backward) - input_grad_s),
            "recompute_s": forward_s,
            "cheap_s": rates.pass_s(cheap),
        }


@dataclass(frozen=True, slots=True)
class ModelWork:
    """The work of a model on micro-batches of one size.

    `profile` has the bytes of the layers; `layers` has, for each of them, the number of its work in
    `kinds`, since equal layers share one.
    """

    profile: ModelProfile
    layers: tuple[int, ...]
    kinds: tuple[LayerWork, ...]

    def timed(self, rates: Rates) -> ModelProfile:
        """Return the profile with the times at given rates."""
        times: list[dict[str, Any]] = [{**work.times(rates)} for work in self.kinds]
        layers = (
            replace(layer, **times[kind])
            for layer, kind in zip(self.profile.layers, self.layers, strict=True)
        )
        return replace(self.profile, layers=tuple(layers))

    def to_json(self) -> dict[str, Any]:
        """Return the JSON document of the cache."""
        kinds = [
            [[[*_numbers(operator)] for operator in operators] for operators in work]
            for work in self.kinds
        ]
        return {"profile": self.profile.to_json(), "layers": list(self.layers), "kinds": kinds}

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> ModelWork:
        """Read a document of `to_json`."""
        kinds = tuple(
            LayerWork(*(tuple(map(_operator, operators)) for operators in work))
            for work in document["kinds"]
        )
        profile = ModelProfile.from_json(document["profile"])
        return cls(profile, tuple(document["layers"]), kinds)


def work_at(points: Sequence[ModelWork], micro_batch_size: int) -> ModelWork:
    """Return the work on micro-batches of a size, from that of one size or two.

    Raises:
        ConfigError: there is one size, and it is another one.
    """
    for point in points:
        if point.profile.micro_batch_size == micro_batch_size:
            return point
    first, *_, last = points
    profiles = [point.profile for point in points]
    profile = extrapolate(profiles, first.profile.sides, micro_batch_size)
    sizes = first.profile.micro_batch_size, last.profile.micro_batch_size
    share = (micro_batch_size - sizes[0]) / (sizes[1] - sizes[0])
    kinds = tuple(
        LayerWork(
            *(
                tuple(_between(low, high, share) for low, high in zip(*both, strict=True))
                for both in zip(*works, strict=True)
            )
        )
        for works in zip(first.kinds, last.kinds, strict=True)
    )
    return ModelWork(profile, first.layers, kinds)


def _between(low: Operator, high: Operator, share: float) -> Operator:
    def line(start: float, end: float) -> float:
        return max(0.0, start + share * (end - start))

    return low._replace(
        flops=line(low.flops, high.flops),
        moved_bytes=line(low.moved_bytes, high.moved_bytes),
        work=KernelWork(line(low.work.blocks, high.work.blocks), high.work.share),
    )


def _numbers(operator: Operator) -> Iterator[float]:
    yield from (operator.flops, operator.moved_bytes)
    yield 0.0 if math.isinf(operator.channels) else operator.channels
    yield from (float(operator.is_product), operator.work.blocks, operator.work.share)


def _operator(numbers: Iterable[float]) -> Operator:
    flops, moved_bytes, channels, is_product, blocks, share = numbers
    work = KernelWork(blocks, share)
    return Operator(flops, moved_bytes, channels or math.inf, bool(is_product), work)

"""One network of the vDNN paper on one device.

What it needs without vDNN, and a step under each policy.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from analysis.papers.vdnn_network import CallKind, Device, Network, Window
from gems.memory.policies.vdnn import prefetch_window

PARAM_COPIES = 2  # the parameters and their gradients


@dataclass(frozen=True, slots=True)
class Study:
    """The bytes of the baseline, which allocates all of a step at its start, and the step of each policy.

    `maps_bytes` are the images and all feature maps, `gradients_bytes` the two buffers that all
    gradient maps share, `workspace_bytes` the one that all convolutions share, `params_bytes`
    parameters and their gradients.
    """

    maps_bytes: int
    gradients_bytes: int
    workspace_bytes: int
    params_bytes: int
    steps: Mapping[Policy, Timeline]

    @property
    def total_bytes(self) -> int:
        """Bytes of the baseline without workspace.

        Maps, gradient maps, parameters and their gradients.
        """
        return self.maps_bytes + self.gradients_bytes + self.params_bytes

    @property
    def managed_bytes(self) -> int:
        """What of the baseline vDNN manages.

        Maps, gradient maps and workspace, not parameters, not the classifier.
        """
        return self.maps_bytes + self.gradients_bytes + self.workspace_bytes

    @property
    def feature_share(self) -> float:
        """The share of what vDNN manages in all that the baseline allocates."""
        return self.managed_bytes / (self.managed_bytes + self.params_bytes)

    def saved(self, held_bytes: float, has_workspace: bool = True) -> float:
        """Return which share of the baseline's managed bytes is saved where `held_bytes` are held instead."""
        base = self.managed_bytes - (0 if has_workspace else self.workspace_bytes)
        return 1.0 - held_bytes / base


def study(network: Network, device: Device) -> Study:
    """Simulate a step of a network under each policy.

    Under vDNN convolutions run without workspace, as its memory-optimal algorithms do; the
    baseline's are the fastest.
    """
    return Study(
        network.map_bytes,
        network.gradient_bytes,
        workspace_bytes(network, device),
        PARAM_COPIES * network.param_bytes,
        {policy: play(network, policy, device) for policy in Policy},
    )


class Policy(StrEnum):
    """Whose inputs leave the device.

    Nobody's, those of all feature calls, or those that a convolution reads.
    """

    NONE = "none"
    ALL = "all"
    CONV = "conv"


class Moment(NamedTuple):
    """A time in which the managed bytes on the device are the same."""

    seconds: float
    device_bytes: int


class Timeline(NamedTuple):
    """A step: its moments, the bytes copied out in it, its seconds, and those of compute alone.

    `loss` is the share of the throughput that is lost against a device with memory enough. The
    managed bytes on the device are averaged over the time of the step, and over the calls, each
    once, however long it takes: a ReLU takes no time and is not counted, unless a copy makes it
    wait. `peak_bytes` are the most at once.
    """

    moments: tuple[Moment, ...]
    offloaded_bytes: int
    step_s: float
    compute_s: float
    loss: float
    average_bytes: float
    call_average_bytes: float
    peak_bytes: int


def play(network: Network, policy: Policy, device: Device) -> Timeline:
    """Simulate one step: forward, then backward, each call with the barrier at its end."""
    calls = network.calls
    leaving = offloads(network, policy)
    managed = network.managed
    window = prefetch_window([call.kind is CallKind.CONV for call in calls], leaving)
    first_writer: dict[int, int] = {}
    last_need: dict[int, int] = {}  # in backward, which goes from the last call to the first
    for at, call in enumerate(calls):
        first_writer.setdefault(call.writes, at)
        last_need.setdefault(call.reads, at)
        if call.kind in (CallKind.POOL, CallKind.NORM):
            last_need.setdefault(call.writes, at)
    # those on the device
    maps = {0}
    gradients = set[int]()
    moments: list[Moment] = []
    offloaded_bytes = 0

    def go_on(seconds: float) -> None:
        held = sum(network.buffer_bytes[each] for each in (*maps, *gradients) if each in managed)
        moments.append(Moment(seconds, held))

    def fetch(buffer: int) -> float:
        """Bring a buffer to the device, and return the seconds of its copy."""
        if buffer in maps:
            return 0.0
        maps.add(buffer)
        return network.buffer_bytes[buffer] / device.h2d_bytes_per_s

    for call, leaves in zip(calls, leaving, strict=True):
        maps.add(call.writes)
        copied = network.buffer_bytes[call.reads] if leaves else 0
        go_on(max(device.forward_s(call), copied / device.d2h_bytes_per_s))
        offloaded_bytes += copied
        if copied:
            maps.remove(call.reads)
    for at, call in reversed(list(enumerate(calls))):
        if call.reads not in maps:  # no call has prefetched it: this one waits for it alone
            go_on(fetch(call.reads))
        if call.reads:
            gradients.add(call.reads)
        fetched = window[at]
        copy_s = 0.0 if fetched is None else fetch(calls[fetched].reads)
        go_on(max(device.backward_s(call), copy_s))
        for buffer in {call.reads, call.writes}:
            if last_need.get(buffer) == at:
                maps.remove(buffer)
            if first_writer.get(buffer) == at:
                gradients.discard(buffer)
    compute_s = sum(device.forward_s(call) + device.backward_s(call) for call in calls)
    step_s = sum(moment.seconds for moment in moments)
    timed = [moment for moment in moments if moment.seconds]
    return Timeline(
        tuple(moments),
        offloaded_bytes,
        step_s,
        compute_s,
        1.0 - compute_s / step_s,
        sum(moment.seconds * moment.device_bytes for moment in moments) / step_s,
        sum(moment.device_bytes for moment in timed) / len(timed),
        max(moment.device_bytes for moment in moments),
    )


def offloads(network: Network, policy: Policy) -> tuple[bool, ...]:
    """Return for each call whether the buffer that it reads leaves with it.

    It is the last to read it in forward.
    What the classifier reads stays, and so does what nobody reads but the ReLU that works in place.
    """
    leaving = [False] * len(network.calls)
    readers: dict[int, list[int]] = {}
    for at, call in enumerate(network.calls):
        if call.kind is not CallKind.RELU:
            readers.setdefault(call.reads, []).append(at)
    for reading in readers.values() if policy is not Policy.NONE else ():
        kinds = {network.calls[at].kind for at in reading}
        if CallKind.LINEAR not in kinds and (policy is Policy.ALL or CallKind.CONV in kinds):
            leaving[reading[-1]] = True
    return tuple(leaving)


TILE_PX = 32
_LARGEST_PX = 256  # of a padded map that cuDNN transforms in one piece
_COMPLEX_BYTES = 8
_FLOPS_A_PRODUCT = 8  # of two complex numbers, and the addition behind it


def workspace_bytes(network: Network, device: Device) -> int:
    """Return the bytes of the one workspace that all convolutions share, each with its fastest algorithm."""
    return max(
        (fastest(call.window, device)[1] for call in network.calls if call.window), default=0
    )


def fastest(window: Window, device: Device) -> tuple[float, int]:
    """Return seconds and workspace bytes of the fastest algorithm for a convolution's forward."""
    direct = (window.flops / device.flops_per_s, 0)
    return min((direct, *(_transformed(window, *shape, device) for shape in _transforms(window))))


def _transforms(window: Window) -> Iterator[tuple[tuple[int, int], int]]:
    """Yield (height, width) of the transforms that a convolution can take, and how many cover a map."""
    if window.stride != 1:
        return
    padded = [side + 2 * edge for side, edge in zip(window.in_px, window.padding, strict=True)]
    if max(padded) <= _LARGEST_PX:
        height_px, width_px = (1 << (side - 1).bit_length() for side in padded)
        yield (height_px, width_px), 1
    if max(window.kernel) <= TILE_PX:
        sides = zip(window.out_px, window.kernel, strict=True)
        yield (
            (TILE_PX, TILE_PX),
            math.prod(math.ceil(side / (TILE_PX - kernel + 1)) for side, kernel in sides),
        )


def _transformed(
    window: Window, px: tuple[int, int], num_tiles: int, device: Device
) -> tuple[float, int]:
    """Return seconds and workspace bytes of one convolution by transforms.

    There, product of spectra, and back.
    """
    maps = num_tiles * window.images * (window.in_channels + window.channels)
    transforms = maps + window.in_channels * window.channels
    size = math.prod(px)
    spectrum = px[0] * (px[1] // 2 + 1)  # of real numbers half is enough
    products = num_tiles * window.images * window.in_channels * window.channels
    flops = transforms * 2.5 * size * math.log2(size) + _FLOPS_A_PRODUCT * spectrum * products
    spectra_bytes = _COMPLEX_BYTES * spectrum * transforms
    seconds = flops / device.flops_per_s + 2 * spectra_bytes / device.memory_bytes_per_s
    return seconds, spectra_bytes

"""One step of a network under a vDNN policy, call by call: seconds, and the bytes that vDNN holds on the device.

Rhu et al. 2016 (arXiv 1602.08124), section III: a buffer leaves with its last reader of forward, an end-of-layer barrier
waits for the copy, and in backward at most one buffer comes back beside each call.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from gems.memory.policies.vdnn.paper.calls import CallKind, Network
from gems.memory.policies.vdnn.paper.device import Device
from gems.memory.policies.vdnn.window import prefetch_window


class Policy(StrEnum):
    """Whose inputs leave the device: nobody's, those of all feature calls, or those that a convolution reads."""

    NONE = "none"
    ALL = "all"
    CONV = "conv"


@dataclass(frozen=True, slots=True)
class Moment:
    """A time in which the managed bytes on the device are the same."""

    seconds: float
    device_bytes: int


@dataclass(frozen=True, slots=True)
class Timeline:
    """A step: its moments, the bytes that are copied out in it, and the seconds that copies add to the compute."""

    moments: tuple[Moment, ...]
    offloaded_bytes: int
    compute_s: float

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return sum(moment.seconds for moment in self.moments)

    @property
    def loss(self) -> float:
        """The share of the throughput that is lost against a device with memory enough."""
        return 1.0 - self.compute_s / self.step_s

    @property
    def average_bytes(self) -> float:
        """The managed bytes on the device, averaged over the time of the step."""
        return sum(moment.seconds * moment.device_bytes for moment in self.moments) / self.step_s

    @property
    def call_average_bytes(self) -> float:
        """The managed bytes on the device, averaged over the calls, each once, however long it takes.

        A ReLU takes no time and is not counted, unless a copy makes it wait.
        """
        held = [moment.device_bytes for moment in self.moments if moment.seconds]
        return sum(held) / len(held)

    @property
    def peak_bytes(self) -> int:
        """The most managed bytes on the device at once."""
        return max(moment.device_bytes for moment in self.moments)


def play(network: Network, policy: Policy, device: Device) -> Timeline:
    """Simulate one step: forward, then backward, each call with the barrier at its end."""
    played = _Play(network, offloads(network, policy), device)
    played.forward()
    played.backward()
    compute_s = sum(device.forward_s(call) + device.backward_s(call) for call in network.calls)
    return Timeline(tuple(played.moments), played.offloaded_bytes, compute_s)


def offloads(network: Network, policy: Policy) -> tuple[bool, ...]:
    """Return for each call whether the buffer that it reads leaves with it: it is the last to read it in forward.

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


class _Play:
    """The state of the device along the calls: which maps and which gradients are on it."""

    def __init__(self, network: Network, leaving: Sequence[bool], device: Device) -> None:
        self.network, self.leaving, self.device = network, leaving, device
        self.window = prefetch_window([call.kind is CallKind.CONV for call in network.calls], leaving)
        managed = network.managed
        self.sizes = [size if at in managed else 0 for at, size in enumerate(network.buffer_bytes)]
        self.maps: set[int] = {0}
        self.gradients: set[int] = set()
        self.moments: list[Moment] = []
        self.offloaded_bytes = 0
        self.first_writer: dict[int, int] = {}
        self.last_need: dict[int, int] = {}  # in backward, which goes from the last call to the first
        for at, call in enumerate(network.calls):
            self.first_writer.setdefault(call.writes, at)
            self.last_need.setdefault(call.reads, at)
            if call.kind in (CallKind.POOL, CallKind.NORM):
                self.last_need.setdefault(call.writes, at)

    def forward(self) -> None:
        for at, call in enumerate(self.network.calls):
            self.maps.add(call.writes)
            copied = self.network.buffer_bytes[call.reads] if self.leaving[at] else 0
            self._pass(max(self.device.forward_s(call), copied / self.device.d2h_bytes_per_s))
            self.offloaded_bytes += copied
            if copied:
                self.maps.remove(call.reads)

    def backward(self) -> None:
        for at in range(len(self.network.calls) - 1, -1, -1):
            call = self.network.calls[at]
            if call.reads not in self.maps:  # nobody brought it: the call waits for it alone
                self._pass(self._bring(call.reads))
            if call.reads:
                self.gradients.add(call.reads)
            fetched = self.window[at]
            copy_s = 0.0 if fetched is None else self._bring(self.network.calls[fetched].reads)
            self._pass(max(self.device.backward_s(call), copy_s))
            for buffer in {call.reads, call.writes}:
                if self.last_need.get(buffer) == at:
                    self.maps.remove(buffer)
                if self.first_writer.get(buffer) == at:
                    self.gradients.discard(buffer)

    def _bring(self, buffer: int) -> float:
        """Allocate a buffer on the device and gives the seconds of its copy back."""
        if buffer in self.maps:
            return 0.0
        self.maps.add(buffer)
        return self.network.buffer_bytes[buffer] / self.device.h2d_bytes_per_s

    def _pass(self, seconds: float) -> None:
        held = sum(self.sizes[buffer] for buffers in (self.maps, self.gradients) for buffer in buffers)
        self.moments.append(Moment(seconds, held))

"""What a model is placed on, and what a placement comes to: equal devices, links, and the times of a step."""

from __future__ import annotations

from dataclasses import dataclass

from gems.errors import ConfigError
from gems.profile.operator_graph import OpGraph


@dataclass(frozen=True, slots=True)
class Devices:
    """Equal devices, with a link of `latency_s` + bytes x `s_per_byte` between any two; None bytes: no limit.

    With `has_contention` a device sends its messages one at a time, and receives so too.

    Raises:
        ConfigError: no device.
    """

    num: int
    latency_s: float = 0.0
    s_per_byte: float = 0.0
    limit_bytes: int | None = None
    has_contention: bool = False

    def __post_init__(self) -> None:
        if self.num < 1:
            raise ConfigError("--devices", self.num, "must be 1 or more")

    def delay_s(self, num_bytes: float) -> float:
        """Return the time of a message in seconds."""
        return self.latency_s + num_bytes * self.s_per_byte

    def fit(self, graph: OpGraph, places: tuple[int, ...]) -> bool:
        """Whether no device holds more than its limit."""
        return self.limit_bytes is None or max(self.held(graph, places)) <= self.limit_bytes

    def held(self, graph: OpGraph, places: tuple[int, ...]) -> list[int]:
        """Return the bytes that each device holds."""
        found = [0] * self.num
        for op, place in zip(graph.ops, places, strict=True):
            found[place] += op.held_bytes
        return found


@dataclass(frozen=True, slots=True)
class Timed:
    """A placement in time: the device of each operator, and when its forward and its backward start.

    Backward starts at `forward_span_s`, when all of forward has ended, as the loss wants it; `span_s` is the whole step.
    """

    places: tuple[int, ...]
    forward_start_s: tuple[float, ...]
    backward_start_s: tuple[float, ...]
    forward_span_s: float
    span_s: float

"""What a model is placed on, and what a placement comes to: equal devices, links, and the times of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
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
class TimedPlacement:
    """A placement in time: the device of each operator, and when its forward and its backward start.

    Backward starts at `forward_span_s`, when all of forward has ended, as the loss wants it; `span_s` is the whole
    step.
    """

    places: tuple[int, ...]
    forward_start_s: tuple[float, ...]
    backward_start_s: tuple[float, ...]
    forward_span_s: float
    span_s: float


Message = tuple[int, int]  # forward (operator, device): its output to there; backward (reader, feeder): a gradient
Item = int | Message


def needs(graph: OpGraph, places: Sequence[int], is_forward: bool) -> list[list[Item]]:
    """Return what each operator waits for: operators on its device, and messages."""
    found: list[list[Item]] = []
    for v, here in enumerate(places):
        others = graph.predecessors[v] if is_forward else graph.successors[v]
        local: list[Item] = [u for u in others if places[u] == here]
        messages = [(u, here) if is_forward else (u, v) for u in others if places[u] != here]
        found.append([*local, *messages])
    return found


def with_messages(graph: OpGraph, places: Sequence[int], order: Iterable[int], is_forward: bool) -> list[Item]:
    """Put each message right after the operator that makes it."""
    sequence: list[Item] = []
    for v in order:
        sequence.append(v)
        if is_forward:
            sequence += [(v, place) for place in sorted({places[w] for w in graph.successors[v]} - {places[v]})]
        else:
            sequence += [(v, u) for u in graph.predecessors[v] if places[u] != places[v]]
    return sequence


def simulate(
    graph: OpGraph, devices: Devices, places: Sequence[int], forward: Sequence[Item], backward: Sequence[Item]
) -> TimedPlacement:
    """Start each operator and message as early as the order allows.

    Args:
        graph: what is placed.
        devices: on what.
        places: the device of each operator.
        forward: all operators and messages, none before what it waits for; a device runs its own in this order.
        backward: the same for gradients: readers before what they read.
    """
    given = _starts(graph, devices, places, forward, True)
    back = _starts(graph, devices, places, backward, False)
    span = max(start + op.forward_s for start, op in zip(given, graph.ops, strict=True))
    last = max(start + op.backward_s for start, op in zip(back, graph.ops, strict=True))
    return TimedPlacement(tuple(places), tuple(given), tuple(start + span for start in back), span, span + last)


def _starts(
    graph: OpGraph, devices: Devices, places: Sequence[int], sequence: Sequence[Item], is_forward: bool
) -> list[float]:
    start = [0.0] * graph.num_ops
    done: dict[Item, float] = {}
    free = [0.0] * devices.num
    sends, receives = [0.0] * devices.num, [0.0] * devices.num
    needed = needs(graph, places, is_forward)
    for item in sequence:
        if isinstance(item, int):
            here, op = places[item], graph.ops[item]
            start[item] = max(free[here], *(done[need] for need in needed[item]), 0.0)
            free[here] = done[item] = start[item] + (op.forward_s if is_forward else op.backward_s)
            continue
        maker, other = item
        sender, receiver = places[maker], other if is_forward else places[other]
        size = graph.ops[maker if is_forward else other].output_bytes
        ready = done[maker]
        if devices.has_contention:
            ready = max(ready, sends[sender], receives[receiver])
            sends[sender] = receives[receiver] = ready + size * devices.s_per_byte
        done[item] = ready + devices.delay_s(size)
    return start

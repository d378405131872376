"""The target of a placement: equal devices, links, and the times of a step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from gems.errors import ConfigError
from gems.profile.operator_graph import OpGraph


@dataclass(frozen=True, slots=True)
class Devices:
    """Equal devices, with a link of `latency_s` + bytes x `s_per_byte` between any two.

    `limit_bytes` None means no limit. With `has_contention` a device sends its messages one at a
    time, and receives them one at a time.

    Raises:
        ConfigError: There are no devices.
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
        """Return whether no device holds more than its limit."""
        return self.limit_bytes is None or max(self.held(graph, places)) <= self.limit_bytes

    def held(self, graph: OpGraph, places: tuple[int, ...]) -> list[int]:
        """Return the bytes that each device holds."""
        held_bytes = [0] * self.num
        for op, place in zip(graph.ops, places, strict=True):
            held_bytes[place] += op.held_bytes
        return held_bytes


@dataclass(frozen=True, slots=True)
class TimedPlacement:
    """A placement in time: the device of each operator, and the starts of its forward and backward.

    The backward begins at `forward_span_s`, when the whole forward has ended, because of the loss;
    `span_s` is the whole step.
    """

    places: tuple[int, ...]
    forward_start_s: tuple[float, ...]
    backward_start_s: tuple[float, ...]
    forward_span_s: float
    span_s: float


# (sending operator, operator whose output or gradient it is, destination device). A device receives
# an output once, and returns a gradient for each reader.
Message = tuple[int, int, int]
Item = int | Message


@dataclass(frozen=True, slots=True)
class Phase:
    """The forward or the backward of a graph.

    `before` are the operators for which each operator waits, `after` those that wait for it,
    `order` is a topological order, and `times_s` are the seconds of each operator.
    """

    is_forward: bool
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]
    order: tuple[int, ...]
    times_s: tuple[float, ...]

    def maker(self, first: int, then: int) -> int:
        """Return the operator whose output, or gradient, is sent between dependent operators."""
        return first if self.is_forward else then

    def with_messages(self, places: Sequence[int], order: Iterable[int]) -> list[Item]:
        """Return the operators with each message right after the operator that sends it."""
        sequence: list[Item] = []
        for v in order:
            crossing = [w for w in self.after[v] if places[w] != places[v]]
            sequence += [v, *sorted({(v, self.maker(v, w), places[w]) for w in crossing})]
        return sequence


def phases(graph: OpGraph) -> tuple[Phase, Phase]:
    """Return the forward and the backward of a graph."""
    before = graph.predecessors
    after = graph.successors
    forward_s = tuple(op.forward_s for op in graph.ops)
    backward_s = tuple(op.backward_s for op in graph.ops)
    return Phase(True, before, after, graph.order, forward_s), Phase(
        False, after, before, graph.order[::-1], backward_s
    )


def simulate(
    graph: OpGraph, devices: Devices, places: Sequence[int], sequences: Sequence[Sequence[Item]]
) -> TimedPlacement:
    """Start each operator and message as early as the order allows.

    `sequences` contains all operators and messages of forward and of backward, in an order that
    respects their dependencies; a device runs its own in this order.
    """
    forward, backward = phases(graph)
    starts, span_s = _starts(graph, devices, places, forward, sequences[0])
    later, last_s = _starts(graph, devices, places, backward, sequences[1])
    return TimedPlacement(
        tuple(places), tuple(starts), tuple(at + span_s for at in later), span_s, span_s + last_s
    )


def _starts(
    graph: OpGraph, devices: Devices, places: Sequence[int], phase: Phase, sequence: Sequence[Item]
) -> tuple[list[float], float]:
    starts = [0.0] * graph.num_ops
    done: dict[Item, float] = {}
    free, sends, receives = ([0.0] * devices.num for _ in range(3))
    for item in sequence:
        if isinstance(item, int):
            here = places[item]
            needed = (
                u if places[u] == here else (u, phase.maker(u, item), here)
                for u in phase.before[item]
            )
            starts[item] = max(free[here], *(done[dependency] for dependency in needed), 0.0)
            free[here] = done[item] = starts[item] + phase.times_s[item]
            continue
        source, maker, receiver = item
        sender = places[source]
        size = graph.ops[maker].output_bytes
        ready = done[source]
        if devices.has_contention:
            ready = max(ready, sends[sender], receives[receiver])
            sends[sender] = receives[receiver] = ready + size * devices.s_per_byte
        done[item] = ready + devices.delay_s(size)
    return starts, max(start + time for start, time in zip(starts, phase.times_s, strict=True))

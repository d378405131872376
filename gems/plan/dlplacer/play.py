"""Playing a placement: the earliest times of its operators and messages, in a given order."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from gems.plan.dlplacer.devices import Devices, Timed
from gems.plan.dlplacer.graph import OpGraph

Message = tuple[int, int]  # the output of an operator to a device, or its gradient back from there
Item = int | Message


def needs_of(graph: OpGraph, places: Sequence[int], is_forward: bool) -> list[list[Item]]:
    """Gives what each operator waits for: operators on its device, and messages."""
    found: list[list[Item]] = []
    for v, here in enumerate(places):
        others = graph.feeders[v] if is_forward else graph.users[v]
        local: list[Item] = [u for u in others if places[u] == here]
        if is_forward:
            local += [(u, here) for u in others if places[u] != here]
        else:
            local += [(v, place) for place in sorted({places[w] for w in others} - {here})]
        found.append(local)
    return found


def waited_for(graph: OpGraph, places: Sequence[int], message: Message, is_forward: bool) -> tuple[int, ...]:
    """Gives the operators that a message waits for: one forward; backward all readers there, whose gradients are summed."""
    u, place = message
    return (u,) if is_forward else tuple(w for w in graph.users[u] if places[w] == place)


def with_messages(
    graph: OpGraph, places: Sequence[int], order: Iterable[int], is_forward: bool
) -> list[Item]:
    """Puts each message right behind the last operator that it waits for."""
    left: dict[Message, int] = {}
    for u, here in enumerate(places):
        for place in {places[w] for w in graph.users[u]} - {here}:
            left[u, place] = len(waited_for(graph, places, (u, place), is_forward))
    sequence: list[Item] = []
    for v in order:
        sequence.append(v)
        if is_forward:
            sequence += [(v, place) for place in sorted({places[w] for w in graph.users[v]} - {places[v]})]
            continue
        for u in graph.feeders[v]:
            if places[u] != places[v]:
                left[u, places[v]] -= 1
                if not left[u, places[v]]:
                    sequence.append((u, places[v]))
    return sequence


def play(
    graph: OpGraph, devices: Devices, places: Sequence[int], forward: Sequence[Item], backward: Sequence[Item]
) -> Timed:
    """Starts each operator and message as early as the order allows.

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
    return Timed(tuple(places), tuple(given), tuple(start + span for start in back), span, span + last)


def _starts(
    graph: OpGraph, devices: Devices, places: Sequence[int], sequence: Sequence[Item], is_forward: bool
) -> list[float]:
    start = [0.0] * graph.num_ops
    done: dict[Item, float] = {}
    free = [0.0] * devices.num
    sends, receives = [0.0] * devices.num, [0.0] * devices.num
    needs = needs_of(graph, places, is_forward)
    for item in sequence:
        if isinstance(item, int):
            here, op = places[item], graph.ops[item]
            start[item] = max(free[here], *(done[need] for need in needs[item]), 0.0)
            free[here] = done[item] = start[item] + (op.forward_s if is_forward else op.backward_s)
            continue
        u, place = item
        ready = max(done[w] for w in waited_for(graph, places, item, is_forward))
        if devices.has_contention:
            sender, receiver = (places[u], place) if is_forward else (place, places[u])
            ready = max(ready, sends[sender], receives[receiver])
            sends[sender] = receives[receiver] = ready + graph.ops[u].output_bytes * devices.s_per_byte
        done[item] = ready + devices.delay_s(graph.ops[u].output_bytes)
    return start

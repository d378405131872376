"""Memory by what it holds: the buffers of messages among a rank's bytes, from the events of a trace."""

from __future__ import annotations

import numpy as np

from analysis.events import of_kinds

CONSUMERS = {"RECV_F": ("F",), "RECV_B": ("B", "I")}


def buffer_bytes(events: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
    """Gives the bytes of boundary buffers that a rank holds just after each of `times_ns`.

    A send's buffer is held from its posting until it is complete, a receive's from its posting until the compute
    that reads it has ended; so it is in emulated and simulated runs.

    Args:
        events: of one rank.
        times_ns: in any order.
    """
    sends = events[of_kinds(events, "SEND_F", "SEND_B")]
    came_ns, went_ns, sizes = [sends["start_ns"]], [sends["end_ns"]], [sends["moved_bytes"]]
    for kind, consumers in CONSUMERS.items():
        receives = events[of_kinds(events, kind)]
        read_ns = {_place(event): event["end_ns"] for event in events[of_kinds(events, *consumers)]}
        came_ns.append(receives["start_ns"])
        went_ns.append(
            np.array([read_ns.get(_place(event), event["end_ns"]) for event in receives], np.int64)
        )
        sizes.append(receives["moved_bytes"])
    moved = np.concatenate(sizes)
    came = _held(np.concatenate(came_ns), moved, times_ns)
    held: np.ndarray = came - _held(np.concatenate(went_ns), moved, times_ns)
    return held


def _place(event: np.void) -> tuple[int, int, int, int]:
    return int(event["step"]), int(event["stage"]), int(event["direction"]), int(event["micro_batch"])


def _held(changed_ns: np.ndarray, sizes: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
    """Gives the sum of the sizes of what had changed by each time."""
    order = np.argsort(changed_ns, kind="stable")
    sums = np.concatenate([[0], np.cumsum(sizes[order])])
    found: np.ndarray = sums[np.searchsorted(changed_ns[order], times_ns, side="right")]
    return found

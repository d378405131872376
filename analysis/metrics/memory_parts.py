"""Memory by what it holds: the buffers of messages among a rank's bytes, from the events of a trace."""

from __future__ import annotations

import numpy as np

from analysis.metrics.events import of_kinds

CONSUMERS = {"RECV_F": ("F",), "RECV_B": ("B", "I")}
PLACE = ("step", "stage", "direction", "micro_batch")


def buffer_bytes(events: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
    """Return the bytes of boundary buffers that a rank holds just after each of `times_ns`.

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
        came_ns.append(receives["start_ns"])
        went_ns.append(_read_ns(receives, events[of_kinds(events, *consumers)]))
        sizes.append(receives["moved_bytes"])
    moved = np.concatenate(sizes)
    came = _held(np.concatenate(came_ns), moved, times_ns)
    held: np.ndarray = came - _held(np.concatenate(went_ns), moved, times_ns)
    return held


def _read_ns(receives: np.ndarray, readers: np.ndarray) -> np.ndarray:
    """Return the end of each receive's reader, of the last where there are several; its own end without one."""
    both = np.concatenate([readers, receives])
    keys = np.zeros(len(both), np.int64)
    for name in PLACE:
        values = both[name].astype(np.int64)
        keys = keys * (values.max(initial=0) + 2) + values + 1
    places = np.unique(keys, return_inverse=True)[1]
    end_ns = np.full(int(places.max(initial=0)) + 1, -1, np.int64)
    end_ns[places[: len(readers)]] = readers["end_ns"]
    found = end_ns[places[len(readers) :]]
    read_ns: np.ndarray = np.where(found < 0, receives["end_ns"], found)
    return read_ns


def _held(changed_ns: np.ndarray, sizes: np.ndarray, times_ns: np.ndarray) -> np.ndarray:
    """Return the sum of the sizes of what had changed by each time."""
    order = np.argsort(changed_ns, kind="stable")
    sums = np.concatenate([[0], np.cumsum(sizes[order])])
    found: np.ndarray = sums[np.searchsorted(changed_ns[order], times_ns, side="right")]
    return found

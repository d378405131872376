"""Clocks: how far a rank's monotonic clock is from rank 0's."""

from __future__ import annotations

import time

from gems.engine.transport import Comm

ROUNDS = 10


def measure_offset(comm: Comm) -> tuple[int, int]:
    """Gives (offset_ns, error_ns) of this rank's clock against rank 0's; collective.

    Rank 0 asks each rank for its time, and the fastest of some rounds counts (Cristian 1989): the answer was made
    within that round trip, so half of it bounds the error.
    """
    if comm.rank == 0:
        for rank in range(1, comm.size):
            best = (1 << 62, 0)
            for _ in range(ROUNDS):
                asked = time.perf_counter_ns()
                comm.send(None, rank, 1)
                theirs = comm.recv(source=rank, tag=1)
                trip = time.perf_counter_ns() - asked
                best = min(best, (trip, theirs - (asked + trip // 2)))
            comm.send(best, rank, 2)
        return 0, 0
    for _ in range(ROUNDS):
        comm.recv(source=0, tag=1)
        comm.send(time.perf_counter_ns(), 0, 1)
    trip, offset = comm.recv(source=0, tag=2)
    return int(offset), int(trip) // 2

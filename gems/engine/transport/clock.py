"""Clocks: how far a rank's monotonic clock is from rank 0's."""

from __future__ import annotations

import time
from dataclasses import dataclass

from gems.engine.transport.mpi import Comm

ROUNDS = 10
POLL_S = 0.001


@dataclass(frozen=True, slots=True)
class Offset:
    """This rank's clock minus rank 0's, measured when this rank's clock read `at_ns`."""

    offset_ns: int
    error_ns: int
    at_ns: int

    def attributes(self, prefix: str) -> dict[str, int]:
        """Return the measurement as attributes of a trace part."""
        return {
            f"{prefix}_offset_ns": self.offset_ns,
            f"{prefix}_error_ns": self.error_ns,
            f"{prefix}_at_ns": self.at_ns,
        }


def measure_offset(comm: Comm) -> Offset:
    """Measure the offset of each rank's clock against rank 0's; collective.

    The fastest of some round trips counts, and half of it bounds the error (Cristian 1989). Measured at the start and
    at the end of a run, since clocks drift.
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
        return Offset(0, 0, time.perf_counter_ns())
    while not comm.Iprobe(source=0, tag=1):  # ranks that spin here would keep others from their cores
        time.sleep(POLL_S)
    for _ in range(ROUNDS):
        comm.recv(source=0, tag=1)
        comm.send(time.perf_counter_ns(), 0, 1)
    trip, offset = comm.recv(source=0, tag=2)
    return Offset(int(offset), int(trip) // 2, time.perf_counter_ns())

"""The hop: the cost of a message between neighbours on emulated ranks, measured by step code."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Any

from gems.engine.emulation.executor import EmulatedChannels, EmulatedDevice, EmulatedExecutor
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.mpi import Transport, allgather
from gems.engine.transport.polling import Waiter, WaitState
from gems.schedule.action import Kind
from gems.schedule.costs import uniform
from gems.schedule.families.one_f_one_b import layer_parallel
from gems.schedule.lower import add_transfers
from gems.schedule.registry import Request
from gems.trace import DTYPES, KINDS

COMPUTE_S = 0.001
NUM_HOPS = 84
MIN_TRIPS = 2
Times = dict[
    tuple[str, int], tuple[int, int]
]  # kind and micro-batch -> begin and end in ns, on a rank's own clock


class _EventTimes:
    """Collects the begin and end of each event of a rank."""

    def __init__(self, rank: int) -> None:
        self.rank = rank
        self.times: Times = {}

    def add(self, table: str, row: tuple[Any, ...]) -> None:
        event = dict(zip(DTYPES[table].names or (), row, strict=True))
        self.times[KINDS[event["kind"]], event["micro_batch"]] = event["start_ns"], event["end_ns"]


def measure_hop(
    transport: Transport,
    control: Transport,
    num_bytes: int,
    poll_interval_s: float,
    hang_timeout_s: float,
    wait_state: WaitState | None = None,
) -> float:
    """Return the seconds from the planned end of a compute to its data's arrival; collective.

    Micro-batches go down the ranks of `transport` and back one by one. A rank measures how long it
    waited for a gradient, and its neighbour measures how much of that was its own work, each by its
    own clock. The rest is two hops. The result is the median over neighbours and trips. It includes
    the delay with which a rank wakes up, as in any step.

    Returns:
        The same value on all ranks; 0 if there is only one rank.
    """
    num_ranks = transport.size
    rank = transport.rank
    if num_ranks == 1:
        return 0.0
    trips = max(MIN_TRIPS, NUM_HOPS // (2 * (num_ranks - 1)))
    chain = add_transfers(layer_parallel(Request(num_ranks, trips)))
    events = _EventTimes(rank)
    recorder = Recorder(events)
    channels = EmulatedChannels(
        chain, rank, (float(num_bytes),) * num_ranks, [transport] * 2, recorder
    )
    waiter = Waiter(channels.poll, poll_interval_s, hang_timeout_s, wait_state)
    costs = uniform(num_ranks, num_ranks, COMPUTE_S, COMPUTE_S, 0.0)
    executor = EmulatedExecutor(chain, rank, EmulatedDevice(costs), channels, waiter)
    control.barrier()
    executor.run(0)
    channels.close()
    return max(0.0, median(hop_times_s(allgather(transport.comm, events.times), trips)))


def hop_times_s(times: list[Times], trips: int) -> list[float]:
    """Return the seconds of a hop by pair of neighbours and by trip, from the ranks' events."""
    times_s = []
    for here, there in pairwise(times):
        for m in range(trips):
            away = here[Kind.RECV_B, m][1] - here[Kind.F, m][1]
            with_it = there[Kind.B, m][1] - there[Kind.RECV_F, m][1]
            times_s.append((away - with_it) / 2 * 1e-9)
    return times_s

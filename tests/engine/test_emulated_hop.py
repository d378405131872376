"""The hop between emulated ranks, from events on clocks that disagree."""

from __future__ import annotations

import pytest

from gems.engine.emulation.message_cost import hop_times_s, measure_hop
from gems.engine.transport.mpi import Transport
from gems.schedule.action import Kind

COMPUTE_NS = 1_000_000


def chain(hops_ns: list[int], ahead_ns: list[int], num_trips: int) -> list[dict]:
    """Events of a chain of ranks whose clocks are ahead by `ahead_ns`.

    Hop r is that between ranks r and r + 1.
    """
    num_ranks = len(hops_ns) + 1
    times: list[dict] = [{} for _ in range(num_ranks)]
    now = 0
    for m in range(num_trips):
        for kind, order in ((Kind.F, range(num_ranks)), (Kind.B, reversed(range(num_ranks)))):
            for rank in order:
                times[rank][kind, m] = now + ahead_ns[rank], now + COMPUTE_NS + ahead_ns[rank]
                now += COMPUTE_NS
                following = rank + 1 if kind is Kind.F else rank - 1
                if 0 <= following < num_ranks:
                    now += hops_ns[min(rank, following)]
                    receive = Kind.RECV_F if kind is Kind.F else Kind.RECV_B
                    times[following][receive, m] = 0, now + ahead_ns[following]
    return times


def test_each_hop_is_found_whatever_the_clocks_say():
    hops_ns = [400_000, 250_000, 900_000]
    times = chain(hops_ns, [0, 7_000_000_000, -3_000_000, 12], 2)
    assert hop_times_s(times, 2) == pytest.approx([hop * 1e-9 for hop in hops_ns for _ in range(2)])


@pytest.mark.timeout(30)
def test_a_pipeline_of_one_rank_has_no_hop(comm):
    transport = Transport(comm, 20.0)
    control = Transport(comm, 20.0)
    assert measure_hop(transport, control, 1000, 0.0001, 20.0) == 0.0

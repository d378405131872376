"""The speed probe, two ranks or more of `python -m gems.engine.transport.speed_probe RESULT_JSON [real|emulated]`.

Times messages by size inside a node and between nodes, all-reduces by size, and a compute that
should always take equally long. With `emulated` a message is a hop as emulated ranks see it. Rank 0
writes the timings, from which `gems.simulation.calibration` computes constants.
"""

from __future__ import annotations

import logging
import os
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from gems.engine.emulation.message_cost import measure_hop
from gems.engine.transport.environment import launched_rank
from gems.engine.transport.mpi import (
    Comm,
    Transport,
    abort,
    allgather,
    broadcast,
    library,
    ranks_here,
    world,
)
from gems.engine.transport.polling import poll_interval_s, reduce_timer_slack
from gems.errors import ConfigError
from gems.simulation.calibration import SCHEMA
from gems.utils.atomic_io import write_json
from gems.utils.logs import set_up_rank_logging

MESSAGE_BYTES = (1 << 10, 1 << 14, 1 << 17, 1 << 19, 1 << 20, 1 << 22)
SUM_BYTES = (1 << 12, 1 << 16, 1 << 20, 1 << 22)
TRIPS = 30
SUMS = 9
WARMUP = 2
COMPUTES = 60
COMPUTE_SIDE = 192
HANG_TIMEOUT_S = 120.0
KINDS = ("real", "emulated")
_log = logging.getLogger(__name__)


def main(argv: Sequence[str]) -> int:
    """Run one rank of the probe."""
    kind = argv[1] if len(argv) > 1 else "real"
    if len(argv) not in (1, 2) or kind not in KINDS:
        print(
            "usage: python -m gems.engine.transport.speed_probe RESULT_JSON [real|emulated]",
            file=sys.stderr,
        )
        return ConfigError.exit_code
    set_up_rank_logging(launched_rank())
    try:
        probe(Path(argv[0]), world(), kind)
    except BaseException as error:
        _log.error("the calibration failed on node %s: %s", os.uname().nodename, error)
        abort(1)
    return 0


def probe(result: Path, comm: Comm, kind: str) -> None:
    """Measure, and write the result; collective.

    Raises:
        ConfigError: a single rank, which has no peer.
    """
    if comm.size < 2:
        raise ConfigError("ranks", comm.size, "must be 2 or more to time messages")
    reduce_timer_slack()
    nodes: list[str] = allgather(comm, os.uname().nodename)
    messages = {level: _messages(comm, pair, kind) for level, pair in rank_pairs(nodes).items()}
    transport = Transport(comm, HANG_TIMEOUT_S)
    sums_s = [_median_s(partial(_sum, transport, size), SUMS) for size in SUM_BYTES]
    computes_s = allgather(comm, _computes())
    if comm.rank == 0:
        write_json(
            result,
            {
                "schema": SCHEMA,
                "kind": kind,
                "mpi": library(),
                "nodes": sorted(set(nodes)),
                "ranks_per_node": max(nodes.count(node) for node in nodes),
                "messages": messages,
                "sums": {"ranks": comm.size, "bytes": list(SUM_BYTES), "s": sums_s},
                "computes_s": [list(times) for times in zip(*computes_s, strict=True)],
            },
        )
    comm.Barrier()


def rank_pairs(nodes: Sequence[str]) -> dict[str, tuple[int, int]]:
    """Return two ranks of one node (level node) and two of different nodes (level link), if any."""
    pairs: dict[str, tuple[int, int]] = {}
    for rank, node in enumerate(nodes):
        first = nodes.index(node)
        if first != rank:
            pairs.setdefault("node", (first, rank))
        if node != nodes[0]:
            pairs.setdefault("link", (0, rank))
    return pairs


def _messages(comm: Comm, pair: tuple[int, int], kind: str) -> dict[str, list[Any]]:
    """Time messages between two ranks by size while the others wait.

    On emulated devices all neighbours take part.
    """
    if kind == "emulated":
        poll_s = poll_interval_s(ranks_here(comm))
        chain, control = (
            Transport(comm, HANG_TIMEOUT_S, spin_s=0.0, sleep_s=poll_s) for _ in range(2)
        )
        hop_times_s = [
            measure_hop(chain, control, size, poll_s, HANG_TIMEOUT_S) for size in MESSAGE_BYTES
        ]
        return {"bytes": list(MESSAGE_BYTES), "s": hop_times_s}
    transport = Transport.of_group(comm, int(comm.rank in pair), HANG_TIMEOUT_S)
    times_s: list[float] = []
    if comm.rank in pair:
        times_s = [_median_s(partial(_trip, transport, size), TRIPS) / 2 for size in MESSAGE_BYTES]
    return {"bytes": list(MESSAGE_BYTES), "s": broadcast(comm, times_s, pair[0])}


def _trip(transport: Transport, num_bytes: int) -> float:
    """Return the seconds of a round trip through new memory."""
    return transport.round_trip_s(np.zeros(num_bytes, np.uint8), np.empty(num_bytes, np.uint8))


def _sum(transport: Transport, num_bytes: int) -> float:
    """Sum numbers over all ranks, which begin together, and return the seconds of the slowest."""
    values = np.zeros(num_bytes // 4, np.float32)
    transport.barrier()
    begin = time.perf_counter()
    transport.sum_in_place(values)
    spent_s: list[float] = allgather(transport.comm, time.perf_counter() - begin)
    return max(spent_s)


def _median_s(measure: Callable[[], float], times: int) -> float:
    return statistics.median([measure() for _ in range(WARMUP + times)][WARMUP:])


def _computes() -> list[float]:
    """Time the same matrix products again and again."""
    matrix = np.full((COMPUTE_SIDE, COMPUTE_SIDE), 1e-3)
    times_s = []
    for _ in range(WARMUP + COMPUTES):
        begin = time.perf_counter()
        for _ in range(4):
            matrix @ matrix
        times_s.append(time.perf_counter() - begin)
    return times_s[WARMUP:]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""The links between the ranks of a run, by its machine."""

from __future__ import annotations

from dataclasses import replace

from gems.config.schema import GLOO, RunSpec
from gems.schedule.costs import Network

STAGED_PIECE_BYTES = (
    2**22
)  # of a message through host memory: .1 ms on a link, and near its full rate


def network_in_units(run: RunSpec) -> Network:
    """Return the links of the configured machine, in units of time.

    Messages of a GPU that go through host memory (`machine.transport=host` or gloo) are copied
    there and back besides.
    """
    machine = run.machine
    unit_s = run.cost.unit_s
    link = run.cost.link / run.parallel.strips
    copies: tuple[float, ...] = ()
    if machine.device == "cuda" and machine.transport in ("host", GLOO):
        copies = 1.0 / (machine.d2h_bytes_per_s * unit_s), 1.0 / (machine.h2d_bytes_per_s * unit_s)

    def per_byte(bytes_per_s: float | None) -> float:
        return 0.0 if bytes_per_s is None else 1.0 / bytes_per_s / unit_s

    return Network(
        latency=link + machine.link_latency_s / unit_s,
        per_byte=per_byte(machine.link_bytes_per_s),
        ranks_per_node=machine.ranks_per_node,
        node_latency=link + machine.node_latency_s / unit_s,
        node_per_byte=per_byte(machine.node_bytes_per_s),
        has_contention=machine.contention,
        copies=copies,
        piece_bytes=float(STAGED_PIECE_BYTES),
    )


def network_in_seconds(run: RunSpec) -> Network:
    """Return the links of the configured machine in seconds, whatever the unit of the costs is."""
    return network_in_units(replace(run, cost=replace(run.cost, unit_s=1.0, link=0.0)))

"""The links between ranks, for each machine."""

from __future__ import annotations

from gems.config.cluster import GLOO
from gems.config.schema import MachineConfig
from gems.schedule.costs import Network

# chunk of a message through host memory: 0.1 ms on a link, and near the link's full rate
STAGED_PIECE_BYTES = 2**22


def machine_links(machine: MachineConfig) -> Network:
    """Return the links of a machine, in seconds.

    Messages of a GPU that pass through host memory (`machine.transport=host` or gloo) are also
    copied to it and back.
    """
    copies: tuple[float, ...] = ()
    if machine.device == "cuda" and machine.transport in ("host", GLOO):
        copies = 1.0 / machine.d2h_bytes_per_s, 1.0 / machine.h2d_bytes_per_s

    def per_byte(bytes_per_s: float | None) -> float:
        return 0.0 if bytes_per_s is None else 1.0 / bytes_per_s

    return Network(
        latency=machine.link_latency_s,
        per_byte=per_byte(machine.link_bytes_per_s),
        ranks_per_node=machine.ranks_per_node,
        node_latency=machine.node_latency_s,
        node_per_byte=per_byte(machine.node_bytes_per_s),
        has_contention=machine.contention,
        copies=copies,
        piece_bytes=float(STAGED_PIECE_BYTES),
    )

"""The time of an all-reduce by its size and by how its ranks lie over the nodes: rings, flat or in two levels."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from gems.schedule.costs import Network


@dataclass(frozen=True, slots=True)
class AllReduce:
    """What an all-reduce takes, in the network's unit of time.

    `time` is all of it where nothing else is under way, `link_time` the part in which it fills the links between nodes
    that it uses; 0 where its ranks lie on one node.
    """

    algorithm: str
    time: float
    link_time: float


NONE = AllReduce("none", 0.0, 0.0)


def all_reduce(network: Network, group: Sequence[int], num_bytes: float) -> AllReduce:
    """Return the faster of the two rings over the ranks of `group`, as communication libraries choose by size.

    `group` has ranks as the network counts them, `num_bytes` is of each rank's message.
    """
    if len(group) < 2:
        return NONE
    return min((form(network, group, num_bytes) for form in (ring, hierarchical)), key=lambda each: each.time)


def ring(network: Network, group: Sequence[int], num_bytes: float) -> AllReduce:
    """Return one ring through all n ranks (Patarasuk and Yuan, JPDC 2009): 2 (n - 1) steps of 1 / n of the bytes.

    The ranks of a node stand beside each other in it, so that each node's link carries one message a step. Each step
    takes as long as the slowest link of the ring.
    """
    num = len(group)
    far = _farthest(network, group)
    latency, transmission = network.parts(group[0], far, num_bytes)
    crosses = network.node_of(group[0]) != network.node_of(far)
    sent = 2 * (num - 1) / num * transmission
    return AllReduce("ring", 2 * (num - 1) * latency + sent, sent if crosses else 0.0)


def hierarchical(network: Network, group: Sequence[int], num_bytes: float) -> AllReduce:
    """Return a ring in each node, rings between the nodes, and the ring in each node again.

    A node of k ranks scatters its sums in k - 1 steps, so that each rank holds 1 / k of them; the k rings between the
    m nodes take 2 (m - 1) steps and share the node's link, or have a link each where there is no contention; then
    the parts are gathered in k - 1 steps. The node with the most ranks is the slowest inside, the one with the
    fewest has the largest parts.
    """
    on_node = Counter(network.node_of(rank) for rank in group)
    most, fewest, num_nodes = max(on_node.values()), min(on_node.values()), len(on_node)
    inside = 0.0
    if most > 1:
        # Any two ranks of one node: the first of the fullest, and itself.
        here = next(rank for rank in group if on_node[network.node_of(rank)] == most)
        latency, transmission = network.parts(here, here, num_bytes)
        inside = 2 * (most - 1) * (latency + transmission / most)
    if num_nodes < 2:
        return AllReduce("hierarchical", inside, 0.0)
    far = _farthest(network, group)
    latency, transmission = network.parts(group[0], far, num_bytes)
    share = 1 if network.has_contention else fewest
    sent = 2 * (num_nodes - 1) / num_nodes * transmission / share
    return AllReduce("hierarchical", inside + 2 * (num_nodes - 1) * latency + sent, sent)


def _farthest(network: Network, group: Sequence[int]) -> int:
    """Return a rank of the group on another node than its first one, where there is one."""
    first = network.node_of(group[0])
    return next((rank for rank in group if network.node_of(rank) != first), group[-1])

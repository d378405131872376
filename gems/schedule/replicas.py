"""Replicas of a pipeline: the slowest of them, and the all-reduce of their gradients."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from gems.schedule.costs import Network, StageCosts
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Pace, Simulation, simulate


def with_all_reduce(
    costs: StageCosts, placement: Placement, links: Network, num_replicas: int
) -> StageCosts:
    """Return costs that include the all-reduce of each stage's gradients.

    It takes no time if `param_bytes` are unknown.
    """
    if not costs.param_bytes:
        return costs
    time = [0.0] * placement.num_stages
    link_time = [0.0] * placement.num_stages
    for rank in range(placement.num_ranks):
        stages = sorted({stage for _, stage in placement.stages_on(rank)})
        group = placement.reduce_group(rank, num_replicas)
        for fused in [[stage] for stage in stages] if placement.sums_by_stage else [stages]:
            cost = all_reduce(links, group, sum(costs.param_bytes[stage] for stage in fused))
            time[fused[0]], link_time[fused[0]] = cost.time, cost.link_time
    return replace(costs, reduce=tuple(time), reduce_link=tuple(link_time))


def slowest_replica(
    schedule: Schedule,
    costs: StageCosts,
    links: Network,
    paces: Sequence[Pace],
    cap: float | None = None,
) -> tuple[Network, Simulation]:
    """Simulate one step of each replica, one per entry of `paces`, and return the slowest.

    The others wait for it. Replicas differ only in the distribution of their ranks over the nodes
    and in their pace.
    """
    variants = dict.fromkeys(
        zip(_layouts(links, schedule.num_ranks, len(paces)), paces, strict=True)
    )
    steps = ((variant, simulate(schedule, costs, variant, cap, pace)) for variant, pace in variants)
    return max(steps, key=lambda pair: pair[1].span)


def _layouts(links: Network, num_ranks: int, num_replicas: int) -> list[Network]:
    """Return the network of each replica, by the distribution of its ranks over the nodes."""
    per_node = links.ranks_per_node
    if per_node is None:
        return [links] * num_replicas
    known: dict[tuple[int, ...], Network] = {}
    networks = []
    for replica in range(num_replicas):
        first = replica * num_ranks % per_node
        nodes = tuple((first + rank) // per_node for rank in range(num_ranks))
        networks.append(known.setdefault(nodes, replace(links, first_rank=first)))
    return networks


@dataclass(frozen=True, slots=True)
class AllReduce:
    """The cost of an all-reduce, in the network's unit of time.

    `time` is the total if nothing else is under way. `link_time` is the part in which it fills the
    links between nodes that it uses; it is 0 if all ranks are on one node.
    """

    algorithm: str
    time: float
    link_time: float


def all_reduce(network: Network, group: Sequence[int], num_bytes: float) -> AllReduce:
    """Return the fastest all-reduce over the ranks of `group`.

    The candidates are rings and trees; communication libraries choose among them by size, too.
    `group` has ranks as the network numbers them; `num_bytes` is the size of each rank's message.
    """
    if len(group) < 2:
        return AllReduce("none", 0.0, 0.0)
    return min((form(network, group, num_bytes) for form in FORMS), key=lambda cost: cost.time)


def ring(network: Network, group: Sequence[int], num_bytes: float) -> AllReduce:
    """Return the cost of one ring through all n ranks (Patarasuk and Yuan, JPDC 2009).

    It takes 2 (n - 1) steps with 1 / n of the bytes each. The ranks of a node are neighbours in the
    ring, so that each node's link carries one message per step. Each step takes as long as the
    slowest link of the ring.
    """
    num = len(group)
    far = _farthest(network, group)
    latency, transmission = network.parts(group[0], far, num_bytes)
    crosses = network.node_of(group[0]) != network.node_of(far)
    sent = 2 * (num - 1) / num * transmission
    return AllReduce("ring", 2 * (num - 1) * latency + sent, sent if crosses else 0.0)


def hierarchical(network: Network, group: Sequence[int], num_bytes: float) -> AllReduce:
    """Return the cost of rings within nodes, then between nodes, then within nodes again.

    A node of k ranks scatters its sums in k - 1 steps, so that each rank holds 1 / k of them. The k
    rings between the m nodes take 2 (m - 1) steps. They share the node's link, or have a link each
    if there is no contention. Then the parts are gathered in k - 1 steps. The node with the most
    ranks is the slowest inside; the node with the fewest ranks has the largest parts.
    """
    on_node = Counter(network.node_of(rank) for rank in group)
    most = max(on_node.values())
    fewest = min(on_node.values())
    num_nodes = len(on_node)
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


def trees(network: Network, group: Sequence[int], num_bytes: float) -> AllReduce:
    """Return the cost of two binary trees over the nodes, with a chain of ranks in each node.

    Sums go up the trees and down again in pieces, so that the slowest link sets the pace: each link
    carries all bytes twice. A node is an inner node of one tree and a leaf of the other. This needs
    few latencies, but more bytes than rings. Source: Sanders et al. 2009; NCCL 2.4.
    """
    on_node = Counter(network.node_of(rank) for rank in group)
    most = max(on_node.values())
    fewest = min(on_node.values())
    num_nodes = len(on_node)
    here = next(rank for rank in group if on_node[network.node_of(rank)] == most)
    latency, transmission = network.parts(here, here, num_bytes) if most > 1 else (0.0, 0.0)
    depth = 2 * (most - 1) * latency
    sent = 0.0
    if num_nodes > 1:
        latency, between = network.parts(group[0], _farthest(network, group), num_bytes)
        depth += 2 * math.ceil(math.log2(num_nodes)) * latency
        sent = 2 * between / (1 if network.has_contention else fewest)
    return AllReduce("trees", depth + max(2 * transmission, sent), sent)


FORMS = (ring, hierarchical, trees)


def _farthest(network: Network, group: Sequence[int]) -> int:
    """Return a rank of the group on another node than its first rank, if there is one."""
    first = network.node_of(group[0])
    return next((rank for rank in group if network.node_of(rank) != first), group[-1])

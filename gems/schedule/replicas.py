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
    """Return costs with the all-reduce of each stage's gradients.

    It takes no time unless `param_bytes` are known.
    In two directions, and in a graph of stages, one all-reduce is that of all stages of a rank.
    """
    if not costs.param_bytes:
        return costs
    time = [0.0] * placement.num_stages
    link_time = [0.0] * placement.num_stages
    for rank in range(placement.num_ranks):
        stages = sorted({stage for _, stage in placement.stages_on(rank)})
        group = placement.reduce_group(rank, num_replicas)
        for fused in [[stage] for stage in stages] if placement.is_chain_one_way else [stages]:
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
    """Simulate one step of the replicas, one for each of `paces`, and return the slowest, for which the others wait.

    Replicas differ only in how their ranks lie over the nodes and in their pace.
    """
    variants = dict.fromkeys(
        zip(_layouts(links, schedule.num_ranks, len(paces)), paces, strict=True)
    )
    steps = ((each, simulate(schedule, costs, each, cap, pace)) for each, pace in variants)
    return max(steps, key=lambda pair: pair[1].span)


def _layouts(links: Network, num_ranks: int, num_replicas: int) -> list[Network]:
    """Return the network of each replica of `num_ranks` ranks, as these lie over the nodes."""
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
    """What an all-reduce takes, in the network's unit of time.

    `time` is all of it where nothing else is under way, `link_time` the part in which it fills the
    links between nodes that it uses; 0 where its ranks lie on one node.
    """

    algorithm: str
    time: float
    link_time: float


def all_reduce(network: Network, group: Sequence[int], num_bytes: float) -> AllReduce:
    """Return the fastest of rings and trees over the ranks of `group`, as communication libraries choose by size.

    `group` has ranks as the network counts them, `num_bytes` is of each rank's message.
    """
    if len(group) < 2:
        return AllReduce("none", 0.0, 0.0)
    return min((form(network, group, num_bytes) for form in FORMS), key=lambda each: each.time)


def ring(network: Network, group: Sequence[int], num_bytes: float) -> AllReduce:
    """Return one ring through all n ranks (Patarasuk and Yuan, JPDC 2009).

    2 (n - 1) steps of 1 / n of the bytes.
    The ranks of a node stand beside each other in it, so that each node's link carries one message
    a step. Each step takes as long as the slowest link of the ring.
    """
    num = len(group)
    far = _farthest(network, group)
    latency, transmission = network.parts(group[0], far, num_bytes)
    crosses = network.node_of(group[0]) != network.node_of(far)
    sent = 2 * (num - 1) / num * transmission
    return AllReduce("ring", 2 * (num - 1) * latency + sent, sent if crosses else 0.0)


def hierarchical(network: Network, group: Sequence[int], num_bytes: float) -> AllReduce:
    """Return a ring in each node, rings between the nodes, and the ring in each node again.

    A node of k ranks scatters its sums in k - 1 steps, so that each rank holds 1 / k of them; the k
    rings between the m nodes take 2 (m - 1) steps and share the node's link, or have a link each
    where there is no contention; then the parts are gathered in k - 1 steps. The node with the most
    ranks is the slowest inside, the one with the fewest has the largest parts.
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
    """Return two binary trees over the nodes, with a chain through the ranks of each (Sanders et al. 2009; NCCL 2.4).

    Sums go up the trees and down again in pieces, so that the slowest link sets the pace: each link
    carries all bytes twice. A node has an inner place in one tree and is a leaf of the other. Few
    latencies, and more bytes than rings.
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
    """Return a rank of the group on another node than its first one, where there is one."""
    first = network.node_of(group[0])
    return next((rank for rank in group if network.node_of(rank) != first), group[-1])

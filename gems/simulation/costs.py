"""What a run's schedule costs by its configuration: compute, links, pace, and all-reduces; and one step."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

from gems.config.schema import GLOO, RunSpec
from gems.errors import ConfigError
from gems.partition.operator_placement import stage_costs_of
from gems.profile.spans import Spans
from gems.schedule.costs import DepthCosts, Network, StageCosts
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Pace, Simulation, rank_times, simulate
from gems.schedule.strips import strip_costs

STAGED_PIECE_BYTES = 2**22  # of a message through host memory: .1 ms on a link, and near its full rate


def activation_cap(run: RunSpec) -> float | None:
    """Return the cap in units of one micro-batch's activations on the heaviest of P equal parts, None without one."""
    schedule = run.schedule
    if schedule.activation_cap_bytes is None:
        return schedule.activation_cap
    return schedule.activation_cap_bytes / run.cost.activation_bytes


def depth_costs(run: RunSpec) -> DepthCosts:
    """Return the costs of the model over its depth, in units."""
    cost = run.cost
    return DepthCosts(
        num_ranks=run.parallel.partitions, forward=cost.forward, input_grad=cost.input_grad,
        weight_grad=cost.weight_grad, recompute=cost.recompute, copy=cost.offload,
        boundary_bytes=float(cost.boundary_bytes), times=tuple(cost.times), activations=tuple(cost.activations),
        given=StageCosts.from_json(cost.stages) if cost.stages else None,
    )  # fmt: skip


def schedule_costs(run: RunSpec, placement: Placement) -> StageCosts:
    """Return the costs of a schedule's stages in units (of a strip, where parallel.strips makes several).

    They have the all-reduce of the gradients. Without `cost.param_bytes` that takes no time, so that abstract costs are
    those of the pipeline alone.

    Raises:
        ConfigError: `cost.stages` has other stages.
    """
    costs = depth_costs(run)
    if costs.given is not None and costs.given.num_stages != placement.num_stages:
        raise ConfigError(
            "cost.stages", f"of {costs.given.num_stages} stages",
            f"must be of {placement.num_stages}, the stages of schedule={run.schedule.name}",
        )  # fmt: skip
    stages = costs.of(placement) if placement.feeders is None else stage_costs_of(run)
    stages = strip_costs(stages, run.parallel.strips)
    sizes = [gradient_bytes(run, placement) or None] * placement.num_stages
    return _with_all_reduce(run, stages, placement, network_in_units(run), sizes)


def gradient_bytes(run: RunSpec, placement: Placement) -> float:
    """Return the bytes of a stage's gradients: its share of the model."""
    return run.cost.param_bytes * placement.num_ranks / placement.num_stages


def with_all_reduce(
    run: RunSpec, costs: StageCosts, placement: Placement, boundaries: tuple[int, ...], spans: Spans
) -> StageCosts:
    """Return costs in seconds with the all-reduce of the parameters that a partition puts on each rank."""
    sizes = [float(spans.params[first, end]) for first, end in itertools.pairwise(boundaries)]
    return _with_all_reduce(run, costs, placement, network_in_seconds(run), sizes)


def _with_all_reduce(
    run: RunSpec, costs: StageCosts, placement: Placement, links: Network, sizes: Sequence[float | None]
) -> StageCosts:
    """Return costs with the all-reduce of each stage, whose bytes are in `sizes`; None for none.

    In two directions, and in a graph of stages, one all-reduce is that of all stages of a rank.
    """
    time, link_time = [0.0] * placement.num_stages, [0.0] * placement.num_stages
    for rank in range(placement.num_ranks):
        stages = sorted({stage for _, stage in placement.stages_on(rank)})
        for fused in [[stage] for stage in stages] if placement.is_chain_one_way else [stages]:
            known = [size for size in (sizes[stage] for stage in fused) if size is not None]
            group = placement.reduce_group(rank, run.parallel.replicas) if known else ()
            cost = all_reduce(links, group, sum(known))
            time[fused[0]], link_time[fused[0]] = cost.time, cost.link_time
    return replace(costs, reduce=tuple(time), reduce_link=tuple(link_time))


def network_in_units(run: RunSpec) -> Network:
    """Return the links of the configured machine, in units of time.

    Messages of a GPU that go through host memory (`machine.transport=host` or gloo) are copied there and back besides.
    """
    machine, unit_s = run.machine, run.cost.unit_s
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


def replica_pace(run: RunSpec, replica: int) -> Pace:
    """Return what disturbs one replica of the pipeline: its slow rank, if it has one, and the time to read inputs."""
    machine, num_ranks = run.machine, run.parallel.partitions
    slow = machine.slow_rank
    is_here = slow is not None and slow // num_ranks == replica
    slow_rank = slow % num_ranks if slow is not None and is_here else None
    return Pace(slow_rank, machine.slowdown, run.cost.input_load / run.parallel.strips)


def simulate_step(run: RunSpec, schedule: Schedule) -> tuple[Network, Simulation]:
    """Simulate one step of a run without jitter, in units; return the network that it was simulated on too."""
    paces = [replica_pace(run, replica) for replica in range(run.parallel.replicas)]
    costs, cap = schedule_costs(run, schedule.placement), activation_cap(run)
    return slowest_replica(schedule, costs, network_in_units(run), paces, cap)


def slowest_replica(
    schedule: Schedule, costs: StageCosts, links: Network, paces: Sequence[Pace], cap: float | None = None
) -> tuple[Network, Simulation]:
    """Simulate one step of the replicas, one for each of `paces`, and return the slowest, for which the others wait.

    Replicas differ only in how their ranks lie over the nodes and in their pace.
    """
    variants = dict.fromkeys(zip(_layouts(links, schedule.num_ranks, len(paces)), paces, strict=True))
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


def parts_s(schedule: Schedule, costs: StageCosts, step: Simulation, links: Network) -> dict[str, float]:
    """Return the seconds of a simulated step by what a rank does, means over the ranks, which add up to the step."""
    times = rank_times(schedule, costs, step, links)
    useful, recompute, link, reduce = (
        fmean(getattr(time, name) for time in times) for name in ("useful", "recompute", "link", "reduce")
    )
    waiting = fmean(time.idle + time.step for time in times)
    return {"compute": useful, "recompute": recompute, "messages": link, "all_reduce": reduce, "waiting": waiting}


@dataclass(frozen=True, slots=True)
class AllReduce:
    """What an all-reduce takes, in the network's unit of time.

    `time` is all of it where nothing else is under way, `link_time` the part in which it fills the links between nodes
    that it uses; 0 where its ranks lie on one node.
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


def trees(network: Network, group: Sequence[int], num_bytes: float) -> AllReduce:
    """Return two binary trees over the nodes, with a chain through the ranks of each (Sanders et al. 2009; NCCL 2.4).

    Sums go up the trees and down again in pieces, so that the slowest link sets the pace: each link carries all bytes
    twice. A node has an inner place in one tree and is a leaf of the other. Few latencies, and more bytes than rings.
    """
    on_node = Counter(network.node_of(rank) for rank in group)
    most, fewest, num_nodes = max(on_node.values()), min(on_node.values()), len(on_node)
    here = next(rank for rank in group if on_node[network.node_of(rank)] == most)
    latency, transmission = network.parts(here, here, num_bytes) if most > 1 else (0.0, 0.0)
    depth, sent = 2 * (most - 1) * latency, 0.0
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

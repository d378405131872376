"""What a run's schedule costs by its configuration: compute, links, pace, and all-reduces.

And one step.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.partition.links import network_in_units
from gems.partition.operator_placement import stage_costs_of
from gems.schedule.costs import DepthCosts, Network, StageCosts
from gems.schedule.placement import Placement
from gems.schedule.replicas import slowest_replica, with_all_reduce
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import EVEN, Pace, Simulation, rank_times
from gems.schedule.strips import strip_costs
from gems.simulation.model_costs import PROFILE


def activation_cap(run: RunSpec) -> float | None:
    """Return the cap in units of one micro-batch's activations on the heaviest of P equal parts, None without one."""
    schedule = run.schedule
    if schedule.activation_cap_bytes is None:
        return schedule.activation_cap
    return schedule.activation_cap_bytes / run.cost.activation_bytes


def counts_units(run: RunSpec) -> bool:
    """Return whether a run's times are in units that stand for no seconds.

    Configured costs without cost.unit_s.
    """
    is_by_layers = run.cost.name == PROFILE or run.memory.name != "keep"
    return not is_by_layers and run.cost.unit_s == 1.0 and run.machine.kind != "emulated"


def depth_costs(run: RunSpec) -> DepthCosts:
    """Return the costs of the model over its depth, in units."""
    cost = run.cost
    return DepthCosts(
        num_ranks=run.parallel.partitions,
        forward=cost.forward,
        input_grad=cost.input_grad,
        weight_grad=cost.weight_grad,
        recompute=cost.recompute,
        copy=cost.offload,
        boundary_bytes=float(cost.boundary_bytes),
        times=tuple(cost.times),
        activations=tuple(cost.activations),
        given=StageCosts.from_json(cost.stages) if cost.stages else None,
    )


def schedule_costs(run: RunSpec, placement: Placement) -> StageCosts:
    """Return the costs of a schedule's stages in units (of a strip, where parallel.strips makes several).

    They have the all-reduce of each stage's gradients, of equal stages unless the costs name their
    bytes. Without `cost.param_bytes` that takes no time, so that abstract costs are those of the
    pipeline alone.

    Raises:
        ConfigError: `cost.stages` has other stages.
    """
    costs = depth_costs(run)
    if costs.given is not None and costs.given.num_stages != placement.num_stages:
        raise ConfigError(
            "cost.stages",
            f"of {costs.given.num_stages} stages",
            f"must be of {placement.num_stages}, the stages of schedule={run.schedule.name}",
        )
    stages = costs.of(placement) if placement.feeders is None else stage_costs_of(run)
    stages = strip_costs(stages, run.parallel.strips)
    if run.cost.param_bytes and not stages.param_bytes:
        share = run.cost.param_bytes * placement.num_ranks / placement.num_stages
        stages = replace(stages, param_bytes=(share,) * placement.num_stages)
    return with_all_reduce(stages, placement, network_in_units(run), run.parallel.replicas)


def replica_pace(run: RunSpec, replica: int) -> Pace:
    """Return what disturbs one replica of the pipeline.

    Its slow rank, if it has one, and the time to read inputs.
    """
    machine = run.machine
    num_ranks = run.parallel.partitions
    slow = machine.slow_rank
    is_here = slow is not None and slow // num_ranks == replica
    slow_rank = slow % num_ranks if slow is not None and is_here else None
    return Pace(slow_rank, machine.slowdown, run.cost.input_load / run.parallel.strips)


def replica_paces(run: RunSpec) -> tuple[Pace, ...]:
    """Return what disturbs each replica."""
    return tuple(replica_pace(run, replica) for replica in range(run.parallel.replicas))


def simulate_step(run: RunSpec, schedule: Schedule) -> tuple[Network, Simulation]:
    """Simulate one step of a run without jitter, in units.

    Return the network that it was simulated on too.
    """
    costs = schedule_costs(run, schedule.placement)
    cap = activation_cap(run)
    return slowest_replica(schedule, costs, network_in_units(run), replica_paces(run), cap)


def parts_s(
    schedule: Schedule, costs: StageCosts, step: Simulation, links: Network, pace: Pace = EVEN
) -> dict[str, float]:
    """Return the seconds of a simulated step by what a rank does, means over the ranks, which add up to the step."""
    times = rank_times(schedule, costs, step, links, pace)
    useful, recompute, link, reduce = (
        fmean(getattr(time, name) for time in times)
        for name in ("useful", "recompute", "link", "reduce")
    )
    waiting = fmean(time.idle + time.input + time.step for time in times)
    return {
        "compute": useful,
        "recompute": recompute,
        "messages": link,
        "all_reduce": reduce,
        "waiting": waiting,
    }

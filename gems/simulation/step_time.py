"""A step in seconds: the all-reduce of a cut, the simulation of a pipeline as it lies over the nodes, and where its time goes."""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean

from gems.config.schema import RunSpec
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.stage_storages import profile_storages
from gems.profile.spans import Spans
from gems.schedule.costs import Network, StageCosts
from gems.schedule.placement import Placement
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, rank_times, simulate
from gems.simulation.all_reduce import all_reduce
from gems.simulation.build import layouts, network_in_seconds


def with_reduction(
    run: RunSpec, costs: StageCosts, placement: Placement, boundaries: tuple[int, ...], spans: Spans
) -> StageCosts:
    """Return costs in seconds with the gradients' all-reduce among them, of the parameters that a cut puts on each rank."""
    network = network_in_seconds(run)
    time, link_time = [0.0] * placement.num_stages, [0.0] * placement.num_stages
    for rank in range(placement.num_ranks):
        stages = {stage for _, stage in placement.stages_on(rank)}
        num_bytes = sum(float(spans.params[boundaries[stage], boundaries[stage + 1]]) for stage in stages)
        found = all_reduce(network, placement.reduce_group(rank, run.parallel.replicas), num_bytes)
        stage = placement.lowest_stage(rank)
        time[stage], link_time[stage] = found.time, found.link_time
    return replace(costs, reduce=tuple(time), reduce_link=tuple(link_time))


def parts_s(schedule: Schedule, costs: StageCosts, played: Simulation, network: Network) -> dict[str, float]:
    """Return the seconds of a simulated step by what a rank does, means over the ranks, which add up to the step."""
    times = rank_times(schedule, costs, played, network)
    return {
        "compute": fmean(time.useful for time in times),
        "recompute": fmean(time.recompute for time in times),
        "messages": fmean(time.link for time in times),
        "all_reduce": fmean(time.reduce for time in times),
        "waiting": fmean(time.idle + time.step for time in times),
    }


def slowest(run: RunSpec, schedule: Schedule, costs: StageCosts) -> tuple[Network, Simulation]:
    """Simulate a pipeline as it lies over the nodes, the slowest way of its replicas, which are alike but for that."""
    lying = layouts(network_in_seconds(run), schedule.num_ranks, run.parallel.replicas)
    networks = dict.fromkeys(lying)
    return max(((each, simulate(schedule, costs, each)) for each in networks), key=lambda pair: pair[1].span)


def in_run(run: RunSpec, case: MemoryCase, outcome: PlanOutcome) -> PlanOutcome:
    """Return what a memory plan does as the run meets it: policies plan for one replica, which reduces nothing."""
    schedule, spans = outcome.schedule, profile_storages(case.profile).spans
    costs = with_reduction(run, outcome.costs, schedule.placement, case.boundaries, spans)
    return replace(outcome, costs=costs, played=slowest(run, schedule, costs)[1])

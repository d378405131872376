"""The program of a run: from a resolved configuration to the one list of actions, its costs and its links."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.partition.operator_placement import placed_on, stage_costs_of
from gems.schedule import CAPPED, FAMILIES, FROM_FILE, PLACED
from gems.schedule.costs import DepthCosts, Network, StageCosts
from gems.schedule.families.published_schedules import published_schedules
from gems.schedule.formats.schedule_json import from_json, to_json
from gems.schedule.formats.torch_csv import from_torch_csv
from gems.schedule.lower import compute_only, lower
from gems.schedule.pace import Pace
from gems.schedule.placement import Placement
from gems.schedule.request import Request
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate
from gems.schedule.synthesis import capped
from gems.schedule.synthesis.solver import IS_INSTALLED
from gems.schedule.validate import validate
from gems.simulation.all_reduce import NONE, AllReduce, all_reduce
from gems.utils.cache import cached


def compute_schedule_of(spec: RunSpec) -> Schedule:
    """Return the compute-only schedule of a resolved run: generated, found by search (or in the cache), or read.

    Raises:
        ConfigError: counts or a cap that the family cannot serve, or a file that holds no such schedule.
        ScheduleError: a file's schedule that would not run.
    """
    name = spec.schedule.name
    if name == FROM_FILE:
        return _read(spec)
    if name == PLACED:
        return placed_on(spec, network_in_seconds(spec))
    if name == CAPPED:
        return from_json(found_of(spec)["schedule"])
    return FAMILIES[name].build(request_of(spec))


def found_of(spec: RunSpec) -> dict[str, Any]:
    """Return what the search of schedule=capped found, from the cache where it has been done.

    The dictionary holds `schedule` (as JSON), `bound` (the efficiency that no schedule exceeds under the cap),
    `placement`, `method` and `candidates`.

    Raises:
        ConfigError: a cap that no placement can keep.
    """
    request = request_of(spec)

    def search() -> dict[str, Any]:
        found = capped(request, published_schedules(request))
        return {
            "schedule": to_json(found.schedule), "bound": found.bound, "placement": found.placement,
            "method": found.method, "candidates": found.candidates,
        }  # fmt: skip

    return cached(spec.cache_dir, "schedule", repr((request, IS_INSTALLED)), search)


def schedule_of(spec: RunSpec) -> Schedule:
    """Return the lowered, validated schedule of a resolved run: the one list that ranks run.

    Raises:
        ConfigError: as `compute_schedule_of`, or a cap that the schedule does not keep.
        ScheduleError: a schedule that would not run.
    """
    made = lower(compute_schedule_of(spec))
    return validate(made, costs_of(spec, made.placement), cap_of(spec))


def request_of(spec: RunSpec) -> Request:
    """Return what the generator is asked for."""
    parallel, schedule = spec.parallel, spec.schedule
    return Request(
        num_ranks=parallel.partitions,
        num_micro_batches=parallel.micro_batches or 1,
        num_parts=parallel.parts or 1,
        chunks=schedule.chunks,
        cap=cap_of(spec),
        costs=depth_costs_of(spec),
        network=network_of(spec),
        allow=tuple(sorted(schedule.memory_actions)),
        max_stages=schedule.max_stages,
        placements=tuple(schedule.placements),
        seed=spec.seed,
        budget_s=schedule.budget_s,
    )


def cap_of(spec: RunSpec) -> float | None:
    """Return the cap in units of one micro-batch's activations on the heaviest of P equal parts, None without one."""
    schedule = spec.schedule
    if schedule.activation_cap_bytes is None:
        return schedule.activation_cap
    return schedule.activation_cap_bytes / spec.cost.activation_bytes


def depth_costs_of(spec: RunSpec) -> DepthCosts:
    """Return the costs of the model over its depth, in units."""
    cost = spec.cost
    return DepthCosts(
        num_ranks=spec.parallel.partitions,
        forward=cost.forward,
        input_grad=cost.input_grad,
        weight_grad=cost.weight_grad,
        recompute=cost.recompute,
        copy=cost.offload,
        boundary_bytes=float(cost.boundary_bytes),
        times=tuple(cost.times),
        activations=tuple(cost.activations),
    )


def costs_of(spec: RunSpec, placement: Placement) -> StageCosts:
    """Return the costs of a schedule's stages in units, the gradients' all-reduce among them."""
    stages = depth_costs_of(spec).stages(placement.num_stages) if placement.feeders is None else stage_costs_of(spec)
    reduce, link = [0.0] * placement.num_stages, [0.0] * placement.num_stages
    for rank in range(placement.num_ranks):
        found = reduction_of(spec, placement, rank)
        stage = placement.lowest_stage(rank)
        reduce[stage], link[stage] = found.time, found.link_time
    return replace(stages, reduce=tuple(reduce), reduce_link=tuple(link))


def reduction_of(spec: RunSpec, placement: Placement, rank: int) -> AllReduce:
    """Return the all-reduce, in units, of the gradients that a rank of the first replica holds.

    It takes no time without `cost.param_bytes`, so that abstract costs are those of the pipeline alone.
    """
    num_bytes = reduced_bytes(spec, placement, rank)
    group = placement.reduce_group(rank, spec.parallel.replicas)
    return all_reduce(network_of(spec), group, float(num_bytes)) if num_bytes else NONE


def reduced_bytes(spec: RunSpec, placement: Placement, rank: int) -> int:
    """Return the bytes of gradients that a rank reduces: those of its share of the model, twice that in two directions."""
    stages = {stage for _, stage in placement.stages_on(rank)}
    return spec.cost.param_bytes * len(stages) * placement.num_ranks // placement.num_stages


def network_of(spec: RunSpec) -> Network:
    """Return the links of the configured machine, in units of time."""
    machine, unit_s = spec.machine, spec.cost.unit_s

    def per_byte(bytes_per_s: float | None) -> float:
        return 0.0 if bytes_per_s is None else 1.0 / (bytes_per_s * unit_s)

    return Network(
        latency=spec.cost.link + machine.link_latency_s / unit_s,
        per_byte=per_byte(machine.link_bytes_per_s),
        ranks_per_node=machine.ranks_per_node,
        node_latency=spec.cost.link + machine.node_latency_s / unit_s,
        node_per_byte=per_byte(machine.node_bytes_per_s),
        has_contention=machine.contention,
    )


def network_in_seconds(spec: RunSpec) -> Network:
    """Return the links of the configured machine in seconds, whatever the unit of the costs is."""
    return network_of(replace(spec, cost=replace(spec.cost, unit_s=1.0, link=0.0)))


def pace_of(spec: RunSpec, replica: int) -> Pace:
    """Return what disturbs one replica of the pipeline: its slow rank, if it has it, and the time that inputs take."""
    machine, num_ranks = spec.machine, spec.parallel.partitions
    slow = machine.slow_rank
    has_slow_rank = slow is not None and slow // num_ranks == replica
    return Pace(
        slow % num_ranks if slow is not None and has_slow_rank else None, machine.slowdown, spec.cost.input_load
    )


def play(spec: RunSpec, made: Schedule) -> tuple[Network, Simulation]:
    """Simulate one step of a resolved run's schedule without noise, and gives with it the network it was played on.

    Replicas are alike, but for how their ranks lie over the nodes and for a slow rank: of those that differ the slowest
    is given, for which the others wait at the reduction.
    """
    lying = layouts(network_of(spec), spec.parallel.partitions, spec.parallel.replicas)
    ways = dict.fromkeys((each, pace_of(spec, replica)) for replica, each in enumerate(lying))
    costs, cap = costs_of(spec, made.placement), cap_of(spec)
    played = ((each, simulate(made, costs, each, cap, pace)) for each, pace in ways)
    return max(played, key=lambda pair: pair[1].span)


def layouts(network: Network, num_ranks: int, num_replicas: int) -> list[Network]:
    """Return the network of each replica of `num_ranks` ranks, as these lie over the nodes; alike for those that lie alike."""
    per_node = network.ranks_per_node
    if per_node is None:
        return [network] * num_replicas
    known: dict[tuple[int, ...], Network] = {}
    found = []
    for replica in range(num_replicas):
        first = replica * num_ranks % per_node
        nodes = tuple((first + rank) // per_node for rank in range(num_ranks))
        found.append(known.setdefault(nodes, replace(network, first_rank=first)))
    return found


def _read(spec: RunSpec) -> Schedule:
    """Read the file of schedule=file: what `gems schedule --json` gave, or torch's CSV, valid as it stands."""
    path = Path(spec.schedule.path or "")
    try:
        text = path.read_text()
        is_csv = path.suffix == ".csv"
        schedule = from_torch_csv(text, path.stem) if is_csv else from_json(json.loads(text))
    except (OSError, ValueError, RecursionError, ConfigError) as error:
        raise ConfigError(
            "schedule.path", path, f"holds no schedule ({error})",
            "give a file of `gems schedule --json`, or a .csv of `gems schedule format=torch`",
        ) from error  # fmt: skip
    found, asked = schedule.num_ranks, spec.parallel.partitions
    if found != asked:
        raise ConfigError("parallel.partitions", asked, f"must be {found}, the ranks of {path}")
    if schedule.num_micro_batches != spec.parallel.micro_batches:
        raise ConfigError(
            "parallel.micro_batches",
            spec.parallel.micro_batches,
            f"must be {schedule.num_micro_batches}, those of {path}",
        )
    return compute_only(validate(schedule))

"""Costs of a run by its configuration: compute, links, pace, all-reduces and one step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean

from gems.config.schema import (
    CostConfig,
    MachineConfig,
    MemoryConfig,
    ParallelConfig,
    RunSpec,
    ScheduleConfig,
)
from gems.errors import ConfigError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.plan import MemoryPlan
from gems.partition.links import machine_links
from gems.schedule.costs import DepthCosts, Network, StageCosts
from gems.schedule.placement import Placement
from gems.schedule.replicas import with_all_reduce
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Pace, Simulation, rank_times
from gems.schedule.strips import strip_costs


@dataclass(frozen=True)
class RunCosts:
    """The costs of a run's steps, from the configuration or from its profile.

    Times are in seconds, sizes in units of activations. A unit of activations is the most that one
    micro-batch holds on any of P equal parts of the model; its size is `cost.activation_bytes`.
    """

    cost: CostConfig
    machine: MachineConfig
    parallel: ParallelConfig
    schedule: ScheduleConfig
    least_bytes: int  # of a storage that a schedule moves to the host

    @classmethod
    def of(cls, run: RunSpec) -> RunCosts:
        """Return the costs of a resolved run."""
        least_bytes = run.memory.min_offload_bytes
        return cls(run.cost, run.machine, run.parallel, run.schedule, least_bytes)

    @property
    def cap(self) -> float | None:
        """The most activations of a rank, in units; None without a cap.

        Raises:
            ConfigError: the cap is in bytes and the size of a unit is unknown.
        """
        cap_bytes = self.schedule.activation_cap_bytes
        if cap_bytes is None:
            return self.schedule.activation_cap
        if not self.cost.activation_bytes:
            raise ConfigError(
                "schedule.activation_cap_bytes",
                cap_bytes,
                "needs cost.activation_bytes, the bytes of one unit",
                "give it, use cost=profile, or give schedule.activation_cap in units",
            )
        return cap_bytes / self.cost.activation_bytes

    @property
    def cap_bytes(self) -> float | None:
        """The most activations of a rank, in bytes by the size of a unit; None without a cap."""
        return None if self.cap is None else self.cap * self.cost.activation_bytes

    @property
    def uncapped(self) -> RunCosts:
        """The same costs without the cap, for other units of activations than it was given in."""
        free = replace(self.schedule, activation_cap=None, activation_cap_bytes=None)
        return replace(self, schedule=free)

    @cached_property
    def network(self) -> Network:
        """The machine's links, with the share of `cost.link` that each strip's message takes."""
        links = machine_links(self.machine)
        link_s = self.cost.link * self.cost.unit_s / self.parallel.num_strips
        return replace(
            links, latency=links.latency + link_s, node_latency=links.node_latency + link_s
        )

    @property
    def depth(self) -> DepthCosts:
        """The costs of the model over its depth, in units of `cost.unit_s`."""
        cost = self.cost
        return DepthCosts(
            num_ranks=self.parallel.partitions,
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

    def stages(self, placement: Placement) -> StageCosts:
        """Return the costs of a placement's stages (of a strip, if parallel.strips is above 1).

        They include the all-reduce of each stage's gradients; stages count as equal unless the
        costs give their bytes. Without `cost.param_bytes` the all-reduce takes no time, so abstract
        costs cover the pipeline alone.

        Raises:
            ConfigError: `cost.stages` has other stages.
        """
        depth = self.depth
        cost = self.cost
        if depth.given is not None and depth.given.num_stages != placement.num_stages:
            raise ConfigError(
                "cost.stages",
                f"of {depth.given.num_stages} stages",
                f"must be of {placement.num_stages}, the stages of schedule={self.schedule.name}",
            )
        stages = strip_costs(
            depth.of(placement).in_units(1.0 / cost.unit_s, 1.0), self.parallel.num_strips
        )
        if cost.param_bytes and not stages.param_bytes:
            share = cost.param_bytes * placement.num_ranks / placement.num_stages
            stages = replace(stages, param_bytes=(share,) * placement.num_stages)
        return with_all_reduce(stages, placement, self.network, self.parallel.replicas)

    def pace(self, replica: int) -> Pace:
        """Return the disturbances of one replica.

        These are its slow rank, if it has one, and the time to read inputs.
        """
        slow = self.machine.slow_rank
        num_ranks = self.parallel.partitions
        is_here = slow is not None and slow // num_ranks == replica
        slow_rank = slow % num_ranks if slow is not None and is_here else None
        input_s = self.cost.input_load * self.cost.unit_s / self.parallel.num_strips
        return Pace(slow_rank, self.machine.slowdown, input_s)

    @property
    def paces(self) -> tuple[Pace, ...]:
        """The disturbances of each replica."""
        return tuple(map(self.pace, range(self.parallel.replicas)))

    def kept(self, schedule: Schedule, case: MemoryCase | None = None) -> PlanOutcome:
        """Return the outcome of a step of a lowered schedule with all activations kept.

        `case` has the layers, if known.
        """
        plan = MemoryPlan.keeping(() if case is None else case.boundaries)
        return PlanOutcome(
            plan,
            schedule,
            self.stages(schedule.placement),
            self.network,
            case,
            self.cap,
            self.paces,
        )


def is_by_layers(cost: CostConfig, memory: MemoryConfig) -> bool:
    """Return whether a run is simulated by the profile of its layers."""
    return cost.from_layers or not memory.keeps


def counts_units(cost: CostConfig, memory: MemoryConfig, machine: MachineConfig) -> bool:
    """Return whether a run's times are in units without a length in seconds.

    That is the case for configured costs without cost.unit_s.
    """
    return cost.unit_s == 1.0 and not (machine.is_emulated or is_by_layers(cost, memory))


def parts_s(outcome: PlanOutcome, step: Simulation) -> dict[str, float]:
    """Return the seconds of a simulated step by activity, as means over the ranks.

    They add up to the step.
    """
    times = rank_times(outcome.schedule, outcome.costs, step, outcome.network, outcome.paces[0])
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

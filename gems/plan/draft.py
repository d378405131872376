"""The parts of a run's plan, built on demand."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gems.config.schema import CostConfig, RunSpec
from gems.memory.case import MemoryCase
from gems.memory.registry import plan_of, plan_within
from gems.models import layers_of
from gems.partition.methods import Partitioner
from gems.partition.operator_placement import operator_costs, operator_graph, placed_on
from gems.partition.problem import Partition
from gems.profile import ModelProfile
from gems.profile.store import profile_of
from gems.profile.subject import Subject
from gems.schedule import PLACED, is_searched
from gems.schedule.formats.schedule_json import from_json
from gems.schedule.lower import lower
from gems.schedule.schedule import Schedule
from gems.schedule.validate import validate
from gems.simulation.build import generate, search_schedule
from gems.simulation.cost_sources import COSTS
from gems.simulation.costs import RunCosts
from gems.simulation.memory_case import Policy, Room
from gems.simulation.profiled_costs import layer_costs, profiled_costs, to_json

PROFILE = "profile"  # the costs of a search for a real schedule, unless others are given


@dataclass(frozen=True)
class Draft:
    """A resolved run and the parts of its plan, each built at first access.

    If `runs` is False, the run is only simulated: its costs are as configured, and its stages may
    outnumber the layers of its model. With a `known` profile it is one of many candidates of a
    search: configured boundaries are not checked, memory policies stop early, and only the chosen
    schedule is validated.

    Reading a part raises:
        ConfigError: the schedule cannot serve the counts or the cap, there are more stages than
            layers, or the profile is not available.
        DoesNotFitError: a rank would hold more than machine.device_bytes.
        ScheduleError: the schedule would not run.
    """

    spec: RunSpec
    runs: bool = False
    known: ModelProfile | None = None

    @cached_property
    def run(self) -> RunSpec:
        """The run with the costs or the stage limit that a search for a real schedule needs.

        Without configured costs it gets cost=profile. With configured costs it only gets the
        largest number of stages that its layers can form.
        """
        spec = self.spec
        is_by_search = spec.machine.is_real and is_searched(spec.schedule.name)
        if not self.runs or not is_by_search or spec.cost.from_layers:
            return spec
        if spec.cost == CostConfig():
            return replace(spec, cost=CostConfig(name=PROFILE))
        most = min(len(layers_of(spec.model, spec.data)), spec.schedule.max_stages or sys.maxsize)
        return replace(spec, schedule=replace(spec.schedule, max_stages=most))

    @cached_property
    def subject(self) -> Subject:
        """The sections on which profiles depend."""
        return Subject.of(self.spec)

    @cached_property
    def profile(self) -> ModelProfile:
        """The profile of the layers, with the times of the cost source."""
        cost = self.run.cost
        profile = self.known or profile_of(self.subject)
        times = COSTS[cost.name].times
        return profile if times is None else times(profile, cost)

    @cached_property
    def partitioner(self) -> Partitioner:
        """The configured partition."""
        spec = self.spec
        boundaries = spec.parallel.boundaries
        # other policies make room after the partition is made
        limit_bytes = spec.machine.device_bytes if spec.memory.keeps else None
        return Partitioner(
            self.subject,
            spec.partition,
            None if boundaries is None else tuple(boundaries),
            limit_bytes,
            lambda: self.profile,
        )

    @cached_property
    def policy(self) -> Policy:
        """The memory policy."""
        spec = self.spec
        room = Room.of(spec.machine, spec.parallel, spec.cluster.ranks_per_node)
        make = plan_of if self.known is None else plan_within
        return Policy(self.subject, spec.memory, self.configured.paces, room, make)

    @property
    def configured(self) -> RunCosts:
        """The costs as configured, before those of the layers are known."""
        return RunCosts.of(self.run)

    @cached_property
    def search_result(self) -> dict[str, Any]:
        """The result of the search for a schedule."""
        partitioner = self.partitioner if self.run.cost.from_layers else None
        return search_schedule(self.configured, self.policy, self.run.seed, partitioner)

    @cached_property
    def costs(self) -> RunCosts:
        """The costs of the run: as configured, or of its layers in seconds and bytes.

        For schedule=placed they are the costs of its operators. The unit of activations is the
        bytes that the heaviest of P equal parts keeps of one micro-batch, or, for a searched
        schedule, the unit of its cap. A searched schedule has its own stages, others those of the
        partition.
        """
        costs = self.configured
        cost = costs.cost
        if costs.schedule.name == PLACED:
            stages = operator_costs(operator_graph(self.subject)).in_units(cost.unit_s, 1)
            return replace(costs, cost=replace(cost, stages=to_json(stages)))
        if not cost.from_layers or cost.activation_bytes:
            return costs
        profile = self.profile
        boundaries = costs.parallel.boundaries
        if is_searched(costs.schedule.name):
            boundaries, unit_bytes = (
                self.search_result["boundaries"],
                self.search_result["unit_bytes"],
            )
            return profiled_costs(costs, profile, boundaries, unit_bytes)
        if boundaries is None or self.known is None:
            first = generate(layer_costs(costs, profile), self.run.seed)
            boundaries = list(self.partitioner.partition(first).boundaries)
        return profiled_costs(costs, profile, boundaries)

    @cached_property
    def compute(self) -> Schedule:
        """The compute-only schedule: generated, found by a search, or read from a file."""
        if self.run.schedule.name == PLACED:
            return placed_on(self.subject, self.run.partition.budget_s, self.run.seed)
        if is_searched(self.run.schedule.name):
            return from_json(self.search_result["schedule"])
        return generate(self.costs, self.run.seed)

    @cached_property
    def lowered(self) -> Schedule:
        """The lowered, validated schedule that ranks run, with receives posted in time."""
        costs = self.costs
        stages = costs.stages(self.compute.placement)
        lowered = lower(self.compute, stages, costs.network, costs.cap)
        return lowered if self.known else validate(lowered, stages, costs.cap)

    @cached_property
    def policy_case(self) -> MemoryCase:
        """The case for which any memory policy of the run would plan, whatever the device holds."""
        boundaries = self.partition(self.compute, is_limited=False).boundaries
        return self.policy.case(self.compute, boundaries, self.profile)

    def partition(self, schedule: Schedule, is_limited: bool = True) -> Partition:
        """Return the partition for a schedule: if both were searched together, the one found.

        If `is_limited` is False, the partition may exceed the devices.
        """
        partitioner = self.partitioner
        if not is_limited:
            partitioner = replace(partitioner, limit_bytes=None)
        if is_searched(self.run.schedule.name) and self.run.cost.from_layers:
            partitioner = replace(partitioner, given=tuple(self.search_result["boundaries"]))
        return partitioner.partition(schedule)

"""The memory policy of a run: its case, the effect of its plan on a step, and whether it fits."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gems.config.schema import MachineConfig, MemoryConfig, ParallelConfig
from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.plan import MemoryPlan
from gems.memory.registry import plan_of
from gems.memory.strips import stages_as_layers
from gems.partition.links import machine_links
from gems.partition.methods import optimizer_name
from gems.profile import ModelProfile
from gems.profile.store import strips_of
from gems.profile.subject import Subject
from gems.schedule import is_searched
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Pace
from gems.utils.cache import cached

HOST = "machine.host_bytes"
SMALLER = "use another policy (memory=plan), more partitions, or a smaller image or micro-batch"


@dataclass(frozen=True)
class Policy:
    """The memory policy of a run, whatever its schedule and partition.

    `paces` has the disturbances of each replica.
    """

    subject: Subject
    config: MemoryConfig
    paces: tuple[Pace, ...]
    room: Room
    make: Callable[[MemoryConfig, MemoryCase], MemoryPlan] = plan_of

    def case(
        self, schedule: Schedule, boundaries: tuple[int, ...], profile: ModelProfile
    ) -> MemoryCase:
        """Return the case of a compute-only schedule; in strips, each stage is a layer.

        Raises:
            ConfigError: in strips a layer needs the whole image.
        """
        machine = self.subject.machine
        strips = None
        if schedule.num_strips > 1:
            strips = strips_of(self.subject, boundaries)
            profile = stages_as_layers(strips, profile).captured(self.subject.replays_graphs)
            boundaries = tuple(range(len(boundaries)))
        return MemoryCase(
            profile,
            schedule,
            boundaries,
            optimizer_name(self.subject.train, self.subject.optimizer),
            self.config.limit_bytes or machine.device_bytes,
            machine.d2h_bytes_per_s,
            machine.h2d_bytes_per_s,
            machine_links(machine),
            self.config.min_offload_bytes,
            self.paces,
            strips,
        )

    def plan(self, case: MemoryCase) -> MemoryPlan:
        """Return the plan of the policy, from the cache if it has been made for a run.

        Raises:
            DoesNotFitError: the policy cannot keep the limit.
        """
        if self.make is not plan_of:  # one of many candidates
            return self.make(self.config, case)
        key = repr(
            (
                self.config,
                case.schedule.digest(),
                case.profile,
                case.network,
                case.boundaries,
                case.optimizer,
                case.limit_bytes,
                case.d2h_bytes_per_s,
                case.h2d_bytes_per_s,
                case.least_bytes,
                len(case.paces),
                case.strips,
            )
        )
        plan = cached(
            self.subject.cache_dir, "memory", key, lambda: self.make(self.config, case).to_json()
        )
        return MemoryPlan.from_json(plan)

    def outcome(self, case: MemoryCase, plan: MemoryPlan) -> PlanOutcome:
        """Return the outcome of a plan for a step as it runs.

        Raises:
            DoesNotFitError: the plan leaves too much on a device or in host memory.
        """
        outcome = case.outcome(plan)
        self.room.check(outcome)  # first: as it runs it holds no more, unless that fits too
        return case.as_run(outcome)


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a device, and the host memory of a node for all of its ranks."""

    device_bytes: int | None
    host_bytes: int | None
    ranks_on_node: int

    @classmethod
    def of(cls, machine: MachineConfig, parallel: ParallelConfig, on_node: int | None) -> Room:
        """Return the room of a run with so many ranks on a node, or one pipeline's."""
        num_ranks = on_node or parallel.partitions
        most = parallel.partitions * parallel.replicas
        return cls(machine.device_bytes, machine.host_bytes, min(num_ranks, most))

    def node_bytes(self, host_bytes: Sequence[int]) -> int:
        """Return the most bytes that a node's ranks keep in host memory, from the bytes by rank."""
        return max(host_bytes) * self.ranks_on_node

    def check(self, outcome: PlanOutcome) -> None:
        """Check that the outcome of a memory plan fits the devices and the host memory.

        Raises:
            DoesNotFitError: a rank would hold more than its device, or the ranks of a node more
            than machine.host_bytes.
        """
        peaks = outcome.peak_bytes
        worst = outcome.fullest_rank
        policy = f"memory={outcome.plan.policy}"
        smaller = SMALLER
        if is_searched(outcome.plan.policy):
            policy = f"schedule={outcome.plan.policy}"
            smaller = "lower schedule.activation_cap, or use a smaller image or micro-batch"
        if self.device_bytes is not None and peaks[worst] > self.device_bytes:
            where = f"rank {worst} of {len(peaks)} under {policy}"
            raise DoesNotFitError(where, peaks[worst], self.device_bytes, smaller)
        node_bytes = self.node_bytes(outcome.host_bytes)
        if self.host_bytes is not None and node_bytes > self.host_bytes:
            raise DoesNotFitError(
                f"host memory of {self.ranks_on_node} ranks on a node under {policy}",
                node_bytes,
                self.host_bytes,
                "recompute more (memory=recompute, memory=plan), use more nodes, or a smaller image"
                " or micro-batch",
                key=HOST,
            )

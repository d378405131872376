"""The memory policy of a run: its case, the effect of its plan on a step, and whether it fits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from gems.config.schema import MemoryConfig, RunSpec
from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.plan import MemoryPlan
from gems.memory.registry import plan_of
from gems.memory.strips import stages_as_layers
from gems.partition.links import links_of
from gems.partition.methods import optimizer_name
from gems.profile import ModelProfile
from gems.profile.store import profile_of, strips_of
from gems.profile.subject import Subject
from gems.schedule import CAPPED
from gems.schedule.schedule import Schedule
from gems.simulation.costs import RunCosts
from gems.utils.cache import cached

HOST = "machine.host_bytes"
SMALLER = "use another policy (memory=plan), more partitions, or a smaller image or micro-batch"


def memory_case(
    spec: RunSpec,
    schedule: Schedule,
    boundaries: tuple[int, ...],
    profile: ModelProfile | None = None,
) -> MemoryCase:
    """Return the case for which the memory policies of a resolved run plan.

    `schedule` is the compute-only schedule. If the profile is not given, it comes from the source
    that the run names. In strips, each stage is a layer.

    Raises:
        ConfigError: the profile is not available, or in strips a layer needs the whole image.
    """
    machine = spec.machine
    strips = None
    profile = profile or profile_of(Subject.of(spec))
    if schedule.num_strips > 1:
        strips = strips_of(Subject.of(spec), boundaries)
        profile = stages_as_layers(strips, profile)
        boundaries = tuple(range(len(boundaries)))
    return MemoryCase(
        profile,
        schedule,
        boundaries,
        optimizer_name(spec.train, spec.optimizer),
        spec.memory.limit_bytes or machine.device_bytes,
        machine.d2h_bytes_per_s,
        machine.h2d_bytes_per_s,
        links_of(machine),
        spec.memory.min_offload_bytes,
        RunCosts.of(spec).paces,
        strips,
    )


def policy_plan(memory: MemoryConfig, case: MemoryCase, cache_dir: str | None) -> MemoryPlan:
    """Return the plan of a memory policy, from the cache if it has been made.

    Raises:
        DoesNotFitError: the policy cannot keep the limit.
    """
    key = repr(
        (
            memory,
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
    return MemoryPlan.from_json(
        cached(cache_dir, "memory", key, lambda: plan_of(memory, case).to_json())
    )


def policy_outcome(room: Room, case: MemoryCase, plan: MemoryPlan) -> PlanOutcome:
    """Return the outcome of a plan for a step as it runs.

    Raises:
        DoesNotFitError: the plan leaves too much on a device or in host memory.
    """
    outcome = case.outcome(plan)
    room.check(outcome)  # first: as it runs it holds no more, unless that fits too
    return case.as_run(outcome)


@dataclass(frozen=True, slots=True)
class Room:
    """The memory of a device, and the host memory of a node for all of its ranks."""

    device_bytes: int | None
    host_bytes: int | None
    ranks_on_node: int

    @classmethod
    def of(cls, spec: RunSpec) -> Room:
        """Return the room of a resolved run."""
        num_ranks = spec.cluster.ranks_per_node or spec.parallel.partitions
        machine = spec.machine
        return cls(machine.device_bytes, machine.host_bytes, min(num_ranks, spec.world_size))

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
        if outcome.plan.policy == CAPPED:
            policy = f"schedule={CAPPED}"
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

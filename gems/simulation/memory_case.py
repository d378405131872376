"""A run's memory policy: what it plans for, what the plan does to a step, and whether it fits devices and hosts."""

from __future__ import annotations

from collections.abc import Sequence

from gems.config.schema import RunSpec
from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase, PlanOutcome
from gems.memory.plan import MemoryPlan
from gems.memory.registry import plan_of
from gems.memory.strips import stages_as_layers
from gems.partition.links import network_in_seconds
from gems.partition.methods import optimizer_name
from gems.profile import ModelProfile
from gems.profile.store import profile_of, strips_of
from gems.schedule import CAPPED
from gems.schedule.schedule import Schedule
from gems.simulation.costs import replica_paces
from gems.utils.cache import cached

SMALLER = "use another policy (memory=plan), more partitions, or a smaller image or micro-batch"


def memory_case(
    spec: RunSpec,
    schedule: Schedule,
    boundaries: tuple[int, ...],
    profile: ModelProfile | None = None,
) -> MemoryCase:
    """Return what the memory policies of a resolved run plan for.

    `schedule` is the compute-only one.
    The profile comes from where the run says, unless it is given. In strips each stage is a layer.

    Raises:
        ConfigError: a profile that cannot be had, or in strips a layer that needs the whole image.
    """
    machine = spec.machine
    strips = None
    profile = profile or profile_of(spec)
    if schedule.num_strips > 1:
        strips = strips_of(spec, boundaries)
        profile = stages_as_layers(strips, profile)
        boundaries = tuple(range(len(boundaries)))
    return MemoryCase(
        profile,
        schedule,
        boundaries,
        optimizer_name(spec),
        spec.memory.limit_bytes or machine.device_bytes,
        machine.d2h_bytes_per_s,
        machine.h2d_bytes_per_s,
        network_in_seconds(spec),
        spec.memory.min_offload_bytes,
        replica_paces(spec),
        strips,
    )


def memory_outcome(run: RunSpec, case: MemoryCase) -> PlanOutcome:
    """Return what the run's memory policy does; the plan is kept in the cache.

    Raises:
        DoesNotFitError: it leaves too much on a device or in host memory.
    """
    key = repr(
        (
            run.memory,
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
    made = MemoryPlan.from_json(
        cached(run.cache_dir, "memory", key, lambda: plan_of(run.memory, case).to_json())
    )
    outcome = case.as_run(case.outcome(made))
    check_fits(run, outcome)
    return outcome


def check_fits(spec: RunSpec, outcome: PlanOutcome) -> None:
    """Check what a memory plan leaves on the devices and takes of host memory.

    Raises:
        DoesNotFitError: a rank would hold more than its device, or the ranks of a node more than
        machine.host_bytes.
    """
    peaks = outcome.peak_bytes
    worst = outcome.fullest_rank
    is_searched = outcome.plan.policy == CAPPED
    policy = f"schedule={CAPPED}" if is_searched else f"memory={outcome.plan.policy}"
    smaller = (
        "lower schedule.activation_cap, or use a smaller image or micro-batch"
        if is_searched
        else SMALLER
    )
    limit = spec.machine.device_bytes
    host_limit = spec.machine.host_bytes
    if limit is not None and peaks[worst] > limit:
        raise DoesNotFitError(
            f"rank {worst} of {len(peaks)} under {policy}", peaks[worst], limit, smaller
        )
    if host_limit is not None and not fits_host(spec, outcome.host_bytes):
        num_ranks = _ranks_on_node(spec, outcome.host_bytes)
        raise DoesNotFitError(
            f"host memory of {num_ranks} ranks on a node under {policy}",
            node_host_bytes(spec, outcome.host_bytes),
            host_limit,
            "recompute more (memory=recompute, memory=plan), use more nodes, or a smaller image or"
            " micro-batch",
            key="machine.host_bytes",
        )


def fits_host(spec: RunSpec, host_bytes: Sequence[int]) -> bool:
    """Return whether a node's host memory holds what its ranks keep there, given for each rank of a pipeline."""
    limit = spec.machine.host_bytes
    return limit is None or node_host_bytes(spec, host_bytes) <= limit


def node_host_bytes(spec: RunSpec, host_bytes: Sequence[int]) -> int:
    """Return the most bytes that the ranks of a node keep in host memory together."""
    return max(host_bytes) * _ranks_on_node(spec, host_bytes)


def _ranks_on_node(spec: RunSpec, host_bytes: Sequence[int]) -> int:
    return min(spec.cluster.ranks_per_node or len(host_bytes), spec.world_size)

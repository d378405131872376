"""The prediction of a run whose costs are known: memory of its ranks, seconds of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gems.config.schema import RunSpec
from gems.errors import DoesNotFitError
from gems.partition.methods import case_of
from gems.runs.run_plan import SMALLER, RunPlan
from gems.simulation.build import play
from gems.simulation.profiled_costs import PROFILE, costed

MAX_ACTIONS = 200_000  # simulated in some seconds
PREDICTABLE = ("real", "emulated")
NO_RATES = ("auto", "cuda")  # machines without rates of their own: the defaults are those of a processor's core


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest rank's bytes on its device, and the bytes in host memory of the ranks of a node."""

    rank: int
    device_bytes: int
    host_bytes: int


def predict_peak(spec: RunSpec, plan: RunPlan) -> Peak | None:
    """Return the predicted peak of a planned run; None if it has no profile."""
    if plan.memory is not None:
        outcome = plan.memory
        together = min(spec.cluster.ranks_per_node or len(outcome.host_bytes), spec.world_size)
        rank = outcome.fullest_rank
        return Peak(rank, outcome.peak_bytes[rank], max(outcome.host_bytes) * together)
    if plan.profile is None:
        return None
    peaks = case_of(spec, plan.schedule, plan.profile).peak_bytes(plan.boundaries)
    rank = max(range(len(peaks)), key=lambda each: peaks[each])
    return Peak(rank, peaks[rank], 0)


def check_host_memory(spec: RunSpec, peak: Peak) -> None:
    """Check the host memory that a run needs against a node's.

    Raises:
        DoesNotFitError: the ranks of a node hold more than it has.
    """
    limit = spec.cluster.node_memory_bytes
    if limit is not None and peak.host_bytes > limit:
        raise DoesNotFitError(
            f"host memory of the ranks on a node under memory={spec.memory.name}", peak.host_bytes, limit,
            SMALLER, key="cluster.node_memory_bytes",
        )  # fmt: skip


def predict_seconds(spec: RunSpec, plan: RunPlan) -> float | None:
    """Return the predicted seconds of all steps of a planned run; None if its costs are not known.

    They are known of a run with timed waits, and if a profile measured them or the machine has rates.
    """
    if spec.machine.kind not in PREDICTABLE or sum(map(len, plan.schedule.rows)) > MAX_ACTIONS:
        return None
    if spec.machine.kind == "real":
        return _real_seconds(spec, plan)
    _, simulated = play(spec, plan.schedule)
    return spec.train.steps * simulated.span * spec.cost.unit_s


def _real_seconds(spec: RunSpec, plan: RunPlan) -> float | None:
    profile = plan.profile
    if profile is None or (profile.source == "fake" and spec.machine.name in NO_RATES and spec.cluster.gpus_per_node):
        return None
    if plan.memory is not None:
        return spec.train.steps * plan.memory.step_s
    profiled = replace(spec, cost=replace(spec.cost, name=PROFILE, activation_bytes=0, unit_s=1.0, link=0.0))
    _, simulated = play(costed(profiled), plan.schedule)
    return spec.train.steps * simulated.span

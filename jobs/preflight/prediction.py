"""What a run is predicted to take, where its costs are known: memory of its ranks, seconds of its steps."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gems.config.schema import RunSpec
from gems.errors import DoesNotFitError
from gems.partition.methods import case_of
from gems.runs.run_plan import SMALLER, RunPlan
from gems.simulation.build import play
from gems.simulation.profiled_costs import PROFILE, costed

MAX_ACTIONS = 200_000  # played in some seconds
PREDICTED = ("real", "emulated")
GUESSED = ("auto", "cuda")  # machines without rates of their own: the defaults are those of a processor's core


@dataclass(frozen=True, slots=True)
class Peak:
    """The fullest rank's bytes on its device, and what the ranks of a node hold in host memory beside them."""

    rank: int
    device_bytes: int
    host_bytes: int


def peak_of(spec: RunSpec, made: RunPlan) -> Peak | None:
    """Return the predicted peak of a planned run; None where it has no profile."""
    if made.memory is not None:
        outcome = made.memory
        together = min(spec.cluster.ranks_per_node or len(outcome.host_bytes), spec.world_size)
        rank = outcome.fullest_rank
        return Peak(rank, outcome.peak_bytes[rank], max(outcome.host_bytes) * together)
    if made.profile is None:
        return None
    peaks = case_of(spec, made.schedule, made.profile).peak_bytes(made.boundaries)
    rank = max(range(len(peaks)), key=lambda each: peaks[each])
    return Peak(rank, peaks[rank], 0)


def check_host(spec: RunSpec, peak: Peak) -> None:
    """Check what a run keeps in host memory against a node's.

    Raises:
        DoesNotFitError: the ranks of a node hold more than it has.
    """
    limit = spec.cluster.node_memory_bytes
    if limit is not None and peak.host_bytes > limit:
        raise DoesNotFitError(
            f"host memory of the ranks on a node under memory={spec.memory.name}", peak.host_bytes, limit,
            SMALLER, key="cluster.node_memory_bytes",
        )  # fmt: skip


def steps_s(spec: RunSpec, made: RunPlan) -> float | None:
    """Return the predicted seconds of all steps of a planned run; None where its costs are not known.

    Those are known of a run with timed waits, and where a profile measured them or a machine has rates.
    """
    if spec.machine.kind not in PREDICTED or sum(map(len, made.schedule.rows)) > MAX_ACTIONS:
        return None
    if spec.machine.kind == "real":
        return _real_s(spec, made)
    _, played = play(spec, made.schedule)
    return spec.train.steps * played.span * spec.cost.unit_s


def _real_s(spec: RunSpec, made: RunPlan) -> float | None:
    profile = made.profile
    if profile is None or (profile.source == "fake" and spec.machine.name in GUESSED and spec.cluster.gpus_per_node):
        return None
    if made.memory is not None:
        return spec.train.steps * made.memory.step_s
    asked = replace(spec, cost=replace(spec.cost, name=PROFILE, activation_bytes=0, unit_s=1.0, link=0.0))
    _, played = play(costed(asked), made.schedule)
    return spec.train.steps * played.span

"""Findings: what a run shows of its activations, beside what its schedule predicted."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from pathlib import Path

from gems.engine.pipeline import Pipeline
from gems.memory.model import OPTIMIZERS
from gems.memory.plan import MemoryPlan
from gems.memory.timeline import rank_timeline
from gems.partition.methods import optimizer_of
from gems.profile import ModelProfile
from gems.profile.profilers.fake import fake_profile
from gems.profile.store import read_document
from gems.schedule.costs import StageCosts
from gems.schedule.ledger import peaks


@dataclass(frozen=True, slots=True)
class Findings:
    """The most activation bytes of each rank of the world, counted and predicted, and the layers that do not split."""

    peak_activation_bytes: tuple[int, ...]
    predicted_activation_bytes: tuple[int, ...]
    unsplit_layers: tuple[str, ...]


def findings_of(pipeline: Pipeline, profile: Path | None = None) -> Findings:
    """Return what the steps so far have shown; collective, after one step at least.

    `profile` is the file of the profile that the run was planned with. Under a memory plan the bytes are predicted from
    it, or from a fake one where there is none; without a plan from the stages' measured sizes.
    """
    predicted = _predicted_bytes(pipeline) if pipeline.segments is None else _walked_bytes(pipeline, profile)
    return Findings(
        tuple(pipeline.comm.allgather(pipeline.train.activations.peak_bytes)), predicted, _unsplit_layers(pipeline)
    )


def _predicted_bytes(pipeline: Pipeline) -> tuple[int, ...]:
    """Return the most activation bytes of every rank of the world, from the schedule and the stages' measured sizes.

    Sizes are those of the largest copy of a stage; collective, and after the first step.
    """
    sizes: dict[int, tuple[int, int]] = {}
    mine = [
        (held[1], stage.stash_bytes or 0, stage.held_for_weights_bytes or 0) for held, stage in pipeline.stages.items()
    ]
    for number, stash, held_for_weights in itertools.chain.from_iterable(pipeline.comm.allgather(mine)):
        before = sizes.get(number, (0, 0))
        sizes[number] = (max(before[0], stash), max(before[1], held_for_weights))
    none = (0.0,) * len(sizes)
    costs = StageCosts(
        none, none, none,
        activation=tuple(float(sizes[number][0]) for number in sorted(sizes)),
        held_for_weights=tuple(float(sizes[number][1]) for number in sorted(sizes)),
    )  # fmt: skip
    of_pipeline = tuple(int(peak) for peak in peaks(pipeline.schedule, costs))
    return of_pipeline * pipeline.spec.parallel.replicas


def _walked_bytes(pipeline: Pipeline, path: Path | None) -> tuple[int, ...]:
    """Return the most activation bytes of every rank of the world, by playing its list on a profile; collective."""
    spec, schedule = pipeline.spec, pipeline.schedule
    found: tuple[int, ...] | None = None
    if pipeline.comm.rank == 0:
        whole = MemoryPlan.keeping(pipeline.cuts)
        plan = pipeline.plan or replace(whole, least_bytes=spec.memory.min_offload_bytes)
        profile = _profile_of(pipeline, path)
        optimizer = OPTIMIZERS[optimizer_of(spec)]
        walked = (rank_timeline(profile, plan, schedule, rank, optimizer) for rank in range(schedule.num_ranks))
        found = tuple(rank.peak_activation_bytes for rank in walked)
    of_pipeline: tuple[int, ...] = pipeline.comm.bcast(found)
    return of_pipeline * spec.parallel.replicas


def _profile_of(pipeline: Pipeline, path: Path | None) -> ModelProfile:
    spec = pipeline.spec
    if path is not None and path.exists():
        return read_document(path)
    return fake_profile(spec.model, spec.data, spec.parallel.micro_batch_size, spec.train.dtype, spec.machine)


def _unsplit_layers(pipeline: Pipeline) -> tuple[str, ...]:
    """Return the layers whose whole backward runs at I because it cannot be split, by name; collective."""
    mine = set()
    if pipeline.schedule.has_split_backward:
        for held, stage in pipeline.stages.items():
            names = [name for name, _ in pipeline.named_layers(held)]
            for inner in stage.split_layers().unsplit:
                index, _, rest = inner.partition(".")
                mine.add(f"{names[int(index)]}.{rest}" if rest else names[int(index)])
    return tuple(sorted(set().union(*pipeline.comm.allgather(mine))))

"""The memory report of a run: measured and predicted peaks of activations."""

from __future__ import annotations

import itertools
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from gems.config.training import captures_graphs
from gems.engine.rank import Rank
from gems.engine.transport.mpi import allgather, broadcast
from gems.memory.model import OPTIMIZERS
from gems.memory.plan import MemoryPlan
from gems.memory.strips import stages_as_layers
from gems.memory.timeline import rank_timeline
from gems.partition.methods import optimizer_name
from gems.profile import ModelProfile
from gems.profile.profilers.fake import fake_profile
from gems.profile.store import read_document, strips_of
from gems.profile.strip_profile import StripProfile
from gems.profile.subject import Subject
from gems.schedule.costs import StageCosts
from gems.schedule.ledger import peaks


def memory_report(rank: Rank, profile: Path | None = None) -> dict[str, Any]:
    """Return each rank's peak activation bytes, counted and predicted, and the unsplit layers.

    The report covers the steps so far; the call is collective, after at least one step. Unsplit
    layers are those whose backward cannot be split.

    Without segments and CUDA graphs, peaks are predicted from the stages' measured sizes. Otherwise
    they are predicted from the profile that the run was planned with, or from a fake profile, if
    the layers run on fake tensors. Peaks of strips are predicted on fake tensors.
    """
    is_in_strips = rank.plan.schedule.num_strips > 1
    predicted = None
    if rank.train.store is not None or is_in_strips or _is_captured(rank):
        predicted = _bytes_from_profile(rank, profile)
    if predicted is None:
        predicted = _bytes_from_stages(rank)
    counted = tuple(allgather(rank.comm, rank.train.activations.peak_bytes))
    return {
        "peak_activation_bytes": counted,
        "predicted_activation_bytes": predicted,
        "unsplit_layers": _unsplit_layers(rank),
    }


def _bytes_from_stages(rank: Rank) -> tuple[int, ...]:
    """Return each rank's peak by the schedule and the measured sizes of stages' largest copies."""
    sizes: dict[int, tuple[int, int]] = {}
    stage_bytes = [
        (key[1], stage.stash_bytes or 0, stage.held_for_weights_bytes or 0)
        for key, stage in rank.train.stages.items()
    ]
    for number, stash, held_for_weights in itertools.chain.from_iterable(
        allgather(rank.comm, stage_bytes)
    ):
        before = sizes.get(number, (0, 0))
        sizes[number] = (max(before[0], stash), max(before[1], held_for_weights))
    none = (0.0,) * len(sizes)
    costs = StageCosts(
        none,
        none,
        none,
        activation=tuple(float(sizes[number][0]) for number in sorted(sizes)),
        held_for_weights=tuple(float(sizes[number][1]) for number in sorted(sizes)),
    )
    of_pipeline = tuple(int(peak) for peak in peaks(rank.plan.schedule, costs))
    return of_pipeline * rank.plan.spec.parallel.replicas


def _bytes_from_profile(rank: Rank, path: Path | None) -> tuple[int, ...] | None:
    """Return each rank's peak by walking its schedule over a profile; collective.

    In strips, the profile of the strips is used. None if the layers do not run on fake tensors.
    """
    peaks_of_pipeline = _walked(rank, path) if rank.comm.rank == 0 else None
    of_pipeline: tuple[int, ...] | None = broadcast(rank.comm, peaks_of_pipeline)
    return None if of_pipeline is None else of_pipeline * rank.plan.spec.parallel.replicas


def _walked(rank: Rank, path: Path | None) -> tuple[int, ...] | None:
    spec = rank.plan.spec
    schedule = rank.plan.schedule
    boundaries = rank.stages.of_model.boundaries
    plan = rank.plan.memory_plan or _kept(rank)
    strips = None
    profile = _profile(rank, path)
    if isinstance(profile, StripProfile):
        strips = profile
        profile = stages_as_layers(strips)
        plan = plan.between(range(len(boundaries)))
    if profile is None or plan.boundaries[-1] != profile.num_layers:
        return None  # the stages may be those of a graph, which cuts layers apart
    captured = profile.captured(_is_captured(rank))
    optimizer = OPTIMIZERS[optimizer_name(spec.train, spec.optimizer)]
    walked = (
        rank_timeline(captured, plan, schedule, rank, optimizer, strips)
        for rank in range(schedule.num_ranks)
    )
    return tuple(rank.peak_activation_bytes for rank in walked)


def _profile(rank: Rank, path: Path | None) -> ModelProfile | StripProfile | None:
    spec = rank.plan.spec
    is_in_strips = rank.plan.schedule.num_strips > 1
    if path is not None and path.exists() and not is_in_strips:
        return read_document(path)
    # layers may read a value that fake tensors lack, such as a count of batches, or call a kernel
    # of their own, for which torch has no error of its own
    with suppress(RuntimeError):
        if is_in_strips:
            return strips_of(Subject.of(spec), rank.stages.of_model.boundaries)
        size = spec.parallel.micro_batch_size
        return fake_profile(spec.model, spec.data, size, spec.train.layer_dtype, spec.machine)
    return None


def _is_captured(rank: Rank) -> bool:
    return captures_graphs(rank.plan.spec.train, rank.device.type == "cuda")


def _kept(rank: Rank) -> MemoryPlan:
    """Return a plan for a schedule without one; the size limit for offloads is the run's."""
    whole = MemoryPlan.keeping(rank.stages.of_model.boundaries)
    return replace(whole, least_bytes=rank.plan.spec.memory.min_offload_bytes)


def _unsplit_layers(rank: Rank) -> tuple[str, ...]:
    """Return the layers whose full backward runs at I because it cannot be split; collective."""
    unsplit = set()
    if rank.plan.schedule.has_split_backward:
        for key, stage in rank.train.stages.items():
            names = [name for name, _ in rank.stages.named_layers(key)]
            for inner in stage.split_layers().unsplit:
                index, _, rest = inner.partition(".")
                unsplit.add(f"{names[int(index)]}.{rest}" if rest else names[int(index)])
    return tuple(sorted(set().union(*allgather(rank.comm, unsplit))))

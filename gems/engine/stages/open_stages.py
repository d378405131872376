"""Open the stages that a rank's executor runs: whole, or as segments with a store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import nn

from gems.autograd.convolutions import ConvolutionWatch
from gems.autograd.mixed import low_copies
from gems.engine.offload.activation_store import ActivationStore
from gems.engine.offload.host_copies import CpuCopier, CudaCopier
from gems.engine.offload.host_pool import HostPool, PinnedMemory
from gems.engine.stage import SegmentKey, Stage, StageKey
from gems.engine.stages.stored import StoredSegment
from gems.engine.stages.stored_strips import StoredStrips
from gems.engine.stages.wrappers import wrap_stage
from gems.engine.supervision.recorder import Recorder
from gems.errors import ConfigError
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.schedule.action import Kind
from gems.schedule.schedule import Schedule


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments on a rank, their store, and their pool of host memory."""

    by_key: dict[SegmentKey, Stage]
    store: ActivationStore
    pool: HostPool


def wrap_stages(
    stages: Mapping[StageKey, Stage], segments: Segments | None, names: Sequence[str]
) -> Mapping[StageKey, Stage]:
    """Wrap what the executor runs: the segments, if there are any, or else the returned stages."""
    if segments is None:
        return {key: wrap_stage(stage, (*key, None), names) for key, stage in stages.items()}
    for key, stage in segments.by_key.items():
        segments.by_key[key] = wrap_stage(stage, key, names)
    return stages


def needs_store(schedule: Schedule) -> bool:
    """Return whether a schedule has segments, offloads or recomputes.

    Otherwise, stages keep their saved tensors themselves.
    """
    has_segments = any(number is not None for number in schedule.num_segments)
    return has_segments or schedule.has_any(Kind.OFFLOAD) or schedule.has_any(Kind.R)


def open_segments(
    schedule: Schedule,
    rank: int,
    stages: Mapping[StageKey, Any],
    plan: MemoryPlan | None,
    recorder: Recorder,
    device: torch.device,
    poll: Callable[[], None],
    min_offload_bytes: int = 0,
    host_limit_bytes: int | None = None,
) -> Segments:
    """Split the stages of a rank into the segments of its schedule.

    Without a memory plan each stage is one segment. Storages smaller than `min_offload_bytes` stay
    on the device, unless the plan has another limit.

    Raises:
        ConfigError: The schedule does not belong to the plan.
    """
    where = f"rank {rank}"
    is_gpu = device.type == "cuda"
    pool = HostPool(PinnedMemory(where) if is_gpu else None, where, host_limit_bytes)
    copier = CudaCopier(device) if is_gpu else CpuCopier()
    tensors = (
        tensor
        for stage in stages.values()
        for tensor in chain(
            stage.modules.parameters(), stage.modules.buffers(), low_copies(stage.modules)
        )
    )
    min_bytes = min_offload_bytes if plan is None else plan.least_bytes
    is_conv_only = plan is not None and plan.only_conv_inputs
    convolutions = (
        ConvolutionWatch(*(stage.modules for stage in stages.values())) if is_conv_only else None
    )
    store = ActivationStore(
        schedule, copier, pool, recorder, device, tensors, min_bytes, convolutions
    )
    by_key: dict[SegmentKey, Stage] = {}
    for (direction, number), stage in stages.items():
        names = schedule.segments_of(number)
        whole = (Segment(0, len(stage.modules)),)
        planned = whole if plan is None or names == (None,) else plan.stages[number]
        first = planned[0].first
        if len(planned) != len(names) or planned[-1].end - first != len(stage.modules):
            raise ConfigError(
                "memory plan",
                "none" if plan is None else plan.policy,
                f"stage {number} has {len(stage.modules)} layers and {len(names)} segments in the"
                " schedule, unlike in the plan",
                "prepare the run again",
            )
        if schedule.num_strips > 1:
            (name,) = names
            by_key[direction, number, name] = StoredStrips(stage, (direction, number), store)
            continue
        for name, segment in zip(names, planned, strict=True):
            by_key[direction, number, name] = StoredSegment(
                stage,
                nn.ModuleList(stage.modules[segment.first - first : segment.end - first]),
                (direction, number),
                name or 0,
                name == names[-1],
                store,
                poll,
                segment.choice is Choice.SELECTIVE,
            )
    return Segments(by_key, store, pool)

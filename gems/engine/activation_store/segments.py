"""The segments of a rank's stages, with the store that keeps what they save."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

import torch
from torch import nn

from gems.engine.activation_store.copies import open_copies
from gems.engine.activation_store.host_pool import HostPool, PinnedMemory, PlainMemory
from gems.engine.activation_store.segment import StoredSegment
from gems.engine.activation_store.store import ActivationStore
from gems.engine.gradients import Held
from gems.engine.stage import Stage
from gems.engine.supervision.recorder import Recorder
from gems.errors import ConfigError
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.schedule.action import Kind
from gems.schedule.schedule import Schedule

Part = tuple[int, int, int | None]  # direction, stage, segment


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments on a rank by their names in the list, their store, and the pool of host memory that it uses."""

    parts: dict[Part, StoredSegment]
    store: ActivationStore
    pool: HostPool


def needs_store(schedule: Schedule) -> bool:
    """Whether a list has segments, copies to host memory or second runs; otherwise stages keep what they save."""
    is_cut = any(number is not None for number in schedule.num_segments)
    return is_cut or schedule.has_any(Kind.OFFLOAD) or schedule.has_any(Kind.R)


def open_segments(
    schedule: Schedule,
    rank: int,
    stages: Mapping[Held, Stage],
    plan: MemoryPlan | None,
    recorder: Recorder,
    device: torch.device,
    poll: Callable[[], None],
    least_bytes: int = 0,
    host_limit_bytes: int | None = None,
) -> Segments:
    """Cut the stages of a rank into the segments of its list.

    Args:
        schedule: the lowered list.
        rank: the rank's place in the pipeline.
        stages: those on the rank.
        plan: the plan that the list was made from; None where stages run whole.
        recorder: gets bytes and spans.
        device: the rank's.
        poll: lets messages move.
        least_bytes: storages below stay on the device, where there is no plan that says it.
        host_limit_bytes: the most host memory that the rank may take; None for no limit.

    Raises:
        ConfigError: the list is not that of the plan.
    """
    where = f"rank {rank}"
    pool = HostPool(PinnedMemory(where) if device.type == "cuda" else PlainMemory(), where, host_limit_bytes)
    tensors = chain.from_iterable(
        chain(stage.modules.parameters(), stage.modules.buffers()) for stage in stages.values()
    )
    store = ActivationStore(
        schedule, open_copies(device), pool, recorder, device, tensors,
        least_bytes if plan is None else plan.least_bytes,
    )  # fmt: skip
    parts: dict[Part, StoredSegment] = {}
    for (direction, number), stage in stages.items():
        names = schedule.segments_of(number)
        whole = (Segment(0, len(stage.modules)),)
        cuts = whole if plan is None or names == (None,) else plan.stages[number]
        _check(plan, number, cuts, len(stage.modules), len(names))
        for name, cut in zip(names, cuts, strict=True):
            modules = nn.ModuleList(stage.modules[cut.first - cuts[0].first : cut.end - cuts[0].first])
            parts[direction, number, name] = StoredSegment(
                stage, modules, (direction, number), name or 0, name == names[-1], store, poll,
                cut.choice is Choice.SELECTIVE,
            )  # fmt: skip
    return Segments(parts, store, pool)


def _check(plan: MemoryPlan | None, stage: int, cuts: Sequence[Segment], num_layers: int, num_named: int) -> None:
    if len(cuts) != num_named or cuts[-1].end - cuts[0].first != num_layers:
        raise ConfigError(
            "memory plan",
            "none" if plan is None else plan.policy,
            f"stage {stage} has {num_layers} layers and {num_named} segments in the schedule, which the plan has not",
            "prepare the run anew",
        )

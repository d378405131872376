"""Open the stages that a rank's executor runs: whole, compiled, in strips, stored and wrapped."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import nn

from gems.autograd.compiled import check_compiler
from gems.autograd.convolutions import ConvolutionWatch
from gems.autograd.mixed import low_copies
from gems.autograd.random_draws import draws_numbers
from gems.engine.offload.activation_store import ActivationStore
from gems.engine.offload.host_pool import HostPool, PinnedMemory
from gems.engine.stage import SegmentKey, Stage, StageKey
from gems.engine.stages.graphed import Captures, GraphedStage
from gems.engine.stages.graphed_segment import GraphedSegment, SharedSlot
from gems.engine.stages.graphed_stored_strips import GraphedStoredStrips
from gems.engine.stages.graphed_strips import GraphedStrips
from gems.engine.stages.stored import StoredSegment
from gems.engine.stages.stored_strips import StoredStrips
from gems.engine.stages.streamed import StreamedStage, StripLayers
from gems.engine.stages.whole import CompiledStage, WholeStage
from gems.engine.stages.wrappers import wrap_stage
from gems.engine.supervision.recorder import Recorder
from gems.errors import ConfigError
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.slots import split_stages
from gems.schedule.action import Kind
from gems.schedule.schedule import Schedule
from gems.streaming.block_plan import Box
from gems.streaming.strip_run import Draws
from gems.streaming.strip_stage import StripStage

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OpenStages:
    """The stages that an executor runs.

    Attributes:
        whole: The stages, in one piece.
        by_key: What actions run: the same stages, or their segments.
        store: What the segments keep for backward, if the schedule moves or recomputes it.
        pool: The host memory of the store.
    """

    whole: Mapping[StageKey, Stage]
    by_key: Mapping[SegmentKey, Stage]
    store: ActivationStore | None = None
    pool: HostPool | None = None

    @classmethod
    def unstored(cls, stages: Mapping[StageKey, Stage]) -> OpenStages:
        """Return stages that keep their saved tensors themselves."""
        return cls(stages, {(*key, None): stage for key, stage in stages.items()})


@dataclass(frozen=True, slots=True)
class StageOptions:
    """How the stages of a rank run a schedule.

    Attributes:
        plan: Without a memory plan, each stage is one segment.
        min_offload_bytes: Smaller storages stay on the device, unless the plan has another limit.
        forms: The streaming forms of stages in strips.
        draws: The seeds of stages in strips.
        parts: The parts of maps that the last stage gives in strips, if each has its own loss.
        is_drawing: Tells which layers draw random numbers; these are neither compiled nor captured.
        compiles: Whether layers are compiled.
        captures: Whether stages are captured as CUDA graphs, if they are on a GPU.
        wrappers: The names of wrappers.
    """

    schedule: Schedule
    rank: int
    device: torch.device
    plan: MemoryPlan | None = None
    min_offload_bytes: int = 0
    host_limit_bytes: int | None = None
    forms: Mapping[StageKey, StripStage] = field(default_factory=dict)
    draws: Mapping[StageKey, Draws] = field(default_factory=dict)
    parts: Sequence[Box] | None = None
    is_drawing: Callable[[nn.Module], bool] = lambda _: False
    compiles: bool = False
    captures: bool = False
    wrappers: Sequence[str] = ()


def _needs_store(schedule: Schedule) -> bool:
    """Return whether a schedule has segments, offloads or recomputes.

    Otherwise, stages keep their saved tensors themselves.
    """
    has_segments = any(number is not None for number in schedule.num_segments)
    return has_segments or schedule.has_any(Kind.OFFLOAD) or schedule.has_any(Kind.R)


def open_stages(
    modules: Mapping[StageKey, nn.ModuleList],
    options: StageOptions,
    poll: Callable[[], None],
    recorder: Recorder,
) -> OpenStages:
    """Open the stages with these layers; `poll` lets messages move while they run.

    Raises:
        ConfigError: The schedule does not belong to the memory plan, or this machine cannot compile
            for the device.
    """
    schedule = options.schedule
    where = f"rank {options.rank}"
    if options.compiles:
        check_compiler(options.device)
    captures = _may_capture(options)
    pool = store = None
    if _needs_store(schedule):
        pinned = PinnedMemory(where) if options.device.type == "cuda" else None
        pool = HostPool(pinned, where, options.host_limit_bytes)
        store = _open_store(modules.values(), options, pool, recorder)
    slot = SharedSlot(store) if captures and store is not None else None
    whole: dict[StageKey, Stage] = {}
    by_key: dict[SegmentKey, Stage] = {}
    for key, layers in modules.items():
        stage = whole[key] = _open_stage(key, layers, options, poll, store, slot)
        name = schedule.first_segment(key[1])
        segments: Iterable[tuple[int | None, Stage]] = [(name, stage)]
        if store is not None and not options.forms:
            segments = _cut(stage, key, options, store, slot)
        elif captures and store is None:
            segments = [(name, _graphed(stage, key, options))]
        for name, segment in segments:
            by_key[*key, name] = wrap_stage(segment, (*key, name), options.wrappers)
    if store is None:
        whole = {key[:2]: stage for key, stage in by_key.items()}
    return OpenStages(whole, by_key, store, pool)


def _open_store(
    modules: Collection[nn.Module], options: StageOptions, pool: HostPool, recorder: Recorder
) -> ActivationStore:
    plan = options.plan
    tensors = (
        tensor
        for module in modules
        for tensor in chain(module.parameters(), module.buffers(), low_copies(module))
    )
    min_bytes = options.min_offload_bytes if plan is None else plan.least_bytes
    is_conv_only = plan is not None and plan.only_conv_inputs
    convolutions = ConvolutionWatch(*modules) if is_conv_only else None
    return ActivationStore(
        options.schedule, pool, recorder, options.device, tensors, min_bytes, convolutions
    )


def _open_stage(
    key: StageKey,
    layers: nn.ModuleList,
    options: StageOptions,
    poll: Callable[[], None],
    store: ActivationStore | None,
    slot: SharedSlot | None,
) -> WholeStage:
    """Open a stage in one piece; in strips, its saved tensors are in the store."""
    is_first = key[1] == 0
    if key in options.forms:
        is_last = key[1] == options.schedule.num_stages - 1
        in_strips = StripLayers(
            layers,
            options.forms[key],
            is_first,
            poll,
            options.device,
            options.draws[key],
            options.parts if is_last else None,
        )
        if store is None:
            return StreamedStage(in_strips)
        if slot is None:
            return StoredStrips(in_strips, key, store)
        graphed = GraphedStoredStrips(in_strips, key, store)
        graphed.use(slot, _captures_of_strips(key, options))
        return graphed
    if options.compiles:
        return CompiledStage(layers, is_first, poll, options.is_drawing)
    return WholeStage(layers, is_first, poll)


def _graphed(stage: WholeStage, key: StageKey, options: StageOptions) -> Stage:
    is_split = key in split_stages(options.schedule, options.rank)
    if isinstance(stage, StreamedStage):
        return GraphedStrips(stage, _captures_of_strips(key, options), is_split)
    return GraphedStage(stage, _captures(key, options), is_split)


def _has_draws(layer: nn.Module) -> bool:
    return any(map(draws_numbers, layer.modules()))


def _captures_of_strips(key: StageKey, options: StageOptions) -> Captures:
    # strips do not call the modules, so those that may draw have not run without drawing
    return replace(_captures(key, options), is_drawing=_has_draws)


def _captures(key: StageKey, options: StageOptions) -> Captures:
    name = f"stage {key[1]}" + (", upwards" if key[0] else "")
    return Captures(name, options.is_drawing)


def _may_capture(options: StageOptions) -> bool:
    """Return whether stages are captured as CUDA graphs; the first rank says why they are not."""
    if not options.captures:
        return False
    if options.device.type == "cuda":
        return True
    if options.rank == 0:
        _log.warning("train.cuda_graphs has no effect: the device is no GPU")
    return False


def _cut(
    stage: WholeStage,
    key: StageKey,
    options: StageOptions,
    store: ActivationStore,
    slot: SharedSlot | None,
) -> Iterator[tuple[int | None, Stage]]:
    """Yield the segments of a stage by the names that the schedule has for them."""
    number = key[1]
    plan = options.plan
    names = options.schedule.segments_of(number)
    layers = stage.modules
    whole = (Segment(0, len(layers)),)
    planned = whole if plan is None or names == (None,) else plan.stages[number]
    first = planned[0].first
    if len(planned) != len(names) or planned[-1].end - first != len(layers):
        raise ConfigError(
            "memory plan",
            "none" if plan is None else plan.policy,
            f"stage {number} has {len(layers)} layers and {len(names)} segments in the schedule,"
            " unlike in the plan",
            "prepare the run again",
        )
    captures = _captures(key, options)
    for name, segment in zip(names, planned, strict=True):
        is_selective = segment.choice is Choice.SELECTIVE
        modules = nn.ModuleList(layers[segment.first - first : segment.end - first])
        arguments = stage, modules, key, name or 0, name == names[-1], store, is_selective
        if slot is None:
            yield name, StoredSegment(*arguments)
            continue
        graphed = GraphedSegment(*arguments)
        graphed.use(slot, replace(captures))
        yield name, graphed

"""Segments of a stage: neighbouring layers under one memory policy, whose saved tensors are in the activation store."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import cast

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gems.autograd.memory_counter import storage_addresses
from gems.autograd.recompute.recompute import Recomputation, RecomputeContext
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.layers import SplitLayers
from gems.engine.activation_store.copies import open_copier
from gems.engine.activation_store.host_pool import HostPool, PageableMemory, PinnedMemory
from gems.engine.activation_store.segment_input import SegmentInput
from gems.engine.activation_store.store import ActivationStore, MicroBatchKey, SavedTensor
from gems.engine.stage import Loss, Stage, StageKey, gradient_edges, run_backward
from gems.engine.supervision.recorder import Recorder
from gems.errors import ConfigError
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.schedule.action import Kind
from gems.schedule.schedule import Schedule

SegmentKey = tuple[int, int, int | None]  # direction, stage, segment


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments on a rank, their store, and its pool of host memory."""

    by_key: dict[SegmentKey, StoredSegment]
    store: ActivationStore
    pool: HostPool


@dataclass(frozen=True, slots=True)
class _Graph:
    """What is left of a forward with a graph, which holds no memory but the store's managed tensors."""

    inputs: SegmentInput
    edges: tuple[GradientEdge | None, ...]
    deferred: DeferredGradients | None


@dataclass(frozen=True, slots=True)
class _PendingRecompute:
    """What is left of a forward that will be recomputed."""

    inputs: tuple[SavedTensor, ...]
    wanted: tuple[bool, ...]
    context: RecomputeContext
    is_split: bool


class StoredSegment(Stage):
    """Some layers of a stage, run as a `Stage` but with their saved tensors in the store.

    An output's `requires_grad` says whether its gradient is wanted, so that the gradients of a stage are those of its
    uncut graph.
    """

    def __init__(
        self,
        whole: Stage,
        modules: nn.ModuleList,
        stage_key: StageKey,
        number: int,
        is_last: bool,
        store: ActivationStore,
        poll: Callable[[], None],
        is_selective: bool = False,
    ) -> None:
        """Take the layers `modules` of the stage `whole`.

        Args:
            whole: the stage.
            modules: its layers that are in this segment.
            stage_key: direction and stage.
            number: of the segment in the stage, from 0.
            is_last: whether it is the stage's last.
            store: keeps what is saved.
            poll: lets messages move.
            is_selective: whether recomputation keeps outputs of matrix products.
        """
        super().__init__(modules, whole.is_first and number == 0, poll)
        self._whole, self._stage_key, self._number, self._is_last = whole, stage_key, number, is_last
        self._store = store
        self._recomputation = Recomputation(modules, is_selective)
        self._graphs: dict[int, _Graph] = {}
        self._recomputes: dict[int, _PendingRecompute] = {}
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        self._anchor: Tensor | None = None
        self._changed_inputs: frozenset[int] | None = None  # those that the layers change in place; None until known

    def split_layers(self) -> SplitLayers:
        """Return those of the whole stage."""
        return self._whole.split_layers()

    def forward(
        self, micro_batch: int, inputs: Sequence[Tensor], loss: Loss | None = None, is_split: bool = False
    ) -> tuple[Tensor, ...]:
        """Run the layers and keep in the store what autograd saves; see `Stage.forward`."""
        key = self._begin(micro_batch, inputs)
        outputs = self._record(
            micro_batch, inputs, self._wanted(inputs), is_split, lambda values: self._run(values, loss)
        )
        return self._outputs(key, outputs, [tensor.requires_grad for tensor in outputs])

    def forward_for_recompute(
        self, micro_batch: int, inputs: Sequence[Tensor], loss: Loss | None = None, is_split: bool = False
    ) -> tuple[Tensor, ...]:
        """Run the layers and keep only what `recompute` needs, mainly the inputs; see `Stage.forward`."""
        key = self._begin(micro_batch, inputs)
        wanted = self._wanted(inputs)
        saved = tuple(self._store.save(key, self._number, tensor) for tensor in inputs)
        _, values = SegmentInput.enter(inputs, wanted, self._anchor_for(inputs))
        with self._deferring_to(DeferredGradients() if is_split else None):
            outputs, context = self._recomputation.forward(values, lambda given: self._run_on_copies(given, loss))
        self._store_matmuls(key, context)
        self._recomputes[micro_batch] = _PendingRecompute(saved, wanted, context, is_split)
        has_graph = any(wanted) or any(parameter.requires_grad for parameter in self.modules.parameters())
        return self._outputs(key, outputs, [has_graph and tensor.is_floating_point() for tensor in outputs])

    def recompute(self, micro_batch: int, loss: Loss | None = None) -> None:
        """Run the layers again, now keeping in the store what backward needs.

        Args:
            micro_batch: as given to `forward_for_recompute`.
            loss: on the last stage, what makes a scalar of its one output.

        Raises:
            RuntimeError: an input was changed in place meanwhile.
        """
        pending = self._recomputes.pop(micro_batch)
        inputs = [self._store.load(saved) for saved in pending.inputs]
        self._load_matmuls(pending.context)

        def run(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return self._run(self._copy_changed(given), loss)

        self._record(
            micro_batch, inputs, pending.wanted, pending.is_split,
            lambda values: self._recomputation.recompute(values, pending.context, run),
        )  # fmt: skip

    def backward(self, micro_batch: int, gradients: Sequence[Tensor]) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Add to the parameters' gradients, and free what only this segment needed.

        Returns:
            The gradients of the floating-point inputs (None inside of a stage for one without), and on the first
            segment the stage's inputs, which nothing reads any more.
        """
        found = self._backward_graph(self._graphs.pop(micro_batch), gradients)
        self._store.end_backward(self._key(micro_batch), self._number)
        return found, self._inputs.pop(micro_batch, ())

    def backward_input(
        self, micro_batch: int, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Compute the input gradients, and keep what the weight gradients need, on the device."""
        graph = self._graphs.pop(micro_batch)
        assert graph.deferred is not None
        with self._deferring_to(graph.deferred):
            found = self._backward_graph(graph, gradients)
        self._deferred[micro_batch] = graph.deferred
        received = storage_addresses(gradients) if self._is_last else set()
        needed = [t for t in graph.deferred.tensors() if t.untyped_storage().data_ptr() not in received]
        self._store.end_backward(self._key(micro_batch), self._number, needed)
        return found, self._inputs.pop(micro_batch, ())

    def backward_weight(self, micro_batch: int) -> None:
        """Add the weight gradients that `backward_input` deferred, and free what it kept."""
        super().backward_weight(micro_batch)
        self._store.end_weight_gradients(self._key(micro_batch), self._number)

    def reset(self) -> None:
        """Drop all micro-batches in flight; the store is reset by its owner."""
        super().reset()
        self._graphs.clear()
        self._recomputes.clear()
        self._inputs.clear()

    @property
    def num_in_flight(self) -> int:
        """Micro-batches whose backward, or the rest of it, is still to come."""
        return len(self._graphs) + len(self._recomputes) + len(self._deferred)

    def _key(self, micro_batch: int) -> MicroBatchKey:
        return (*self._stage_key, micro_batch)

    def _begin(self, micro_batch: int, inputs: Sequence[Tensor]) -> MicroBatchKey:
        key = self._key(micro_batch)
        if self._number == 0:
            self._store.begin(key, inputs)
            self._inputs[micro_batch] = tuple(inputs)
        return key

    def _wanted(self, inputs: Sequence[Tensor]) -> tuple[bool, ...]:
        if self._number:
            return tuple(tensor.requires_grad for tensor in inputs)
        return tuple(tensor.is_floating_point() and not self.is_first for tensor in inputs)

    def _anchor_for(self, inputs: Sequence[Tensor]) -> Tensor:
        if self._anchor is None:
            self._anchor = torch.zeros(1, device=inputs[0].device, requires_grad=True)
        return self._anchor

    def _record(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        wanted: tuple[bool, ...],
        is_split: bool,
        run: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Run the layers with a graph and keep its edges."""
        deferred = DeferredGradients() if is_split else None
        segment_input, values = SegmentInput.enter(inputs, wanted, self._anchor_for(inputs))
        with self._deferring_to(deferred), self._store.saved_tensor_hooks(self._key(micro_batch), self._number):
            outputs = run(values)
        self._graphs[micro_batch] = _Graph(segment_input, gradient_edges(outputs), deferred)
        return outputs

    def _outputs(self, key: MicroBatchKey, outputs: Sequence[Tensor], wanted: Sequence[bool]) -> tuple[Tensor, ...]:
        self._store.record_outputs(key, self._number, outputs)
        made = tuple(tensor.detach() for tensor in outputs)
        if self._is_last:
            return made
        return tuple(tensor.requires_grad_(is_wanted) for tensor, is_wanted in zip(made, wanted, strict=True))

    def _backward_graph(self, graph: _Graph, gradients: Sequence[Tensor]) -> tuple[Tensor, ...]:
        run_backward(graph.edges, gradients)
        # inside of a stage some may be None, which the segment before expects
        return cast("tuple[Tensor, ...]", graph.inputs.gradients(is_first=self._number == 0))

    def _run_on_copies(self, given: tuple[Tensor, ...], loss: Loss | None) -> tuple[Tensor, ...]:
        """Run the layers on copies of the inputs that they change in place; the first call finds out which."""
        if self._changed_inputs is not None:
            return self._run(self._copy_changed(given), loss)
        copies = tuple(tensor.clone() for tensor in given)
        versions = [tensor._version for tensor in copies]
        outputs = self._run(copies, loss)
        changed = {
            index
            for index, (tensor, version) in enumerate(zip(copies, versions, strict=True))
            if tensor._version != version
        }
        self._changed_inputs = frozenset(changed)
        originals = {
            copy.untyped_storage()._cdata: tensor
            for index, (copy, tensor) in enumerate(zip(copies, given, strict=True))
            if index not in changed and copy.stride() == tensor.stride()
        }
        return tuple(_view_of_original(originals.get(tensor.untyped_storage()._cdata), tensor) for tensor in outputs)

    def _copy_changed(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = self._changed_inputs or frozenset()
        return tuple(tensor.clone() if index in changed else tensor for index, tensor in enumerate(given))

    def _store_matmuls(self, key: MicroBatchKey, context: RecomputeContext) -> None:
        """Save outputs of matrix products in the store, so that they may be offloaded too."""
        for entry in () if context.matmuls is None else context.matmuls.entries:
            entry.outputs = tuple(
                self._store.save(key, self._number, value) if isinstance(value, Tensor) else value
                for value in entry.outputs
            )

    def _load_matmuls(self, context: RecomputeContext) -> None:
        for entry in () if context.matmuls is None else context.matmuls.entries:
            # what a later layer has changed is recomputed
            is_valid = not any(isinstance(value, SavedTensor) and value.is_changed for value in entry.outputs)
            entry.outputs = tuple(
                self._store.load(value) if isinstance(value, SavedTensor) else value
                for value in (entry.outputs if is_valid else ())
            )


def _view_of_original(original: Tensor | None, tensor: Tensor) -> Tensor:
    """Return a view of a copy as the same view of what was copied."""
    if original is None or original.dtype is not tensor.dtype:
        return tensor
    offset = original.storage_offset() + tensor.storage_offset()
    return original.as_strided(tensor.size(), tensor.stride(), offset)


def needs_store(schedule: Schedule) -> bool:
    """Return whether a schedule has segments, offloads or recomputes; otherwise stages keep what they save."""
    has_segments = any(number is not None for number in schedule.num_segments)
    return has_segments or schedule.has_any(Kind.OFFLOAD) or schedule.has_any(Kind.R)


def open_segments(
    schedule: Schedule,
    rank: int,
    stages: Mapping[StageKey, Stage],
    plan: MemoryPlan | None,
    recorder: Recorder,
    device: torch.device,
    poll: Callable[[], None],
    min_offload_bytes: int = 0,
    host_limit_bytes: int | None = None,
) -> Segments:
    """Split the stages of a rank into the segments of its schedule.

    Args:
        schedule: lowered.
        rank: in the pipeline.
        stages: those on the rank.
        plan: the memory plan that the schedule was made with; None if stages run whole.
        recorder: gets bytes and spans.
        device: the rank's.
        poll: lets messages move.
        min_offload_bytes: smaller storages stay on the device, if there is no plan.
        host_limit_bytes: the most host memory of the rank; None for no limit.

    Raises:
        ConfigError: the schedule is not that of the plan.
    """
    where = f"rank {rank}"
    pool = HostPool(PinnedMemory(where) if device.type == "cuda" else PageableMemory(), where, host_limit_bytes)
    tensors = chain.from_iterable(
        chain(stage.modules.parameters(), stage.modules.buffers()) for stage in stages.values()
    )
    store = ActivationStore(
        schedule, open_copier(device), pool, recorder, device, tensors,
        min_offload_bytes if plan is None else plan.least_bytes,
    )  # fmt: skip
    by_key: dict[SegmentKey, StoredSegment] = {}
    for (direction, number), stage in stages.items():
        names = schedule.segments_of(number)
        whole = (Segment(0, len(stage.modules)),)
        planned = whole if plan is None or names == (None,) else plan.stages[number]
        first = planned[0].first
        if len(planned) != len(names) or planned[-1].end - first != len(stage.modules):
            raise ConfigError(
                "memory plan", "none" if plan is None else plan.policy,
                f"stage {number} has {len(stage.modules)} layers and {len(names)} segments in the schedule, "
                "unlike in the plan", "prepare the run again",
            )  # fmt: skip
        for name, segment in zip(names, planned, strict=True):
            by_key[direction, number, name] = StoredSegment(
                stage, nn.ModuleList(stage.modules[segment.first - first : segment.end - first]), (direction, number),
                name or 0, name == names[-1], store, poll, segment.choice is Choice.SELECTIVE,
            )  # fmt: skip
    return Segments(by_key, store, pool)

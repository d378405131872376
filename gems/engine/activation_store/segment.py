"""Segments of a stage: neighbouring layers under one memory policy, in the activation store."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function

from gems.autograd.convolutions import ConvolutionWatch
from gems.autograd.mixed import low_copies
from gems.autograd.recompute.recompute import Recomputation, RecomputeContext
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.layers import SplitLayers
from gems.autograd.storages import storage_addresses
from gems.engine.activation_store.copies import CpuCopier, CudaCopier
from gems.engine.activation_store.host_pool import HostPool, PinnedMemory
from gems.engine.activation_store.saved_tensor_table import SavedTensor
from gems.engine.activation_store.store import ActivationStore, MicroBatchKey
from gems.engine.activation_store.stored_strips import StoredStrips
from gems.engine.stage import Loss, Stage, StageKey, Stash, gradient_edges, run_backward
from gems.engine.strips.stage import StageInStrips
from gems.engine.supervision.recorder import Recorder
from gems.errors import ConfigError
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.schedule.action import Kind
from gems.schedule.schedule import Schedule

Layout = tuple[torch.Size, tuple[int, ...], torch.dtype, torch.device]  # second: strides


def _gradient_layout(tensor: Tensor) -> Layout:
    """Return the layout in which autograd keeps the gradient of a leaf."""
    is_dense = torch.ops.aten.is_non_overlapping_and_dense(tensor)
    stride = tensor.stride() if is_dense else torch.empty(tensor.size(), device="meta").stride()
    return tensor.size(), stride, tensor.dtype, tensor.device


def _in_layout(gradient: Tensor | None, layout: Layout) -> Tensor:
    """Return a gradient in a layout, or zeros if the gradient is None."""
    size, stride, dtype, device = layout
    if gradient is not None:
        same = zip(gradient.size(), gradient.stride(), stride, strict=True)
        if all(mine == its or count == 1 for count, mine, its in same):
            return gradient
    made = torch.empty_strided(size, stride, dtype=dtype, device=device)
    return made.zero_() if gradient is None else made.copy_(gradient)


@dataclass(slots=True)
class SegmentInput:
    """The inputs of one forward, and the gradients that backward has computed for wanted inputs.

    A graph holds a leaf that requires a gradient until backward, saved or not. So the graph begins
    at an anchor of one element instead, and the inputs bypass it.
    """

    wanted: tuple[bool, ...]
    layouts: tuple[Layout | None, ...]
    _caught: list[Tensor | None] = field(default_factory=list)

    @classmethod
    def enter(
        cls, inputs: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[SegmentInput, tuple[Tensor, ...]]:
        """Pass inputs into a new graph; those in `wanted` get a gradient.

        Returns:
            The segment's input, and the tensors for its layers, which share the memory of the
                inputs and are no leaves.
        """
        layouts = tuple(
            _gradient_layout(tensor) if tensor.is_floating_point() else None for tensor in inputs
        )
        made = cls(tuple(wanted), layouts)
        values = [tensor.detach() for tensor in inputs]
        indices = [index for index, is_wanted in enumerate(wanted) if is_wanted]
        if indices:
            passed = _pass(
                _anchor(inputs[0].device), made._caught, *(values[index] for index in indices)
            )
            for index, value in zip(indices, passed, strict=True):
                values[index] = value
        return made, tuple(values)

    def gradients(self, is_first: bool) -> tuple[Tensor | None, ...]:
        """Return the gradients of the floating-point inputs, and drop them.

        The gradients of a stage's first segment are complete and have the layout of their inputs.
        In later segments, an input without a gradient gives None to the segment before it, as in an
        uncut graph.
        """
        caught = iter(self._caught or [None] * sum(self.wanted))
        found: list[Tensor | None] = []
        for is_wanted, layout in zip(self.wanted, self.layouts, strict=True):
            gradient = next(caught) if is_wanted else None
            if layout is not None and (is_wanted or not is_first):
                found.append(_in_layout(gradient, layout) if is_first else gradient)
        self._caught.clear()
        return tuple(found)


class _Pass(Function):
    """Pass tensors through and catch their gradients."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, caught: list[Tensor | None], *tensors: Tensor
    ) -> tuple[Tensor, ...]:
        ctx.caught = caught
        ctx.set_materialize_grads(False)
        # a detached tensor is separate, so the layers may change it in place
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[None, ...]:
        ctx.caught[:] = gradients
        return (None, None, *(None for _ in gradients))


_pass: Callable[..., tuple[Tensor, ...]] = _Pass.apply


@functools.cache
def _anchor(device: torch.device) -> Tensor:
    return torch.zeros(1, device=device, requires_grad=True)  # never gets a gradient


SegmentKey = tuple[int, int, int | None]  # direction, stage, segment


@dataclass(frozen=True, slots=True)
class Segments:
    """The segments on a rank, their store, and their pool of host memory."""

    by_key: dict[SegmentKey, StoredSegment | StoredStrips]
    store: ActivationStore
    pool: HostPool


# What remains of a forward that will be recomputed: its inputs, whether each wants a gradient, the
# context, and `is_split`.
PendingRecompute = tuple[tuple[SavedTensor, ...], tuple[bool, ...], RecomputeContext, bool]


class StoredSegment(Stage):
    """Some layers of a stage, run as a `Stage` but with their saved tensors in the store.

    An output's `requires_grad` says whether its gradient is wanted, so that the gradients of a
    stage equal those of its uncut graph.
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
        """Take the layers `modules` of the stage `whole`, whose segments are numbered from 0.

        If `is_selective`, recomputation keeps the outputs of matrix products.
        """
        super().__init__(modules, whole.is_first and number == 0, poll)
        self._whole = whole
        self._stage_key = stage_key
        self._number = number
        self._is_last = is_last
        self._store = store
        self._recomputation = Recomputation(modules, is_selective)
        self.stash_bytes = self.held_for_weights_bytes = 0  # the store counts them
        self._recomputes: dict[int, PendingRecompute] = {}
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        # inputs that the layers change in place; None until known
        self._changed_inputs: frozenset[int] | None = None

    def split_layers(self) -> SplitLayers:
        """Return the split layers of the whole stage."""
        return self._whole.split_layers()

    def forward(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run the layers and put what autograd saves into the store; see `Stage.forward`."""
        key = self._begin(micro_batch, inputs)
        wanted = self._wanted(inputs)
        outputs = self._record(
            micro_batch, inputs, wanted, is_split, lambda values: self._run(values, loss)
        )
        return self._outputs(key, outputs, [tensor.requires_grad for tensor in outputs])

    def forward_for_recompute(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
    ) -> tuple[Tensor, ...]:
        """Run the layers and keep only what `recompute` needs, mainly the inputs.

        See `Stage.forward`.
        """
        key = self._begin(micro_batch, inputs)
        wanted = self._wanted(inputs)
        saved = tuple(self._store.save(key, self._number, tensor) for tensor in inputs)
        _, values = SegmentInput.enter(inputs, wanted)
        with self._deferring_to(DeferredGradients() if is_split else None):
            outputs, context = self._recomputation.forward(
                values, lambda given: self._run_on_copies(given, loss)
            )
        for entry in context.matmuls or ():  # saved in the store, so that they may be offloaded too
            entry.outputs = tuple(
                self._store.save(key, self._number, value) if isinstance(value, Tensor) else value
                for value in entry.outputs
            )
        self._recomputes[micro_batch] = saved, wanted, context, is_split
        has_graph = any(wanted) or any(
            parameter.requires_grad for parameter in self.modules.parameters()
        )
        return self._outputs(
            key, outputs, [has_graph and tensor.is_floating_point() for tensor in outputs]
        )

    def recompute(self, micro_batch: int, loss: Loss | None = None) -> None:
        """Run the layers again, and put what backward needs into the store.

        Raises:
            RuntimeError: An input was changed in place in the meantime.
        """
        saved, wanted, context, is_split = self._recomputes.pop(micro_batch)
        inputs = [self._store.load(tensor) for tensor in saved]
        for entry in context.matmuls or ():
            if any(isinstance(value, SavedTensor) and value.is_changed for value in entry.outputs):
                entry.outputs = ()  # what a later layer has changed is recomputed
            entry.outputs = tuple(
                self._store.load(value) if isinstance(value, SavedTensor) else value
                for value in entry.outputs
            )

        def run(given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return self._run(self._copy_changed(given), loss)

        self._record(
            micro_batch,
            inputs,
            wanted,
            is_split,
            lambda values: self._recomputation.recompute(values, context, run),
        )

    def backward(
        self, micro_batch: int, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Add to the parameters' gradients, and free what only this segment needed.

        Returns:
            The gradients of the floating-point inputs (None within a stage for an input without a
                gradient), and on the first segment the stage's inputs, which nothing reads any
                more.
        """
        found = super().backward(micro_batch, gradients)
        self._store.end_backward(self._key(micro_batch), self._number)
        return found

    def backward_input(
        self, micro_batch: int, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        """Compute the input gradients, and keep on the device what the weight gradients need."""
        found = super().backward_input(micro_batch, gradients)
        received = storage_addresses(gradients) if self._is_last else set()
        kept = self._deferred[micro_batch].tensors()
        needed = [tensor for tensor in kept if tensor.untyped_storage().data_ptr() not in received]
        self._store.end_backward(self._key(micro_batch), self._number, needed)
        return found

    def backward_weight(self, micro_batch: int) -> None:
        """Add the weight gradients that `backward_input` deferred, and free what it kept."""
        super().backward_weight(micro_batch)
        self._store.end_weight_gradients(self._key(micro_batch), self._number)

    def reset(self) -> None:
        """Drop all micro-batches in flight; the store is reset by its owner."""
        super().reset()
        self._recomputes.clear()
        self._inputs.clear()

    @property
    def num_in_flight(self) -> int:
        """Return the number of micro-batches whose backward is not complete."""
        return super().num_in_flight + len(self._recomputes)

    def _key(self, micro_batch: int) -> MicroBatchKey:
        return (*self._stage_key, micro_batch)

    def _begin(self, micro_batch: int, inputs: Sequence[Tensor]) -> MicroBatchKey:
        key = self._key(micro_batch)
        if self._number == 0:
            self._store.begin(key, inputs)
            self._inputs[micro_batch] = () if self._store.takes_inputs(key) else tuple(inputs)
        return key

    def _wanted(self, inputs: Sequence[Tensor]) -> tuple[bool, ...]:
        if self._number:
            return tuple(tensor.requires_grad for tensor in inputs)
        return tuple(tensor.is_floating_point() and not self.is_first for tensor in inputs)

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
        segment_input, values = SegmentInput.enter(inputs, wanted)
        with (
            self._deferring_to(deferred),
            self._store.saved_tensor_hooks(self._key(micro_batch), self._number),
        ):
            outputs = run(values)
        self._stash[micro_batch] = Stash(segment_input, gradient_edges(outputs), deferred)
        return outputs

    def _outputs(
        self, key: MicroBatchKey, outputs: Sequence[Tensor], wanted: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        self._store.record_outputs(key, self._number, outputs)
        made = tuple(tensor.detach() for tensor in outputs)
        if self._is_last:
            return made
        return tuple(
            tensor.requires_grad_(is_wanted) for tensor, is_wanted in zip(made, wanted, strict=True)
        )

    def _backward(
        self, micro_batch: int, stash: Stash, gradients: Sequence[Tensor]
    ) -> tuple[tuple[Tensor, ...], tuple[Tensor, ...]]:
        run_backward(stash.edges, gradients)
        # within a stage some may be None, which the segment before expects
        return stash.inputs.gradients(is_first=self._number == 0), self._inputs.pop(micro_batch, ())

    def _run_on_copies(self, given: tuple[Tensor, ...], loss: Loss | None) -> tuple[Tensor, ...]:
        """Run the layers on copies of the inputs that they change in place.

        The first call finds out which inputs these are.
        """
        if self._changed_inputs is not None:
            return self._run(self._copy_changed(given), loss)
        copies = tuple(tensor.clone() for tensor in given)
        versions = [tensor._version for tensor in copies]
        outputs = self._run(copies, loss)
        self._changed_inputs = frozenset(
            i for i, copy in enumerate(copies) if copy._version != versions[i]
        )
        originals = {
            copy.untyped_storage()._cdata: given[i]
            for i, copy in enumerate(copies)
            if i not in self._changed_inputs and copy.stride() == given[i].stride()
        }
        return tuple(
            _view_of_original(originals.get(tensor.untyped_storage()._cdata), tensor)
            for tensor in outputs
        )

    def _copy_changed(self, given: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = self._changed_inputs or frozenset()
        return tuple(
            tensor.clone() if index in changed else tensor for index, tensor in enumerate(given)
        )


def _view_of_original(original: Tensor | None, tensor: Tensor) -> Tensor:
    """Return a view of a copy as the same view of the original."""
    if original is None or original.dtype is not tensor.dtype:
        return tensor
    offset = original.storage_offset() + tensor.storage_offset()
    return original.as_strided(tensor.size(), tensor.stride(), offset)


def needs_store(schedule: Schedule) -> bool:
    """Return whether a schedule has segments, offloads or recomputes.

    Otherwise, stages keep their saved tensors themselves.
    """
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
    by_key: dict[SegmentKey, StoredSegment | StoredStrips] = {}
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
        if isinstance(stage, StageInStrips):
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

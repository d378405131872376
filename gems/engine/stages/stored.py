"""Segments of a stage: neighbouring layers under one memory policy, in the activation store."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn

from gems.autograd.recompute.recompute import Recomputation, RecomputeContext
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.layers import SplitLayers
from gems.autograd.storages import storage_addresses
from gems.engine.offload.activation_store import ActivationStore, MicroBatchKey
from gems.engine.offload.saved_tensor_table import SavedTensor
from gems.engine.stage import Loss, StageKey, Tensors
from gems.engine.stages.segment_input import SegmentInput
from gems.engine.stages.whole import Stash, WholeStage, gradient_edges, run_backward


class Stored(WholeStage):
    """A stage, or segment `number` of one, whose saved tensors are in the store.

    The store counts the kept bytes. What a forward leaves that will be run again is in `_pending`.
    """

    def keep_in(
        self, store: ActivationStore, stage_key: StageKey, number: int = 0, is_last: bool = True
    ) -> None:
        """Take the store, and which segment of a stage this is."""
        self._store = store
        self._stage_key = stage_key
        self._number = number
        self._is_last = is_last
        self._pending: dict[int, Any] = {}

    def backward(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Run the backward, and free what only this segment needed."""
        input_grads = super().backward(index, gradients)
        self._store.end_backward(self._key(index), self._number)
        return input_grads

    def backward_input(self, index: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Compute the input gradients, and keep on the device what the weight gradients need."""
        input_grads = super().backward_input(index, gradients)
        received = storage_addresses(gradients) if self._is_last else set()
        deferred = self._deferred[index].tensors()
        needed = [
            tensor for tensor in deferred if tensor.untyped_storage().data_ptr() not in received
        ]
        self._store.end_backward(self._key(index), self._number, needed)
        return input_grads

    def backward_weight(self, index: int) -> None:
        """Add the weight gradients that `backward_input` deferred, and free what it kept."""
        super().backward_weight(index)
        self._store.end_weight_gradients(self._key(index), self._number)

    def brought_bytes(self, index: int) -> int:
        """Return nothing, like the two below: the store counts."""
        return 0

    def kept_bytes(self, index: int) -> int:
        """Return nothing."""
        return 0

    def held_bytes(self, index: int) -> int:
        """Return nothing."""
        return 0

    def reset(self) -> None:
        """Drop all micro-batches in flight; the store is reset by its owner."""
        super().reset()
        self._pending.clear()

    @property
    def num_in_flight(self) -> int:
        """Return the number of micro-batches whose backward is not complete."""
        return super().num_in_flight + len(self._pending)

    def _key(self, index: int) -> MicroBatchKey:
        return (*self._stage_key, index)


# What remains of a forward that will be recomputed: its inputs, whether each wants a gradient, the
# context, and `is_split`.
PendingRecompute = tuple[tuple[SavedTensor, ...], tuple[bool, ...], RecomputeContext, bool]


class StoredSegment(Stored):
    """Some layers of a stage, run as a `Stage` but with their saved tensors in the store.

    An output's `requires_grad` says whether its gradient is wanted, so that the gradients of a
    stage equal those of its uncut graph.
    """

    def __init__(
        self,
        whole: WholeStage,
        modules: nn.ModuleList,
        stage_key: StageKey,
        number: int,
        is_last: bool,
        store: ActivationStore,
        is_selective: bool = False,
    ) -> None:
        """Take the layers `modules` of the stage `whole`, whose segments are numbered from 0.

        If `is_selective`, recomputation keeps the outputs of matrix products.
        """
        super().__init__(modules, whole.is_first and number == 0, whole.poll)
        self.keep_in(store, stage_key, number, is_last)
        self._whole = whole
        self._recomputation = Recomputation(modules, is_selective)
        self._inputs: dict[int, tuple[Tensor, ...]] = {}
        # inputs that the layers change in place; None until known
        self._changed_inputs: frozenset[int] | None = None

    def split_layers(self) -> SplitLayers:
        """Return the split layers of the whole stage."""
        return self._whole.split_layers()

    def forward(
        self,
        index: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
        is_run_again: bool = False,
    ) -> Tensors:
        """Run the layers and put what autograd saves into the store.

        If it `is_run_again`, keep only what `recompute` needs, mainly the inputs.
        """
        self._begin(index, inputs)
        wanted = self._wanted(inputs)
        if is_run_again:
            outputs = self._run_once(index, inputs, wanted, loss, is_split)
            parameters = self.modules.parameters()
            has_graph = any(wanted) or any(parameter.requires_grad for parameter in parameters)
            flags = [has_graph and tensor.is_floating_point() for tensor in outputs]
        else:
            outputs = self._record(
                index, inputs, wanted, is_split, lambda values: self.run_layers(values, loss)
            )
            flags = [tensor.requires_grad for tensor in outputs]
        return self._pass_on(index, outputs, flags)

    def recompute(
        self, index: int, loss: Loss | None = None, images: Sequence[Tensor] = ()
    ) -> None:
        """Run the layers again, and put what backward needs into the store.

        Raises:
            RuntimeError: An input was changed in place in the meantime.
        """
        pending: PendingRecompute = self._pending.pop(index)
        saved, wanted, context, is_split = pending
        inputs = [self._store.load(tensor) for tensor in saved]
        for entry in context.matmuls or ():
            if any(isinstance(value, SavedTensor) and value.is_changed for value in entry.outputs):
                entry.outputs = ()  # what a later layer has changed is recomputed
            entry.outputs = tuple(
                self._store.load(value) if isinstance(value, SavedTensor) else value
                for value in entry.outputs
            )

        def run(values: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            return self.run_layers(self._copy_changed(values), loss)

        self._record(
            index,
            inputs,
            wanted,
            is_split,
            lambda values: self._recomputation.recompute(values, context, run),
        )

    def reset(self) -> None:
        """Drop all micro-batches in flight; the store is reset by its owner."""
        super().reset()
        self._inputs.clear()

    def _begin(self, index: int, inputs: Sequence[Tensor]) -> None:
        if self._number == 0:
            key = self._key(index)
            self._store.begin(key, inputs)
            self._inputs[index] = () if self._store.takes_inputs(key) else tuple(inputs)

    def _pass_on(self, index: int, outputs: Tensors, flags: Sequence[bool]) -> Tensors:
        """Return the outputs without their graph; `flags` say which ask for a gradient."""
        self._store.record_outputs(self._key(index), self._number, outputs)
        detached = tuple(tensor.detach() for tensor in outputs)
        if self._is_last:
            return detached
        return tuple(
            tensor.requires_grad_(is_wanted)
            for tensor, is_wanted in zip(detached, flags, strict=True)
        )

    def _run_once(
        self,
        index: int,
        inputs: Sequence[Tensor],
        wanted: tuple[bool, ...],
        loss: Loss | None,
        is_split: bool,
    ) -> Tensors:
        """Run the layers without keeping their graph."""
        key = self._key(index)
        saved = tuple(self._store.save(key, self._number, tensor) for tensor in inputs)
        _, values = SegmentInput.enter(inputs, wanted)
        with self.deferring_to(DeferredGradients() if is_split else None):
            outputs, context = self._recomputation.forward(
                values, lambda copies: self._run_on_copies(copies, loss)
            )
        for entry in context.matmuls or ():  # saved in the store, so that they may be offloaded too
            entry.outputs = tuple(
                self._store.save(key, self._number, value) if isinstance(value, Tensor) else value
                for value in entry.outputs
            )
        self._pending[index] = saved, wanted, context, is_split
        return outputs

    def _wanted(self, inputs: Sequence[Tensor]) -> tuple[bool, ...]:
        if self._number:
            return tuple(tensor.requires_grad for tensor in inputs)
        return tuple(tensor.is_floating_point() and not self.is_first for tensor in inputs)

    def _record(
        self,
        index: int,
        inputs: Sequence[Tensor],
        wanted: tuple[bool, ...],
        is_split: bool,
        run: Callable[[tuple[Tensor, ...]], tuple[Tensor, ...]],
    ) -> tuple[Tensor, ...]:
        """Run the layers with a graph and keep its edges."""
        deferred = DeferredGradients() if is_split else None
        segment_input, values = SegmentInput.enter(inputs, wanted)
        with (
            self.deferring_to(deferred),
            self._store.saved_tensor_hooks(self._key(index), self._number),
        ):
            outputs = run(values)
        self._stash[index] = Stash(segment_input, gradient_edges(outputs), deferred)
        return outputs

    def _backward(
        self, index: int, stash: Stash, gradients: Sequence[Tensor]
    ) -> tuple[Any, Tensors]:
        run_backward(stash.edges, gradients)
        # within a stage some may be None, which the segment before expects
        return stash.inputs.gradients(is_first=self._number == 0), self._inputs.pop(index, ())

    def _run_on_copies(self, inputs: tuple[Tensor, ...], loss: Loss | None) -> tuple[Tensor, ...]:
        """Run the layers on copies of the inputs that they change in place.

        The first call finds out which inputs these are.
        """
        if self._changed_inputs is not None:
            return self.run_layers(self._copy_changed(inputs), loss)
        copies = tuple(tensor.clone() for tensor in inputs)
        versions = [tensor._version for tensor in copies]
        outputs = self.run_layers(copies, loss)
        self._changed_inputs = frozenset(
            i for i, copy in enumerate(copies) if copy._version != versions[i]
        )
        originals = {
            copy.untyped_storage()._cdata: inputs[i]
            for i, copy in enumerate(copies)
            if i not in self._changed_inputs and copy.stride() == inputs[i].stride()
        }
        return tuple(
            _view_of_original(originals.get(tensor.untyped_storage()._cdata), tensor)
            for tensor in outputs
        )

    def _copy_changed(self, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        changed = self._changed_inputs or frozenset()
        return tuple(
            tensor.clone() if index in changed else tensor for index, tensor in enumerate(inputs)
        )


def _view_of_original(original: Tensor | None, tensor: Tensor) -> Tensor:
    """Return a view of a copy as the same view of the original."""
    if original is None or original.dtype is not tensor.dtype:
        return tensor
    offset = original.storage_offset() + tensor.storage_offset()
    return original.as_strided(tensor.size(), tensor.stride(), offset)

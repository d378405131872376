"""Stages in strips whose saved tensors are in the activation store.

Recomputed, or in host memory, strip by strip.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import NamedTuple

from torch import Tensor

from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.storages import storage_addresses
from gems.engine.activation_store.saved_tensor_table import SavedTensor
from gems.engine.activation_store.store import ActivationStore, MicroBatchKey
from gems.engine.stage import Loss, StageKey, Stash
from gems.engine.strips.stage import Image, StageInStrips, Tensors


class _Pending(NamedTuple):
    """What is left of the forward of a strip that will be run again; None stands for no input."""

    given: Tensors  # what stays of the inputs
    inputs: list[SavedTensor | None]
    carried: list[Tensor | SavedTensor]  # of what weights alone determine the tensor itself
    has_gradient: list[bool]  # of what was carried
    is_split: bool


class StoredStrips(StageInStrips):
    """Keeps in the store what strips save, so that each can be recomputed or copied to the host.

    A strip that is run again keeps its inputs and the tensors carried to it. The loss is computed
    once, and its saved tensors stay. Tensors carried between strips are counted here, everything
    else by the store.
    """

    def __init__(self, whole: StageInStrips, stage_key: StageKey, store: ActivationStore) -> None:
        """Take over a stage."""
        super().__init__(
            whole.modules,
            whole.is_first,
            whole.poll,
            whole.form,
            whole.takes,
            whole.device,
            whole.draws,
        )
        self._stage_key = stage_key
        self._store = store
        self._pending: dict[int, _Pending] = {}

    def forward(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
    ) -> Tensors:
        """Run a strip and keep in the store what autograd saves; see `StageInStrips.forward`."""
        image, strip, rows = self._begin(micro_batch, inputs)
        deferred = DeferredGradients() if is_split else None
        with self._hooks(micro_batch):
            outputs = self._run_strip(image, strip, rows, loss, deferred)
        self._stash[micro_batch] = Stash(self._staying(micro_batch, rows), (), deferred)
        return self._end(micro_batch, image, outputs, loss)

    def forward_for_recompute(
        self,
        micro_batch: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
    ) -> Tensors:
        """Run a strip and keep only what `recompute` needs; see `StageInStrips.forward`."""
        image, strip, rows = self._begin(micro_batch, inputs)
        key = self._key(micro_batch)
        carried = image.sample.carried
        static = storage_addresses(image.sample.static)
        given = self.takes.given(rows, strip, self.device)
        self._pending[micro_batch] = _Pending(
            self._staying(micro_batch, rows),
            [None if each is None else self._store.save(key, 0, each) for each in given],
            [
                each if storage_addresses([each]) & static else self._store.save(key, 0, each)
                for each in carried
            ],
            [each.requires_grad for each in carried],
            is_split,
        )
        # the graph tells what needs a gradient, and is dropped
        outputs = image.sample.forward(
            given, DeferredGradients() if is_split else None, is_run_again=True
        )
        del given, carried, rows
        with self._hooks(micro_batch):
            self._end_strip(image, strip, outputs, loss)
        return self._end(micro_batch, image, outputs, loss)

    def recompute(self, micro_batch: int, loss: Loss | None = None) -> None:
        """Run a strip again, now keeping in the store what backward needs.

        Raises:
            RuntimeError: an input was changed in place meanwhile.
        """
        number, strip = divmod(micro_batch, self.form.strips)
        pending = self._pending.pop(micro_batch)
        inputs = [None if each is None else self._store.load(each) for each in pending.inputs]
        carried = [
            (self._store.load(each) if isinstance(each, SavedTensor) else each).requires_grad_(
                has_gradient
            )
            for each, has_gradient in zip(pending.carried, pending.has_gradient, strict=True)
        ]
        deferred = DeferredGradients() if pending.is_split else None
        with self._hooks(micro_batch):
            self._images[number].sample.run_again(strip, inputs, carried, deferred)
        self._stash[micro_batch] = Stash(pending.given, (), deferred)

    def backward(self, micro_batch: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Add to the parameters' gradients, and free what forward of the strip kept."""
        found = super().backward(micro_batch, gradients)
        self._store.end_backward(self._key(micro_batch), 0)
        return found

    def backward_input(
        self, micro_batch: int, gradients: Sequence[Tensor]
    ) -> tuple[Tensors, Tensors]:
        """Compute the input gradients, and keep what the weight gradients need, on the device."""
        found = super().backward_input(micro_batch, gradients)
        received = storage_addresses(gradients)
        kept = (
            tensor
            for tensor in self._deferred[micro_batch].tensors()
            if tensor.untyped_storage().data_ptr() not in received
        )
        self._store.end_backward(self._key(micro_batch), 0, kept)
        return found

    def backward_weight(self, micro_batch: int) -> None:
        """Add the weight gradients that `backward_input` deferred, and free what it kept."""
        super().backward_weight(micro_batch)
        self._store.end_weight_gradients(self._key(micro_batch), 0)

    def brought_bytes(self, micro_batch: int) -> int:
        """Return nothing: it is counted already."""
        return 0

    def kept_bytes(self, micro_batch: int) -> int:
        """Return nothing: the store counts it."""
        return 0

    def held_bytes(self, micro_batch: int) -> int:
        """Return nothing: the store counts it."""
        return 0

    def reset(self) -> None:
        """Drop all micro-batches in flight; the store is reset by its owner."""
        super().reset()
        self._pending.clear()

    @property
    def num_in_flight(self) -> int:
        """Strips whose backward, or the rest of it, is still to come."""
        return super().num_in_flight + len(self._pending)

    def _key(self, micro_batch: int) -> MicroBatchKey:
        return (*self._stage_key, micro_batch)

    def _hooks(self, micro_batch: int) -> AbstractContextManager[None]:
        return self._store.saved_tensor_hooks(self._key(micro_batch), 0)

    def _begin(self, micro_batch: int, inputs: Sequence[Tensor]) -> tuple[Image, int, Tensors]:
        image, strip = self._image_of(micro_batch)
        rows = self._rows_of(strip, inputs)
        key = self._key(micro_batch)
        self._store.begin(key, [*rows, *image.sample.static])
        self._store.activations.count_bytes(-image.left_bytes)
        return image, strip, rows

    def _end(
        self, micro_batch: int, image: Image, outputs: Sequence[Tensor | None], loss: Loss | None
    ) -> Tensors:
        key = self._key(micro_batch)
        made = () if loss is not None else self._given_on(micro_batch % self.form.strips, outputs)
        self._store.record_outputs(key, 0, made)
        self._count_left(image, outputs, partial(self._store.is_counted, key))
        self._store.activations.count_bytes(image.left_bytes)
        return made

    def _staying(self, micro_batch: int, rows: Tensors) -> Tensors:
        """Return the inputs of a strip, unless the store has taken them."""
        return () if self._store.takes_inputs(self._key(micro_batch)) else rows

"""Stages in strips whose saved tensors are in the activation store.

Recomputed, or in host memory, strip by strip.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from torch import Tensor

from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.storages import storage_addresses
from gems.engine.offload.activation_store import ActivationStore
from gems.engine.offload.saved_tensor_table import SavedTensor
from gems.engine.stage import Loss, StageKey, Tensors
from gems.engine.stages.stored import Stored
from gems.engine.stages.streamed import Image, StreamedStage, StripLayers
from gems.engine.stages.whole import Stash


class _Pending(NamedTuple):
    """What is left of the forward of a strip that will be run again; None stands for no input."""

    given: Tensors  # what stays of the inputs
    inputs: list[SavedTensor | None] | None  # None if they are read again
    carried: list[Tensor | SavedTensor]  # of what weights alone determine the tensor itself
    has_gradient: list[bool]  # of what was carried
    is_split: bool


class StoredStrips(Stored, StreamedStage):
    """Keeps in the store what strips save, so that each can be recomputed or copied to the host.

    A strip that is run again keeps the tensors carried to it, and its inputs unless they are parts
    of images, which are read again. The loss of a whole image is computed once, and its saved tensors stay; that of a
    strip is computed again. Tensors carried between strips are counted here, everything else by the store.
    """

    def __init__(self, layers: StripLayers, stage_key: StageKey, store: ActivationStore) -> None:
        super().__init__(layers)
        self.keep_in(store, stage_key)

    def forward(
        self,
        index: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
        is_run_again: bool = False,
    ) -> Tensors:
        """Run a strip and put what autograd saves into the store.

        If it `is_run_again`, keep only the tensors that were carried to it, and its inputs if they
        are no strip of images.
        """
        image, strip = self._image_of(index)
        rows = self.rows_of(strip, inputs)
        key = self._key(index)
        self._store.begin(key, [*rows, *image.sample.static])
        self._store.activations.count_bytes(-image.left_bytes)
        deferred = self._new_deferred(is_split)
        if is_run_again:
            is_kept = not self.is_first or rows[0] is not inputs[0]
            outputs = self._run_once(index, image, rows, deferred, is_kept)
            with self._hooks(index):
                self._add_loss(image, strip, outputs, loss, is_run_again)
        else:
            with self._hooks(index):
                outputs = self._run_strip(image, strip, rows, loss, deferred)
            self._stash[index] = Stash(self._staying(index, rows), (), deferred)
        boundary = () if loss is not None else self._given_on(strip, outputs)
        self._store.record_outputs(key, 0, boundary)
        self._count_left(
            image, outputs, lambda tensor: self._store.is_counted(key, tensor.untyped_storage())
        )
        self._store.activations.count_bytes(image.left_bytes)
        return boundary

    def recompute(
        self, index: int, loss: Loss | None = None, images: Sequence[Tensor] = ()
    ) -> None:
        """Run a strip again, now keeping in the store what backward needs.

        Raises:
            RuntimeError: an input was changed in place meanwhile.
        """
        number, strip = divmod(index, self.form.strips)
        image = self._images[number]
        pending: _Pending = self._pending.pop(index)
        if pending.inputs is None:
            rows = tuple(images)
            inputs = self._takes.given(rows, strip, self.device)
            static = (tensor for tensor in pending.carried if isinstance(tensor, Tensor))
            self._store.replace_inputs(self._key(index), [*rows, *static])
        else:
            rows = pending.given
            inputs = [
                None if tensor is None else self._store.load(tensor) for tensor in pending.inputs
            ]
        carried = [
            (
                self._store.load(tensor) if isinstance(tensor, SavedTensor) else tensor
            ).requires_grad_(has_gradient)
            for tensor, has_gradient in zip(pending.carried, pending.has_gradient, strict=True)
        ]
        deferred = self._new_deferred(pending.is_split)
        with self._hooks(index):
            outputs = image.sample.run_again(strip, inputs, carried, deferred)
            if image.loss is not None and loss is not None:
                image.loss.run_again(strip, outputs, loss)
            del outputs
        self._stash[index] = Stash(rows, (), deferred)

    def _new_deferred(self, is_split: bool) -> DeferredGradients | None:
        return DeferredGradients() if is_split else None

    def _hooks(self, index: int) -> AbstractContextManager[Any]:
        return self._store.saved_tensor_hooks(self._key(index), 0)

    def _run_once(
        self,
        index: int,
        image: Image,
        rows: Tensors,
        deferred: DeferredGradients | None,
        is_kept: bool,
    ) -> tuple[Tensor | None, ...]:
        """Run a strip without keeping its graph, which says what of the outputs needs a gradient.

        Its inputs are kept only if they are not read again (`is_kept`).
        """
        key = self._key(index)
        carried = image.sample.carried
        statics = image.sample.static
        static = storage_addresses(statics)
        inputs = self._takes.given(rows, index % self.form.strips, self.device)
        self._pending[index] = _Pending(
            self._staying(index, rows) if is_kept else (),
            [None if tensor is None else self._store.save(key, 0, tensor) for tensor in inputs]
            if is_kept
            else None,
            [
                tensor if storage_addresses([tensor]) & static else self._store.save(key, 0, tensor)
                for tensor in carried
            ],
            [tensor.requires_grad for tensor in carried],
            deferred is not None,
        )
        outputs = image.sample.forward(inputs, deferred, is_run_again=True)
        if not is_kept:
            self._store.replace_inputs(key, statics)
        return outputs

    def _staying(self, index: int, rows: Tensors) -> Tensors:
        """Return the inputs of a strip, unless the store has taken them."""
        return () if self._store.takes_inputs(self._key(index)) else rows

"""A stage that takes an image strip by strip, with the interface of a stage that takes it whole."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.storages import StashMeter, new_bytes, storage_addresses, tensor_bytes
from gems.autograd.strips.run import Draws
from gems.autograd.strips.sample import Cut, StripSample, begin
from gems.autograd.strips.stage import StripStage
from gems.engine.stage import Loss, Stage, Stash, gradient_edges, run_backward
from gems.engine.strips.passed import Passed

Tensors = tuple[Tensor, ...]


@dataclass(slots=True)
class _Image:
    """A micro-batch on its way through a stage.

    Of the last stage there are the outputs until the loss follows the last strip, then the edge of the loss and, for
    each strip, the places where the gradients of its outputs arrive. While sizes are measured, `counted` are the
    addresses of what its strips keep, `inputs` those of what they were given, and `carried_bytes` the size of what only
    the next strip, or the loss, holds.
    """

    sample: StripSample
    outputs: list[tuple[Tensor | None, ...]] = field(default_factory=list)
    cuts: list[list[Cut | None]] = field(default_factory=list)
    loss: tuple[GradientEdge | None, ...] = ()
    inputs: set[int] = field(default_factory=set)
    counted: set[int] = field(default_factory=set)
    carried_bytes: int = 0


class StageInStrips(Stage):
    """Runs forward of strips from the first to the last, then backward from the last to the first.

    In place of micro-batches strips are numbered: x is strip x % k of micro-batch x // k. What is not there yet, or has
    no rows in a strip, is neither taken nor given. The first stage takes the whole images with each strip; the last one
    gives nothing, and has its loss in the last strip. Evaluation runs whole images.
    """

    def __init__(
        self,
        modules: nn.ModuleList,
        is_first: bool,
        poll: Callable[[], None],
        form: StripStage,
        takes: Passed,
        device: torch.device,
        draws: Draws | None = None,
    ) -> None:
        """Take the streaming form of the modules and what it takes; `draws` gives the seeds of the present image."""
        super().__init__(modules, is_first, poll)
        self._form, self._takes, self._gives = form, takes, Passed(form.outputs, form.strips)
        self._device, self._draws = device, draws
        self._images: dict[int, _Image] = {}
        self._brought_bytes: dict[int, int] = {}  # by strip, as the two below
        self._kept_bytes: dict[int, int] = {}
        self._held_bytes: dict[int, int] = {}

    def forward(
        self, micro_batch: int, inputs: Sequence[Tensor], loss: Loss | None = None, is_split: bool = False
    ) -> Tensors:
        """Run a strip and keep what backward needs; return the tensors of the next boundary, detached."""
        number, strip = divmod(micro_batch, self._form.strips)
        if strip == 0:
            self._images[number] = _Image(StripSample(self._form, self._draws, not self.is_first))
        image = self._images[number]
        if self.is_first:
            boundary = self._takes.boundaries[0]
            inputs = tuple(tensor.narrow(boundary.dim, *self._takes.rows(0, strip)) for tensor in inputs)
        deferred = DeferredGradients() if is_split else None
        if len(self._brought_bytes) < self._form.strips:
            outputs = self._measure(image, strip, inputs, loss, deferred)
        else:
            outputs = self._run_strip(image, strip, inputs, loss, deferred)
        self._stash[micro_batch] = Stash(tuple(inputs), (), deferred)
        if loss is not None:
            return ()
        return tuple(each for place in self._gives.places(strip) if (each := outputs[place]) is not None)

    def backward(self, micro_batch: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Add to the parameters' gradients, and free what forward of the strip kept."""
        return self._back(micro_batch, self._stash.pop(micro_batch), gradients)

    def backward_input(self, micro_batch: int, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        """Compute the input gradients as `backward`, and keep only what the weight gradients need."""
        number, strip = divmod(micro_batch, self._form.strips)
        stash, known = self._stash.pop(micro_batch), self._images[number].inputs
        assert stash.deferred is not None
        found = self._back(micro_batch, stash, gradients)
        self._deferred[micro_batch] = stash.deferred
        if strip not in self._held_bytes:
            known = known | storage_addresses(self._known([*found[1], *gradients]))
            self._held_bytes[strip] = new_bytes(stash.deferred.tensors(), known)
        return found

    def still_read(self, micro_batch: int) -> set[int]:
        """Return the addresses that weight gradients of the whole micro-batch will read: strips share what they carry.

        A strip's inputs may be part of what the next one reads.
        """
        first = micro_batch - micro_batch % self._form.strips
        read = super().still_read
        return set().union(*(read(strip) for strip in range(first, first + self._form.strips)))

    def brought_bytes(self, micro_batch: int) -> int:
        """Return what forward of a strip added: what it keeps, and what the next one is left less what it was left."""
        return self._brought_bytes[micro_batch % self._form.strips]

    def kept_bytes(self, micro_batch: int) -> int:
        """Return what forward of a strip keeps until its backward."""
        return self._kept_bytes[micro_batch % self._form.strips]

    def held_bytes(self, micro_batch: int) -> int:
        """Return what backward of a strip leaves for its weight gradients."""
        return self._held_bytes[micro_batch % self._form.strips]

    def reset(self) -> None:
        """Drop all micro-batches in flight, after a failed step."""
        super().reset()
        self._images.clear()

    def _run_strip(
        self, image: _Image, strip: int, inputs: Sequence[Tensor], loss: Loss | None, deferred: DeferredGradients | None
    ) -> tuple[Tensor | None, ...]:
        given = self._takes.spread(inputs, strip)
        for place, boundary in enumerate(self._takes.boundaries):
            if given[place] is None and boundary.ends is not None:
                given[place] = torch.empty(boundary.strip_shape(strip), dtype=boundary.dtype, device=self._device)
        outputs = image.sample.forward(given, deferred)
        if loss is not None:
            image.outputs.append(outputs)
            if strip == self._form.strips - 1:
                self._add_loss(image, loss)
        return outputs

    def _add_loss(self, image: _Image, loss: Loss) -> None:
        """Compute the loss, of what the last strip gives or of the rows of all."""
        image.cuts = [
            [Cut() if tensor is not None and tensor.is_floating_point() else None for tensor in outputs]
            for outputs in image.outputs
        ]
        strips = [
            [each if cut is None or each is None else begin(cut, each) for cut, each in zip(cuts, outputs, strict=True)]
            for cuts, outputs in zip(image.cuts, image.outputs, strict=True)
        ]
        image.outputs = []
        whole: list[Tensor] = []
        for place, boundary in enumerate(self._form.outputs):
            parts = [each for outputs in strips if (each := outputs[place]) is not None]
            whole.append(parts[-1] if boundary.ends is None else torch.cat(parts, boundary.dim))
        del strips
        image.loss = gradient_edges((loss(self._form.structured(whole)),))

    def _back(self, micro_batch: int, stash: Stash, gradients: Sequence[Tensor]) -> tuple[Tensors, Tensors]:
        number, strip = divmod(micro_batch, self._form.strips)
        image = self._images[number]
        if image.cuts:
            if image.loss:
                run_backward(image.loss, gradients)
                image.loss = ()
            given = [None if cut is None else cut.gradient for cut in image.cuts.pop()]
        else:
            given = self._gives.spread(gradients, strip, have_gradient=True)
        found = image.sample.backward(given)
        if strip == 0:
            del self._images[number]
        inputs: Tensors = stash.inputs
        if self.is_first:
            return (), inputs
        tensors, made = self._takes.spread(inputs, strip), []
        for place in self._takes.places(strip, have_gradient=True):
            tensor, gradient = tensors[place], found[place]
            assert tensor is not None
            made.append(torch.zeros_like(tensor) if gradient is None else gradient)
        return tuple(made), inputs

    def _measure(
        self, image: _Image, strip: int, inputs: Sequence[Tensor], loss: Loss | None, deferred: DeferredGradients | None
    ) -> tuple[Tensor | None, ...]:
        """Run a strip and measure what it keeps; a storage counts for the first strip of its image that keeps it."""
        image.inputs |= storage_addresses(inputs)
        with StashMeter(self._known(inputs)) as meter:
            outputs = self._run_strip(image, strip, inputs, loss, deferred)
        kept = sum(size for each, size in meter.saved.items() if each not in image.counted | image.inputs)
        image.counted |= meter.saved.keys()
        left = [*image.sample.carried, *(each for given in image.outputs for each in given if each is not None)]
        carried = new_bytes(left, image.counted | image.inputs | storage_addresses(self._known(())))
        self._brought_bytes.setdefault(strip, kept + carried - image.carried_bytes)
        self._kept_bytes.setdefault(strip, kept)
        self.input_bytes = tensor_bytes(inputs)
        image.carried_bytes = carried
        return outputs

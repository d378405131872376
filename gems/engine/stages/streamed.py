"""Stages that take an image strip by strip, with the interface of a stage for whole images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge

from gems.autograd.cuts import Cut, begin
from gems.autograd.outputs import as_tuple
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.storages import StashMeter, new_bytes, storage_addresses
from gems.engine.stage import Loss, Tensors
from gems.engine.stages.boundary_tensors import BoundaryTensors
from gems.engine.stages.whole import Stash, WholeStage, gradient_edges, run_backward
from gems.streaming.strip_run import Draws
from gems.streaming.strip_sample import StripSample
from gems.streaming.strip_stage import StripStage


@dataclass(slots=True)
class Image:
    """A micro-batch on its way through a stage.

    On the last stage, `outputs` are kept until the loss follows the last strip; then `loss` is the
    edge of the loss, and `cuts` are the places, for each strip, that receive the gradients of its
    outputs. `left_bytes` is the size of what only the next strip or the loss will read, and
    `waiting_bytes` the part that only the loss will read. Both are counted while sizes are
    measured, or for the store.
    """

    sample: StripSample
    outputs: list[tuple[Tensor | None, ...]] = field(default_factory=list)
    cuts: list[list[Cut | None]] = field(default_factory=list)
    loss: tuple[GradientEdge | None, ...] = ()
    left_bytes: int = 0
    waiting_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StripLayers:
    """The layers of a stage with their streaming form, and what they need of the rank.

    `draws` gives the seeds of the current image.
    """

    modules: nn.ModuleList
    form: StripStage
    is_first: bool
    poll: Callable[[], None]
    device: torch.device
    draws: Draws | None = None


class InStrips(WholeStage):
    """A stage in a streaming form, with the inputs and outputs of each strip.

    A tensor that is not ready yet, or has no rows in a strip, is neither taken nor given. The first
    stage takes the rows of a strip, or the whole images with each strip.
    """

    def __init__(self, layers: StripLayers) -> None:
        super().__init__(layers.modules, layers.is_first, layers.poll)
        self.form = layers.form
        self.device = layers.device
        self._takes = BoundaryTensors(self.form.inputs, self.form.strips)
        self._gives = BoundaryTensors(self.form.outputs, self.form.strips)

    def rows_of(self, strip: int, inputs: Sequence[Tensor]) -> Tensors:
        """Return the inputs of a strip; on the first stage, its rows of the images."""
        if not self.is_first:
            return tuple(inputs)
        return tuple(self._takes.rows_of(tensor, strip) for tensor in inputs)

    def _given_on(self, strip: int, outputs: Sequence[Tensor | None]) -> Tensors:
        """Return the tensors of the next boundary."""
        return tuple(
            each for place in self._gives.places(strip) if (each := outputs[place]) is not None
        )


class StreamedStage(InStrips):
    """Runs forward of strips from the first to the last, then backward from the last to the first.

    Strips are numbered in place of micro-batches: x is strip x % k of micro-batch x // k. The last
    stage gives nothing, and has its loss in the last strip. For evaluation, see
    `EvaluationInStrips`.
    """

    def __init__(self, layers: StripLayers) -> None:
        super().__init__(layers)
        self._draws = layers.draws
        self._images: dict[int, Image] = {}
        self._brought_bytes: dict[int, int] = {}  # by strip, like the one below
        self._kept_bytes: dict[int, int] = {}

    def forward(
        self,
        index: int,
        inputs: Sequence[Tensor],
        loss: Loss | None = None,
        is_split: bool = False,
        is_run_again: bool = False,
    ) -> Tensors:
        """Run a strip and keep what its backward needs.

        Return the tensors of the next boundary, detached.
        """
        image, strip = self._image_of(index)
        inputs = self.rows_of(strip, inputs)
        deferred = DeferredGradients() if is_split else None
        if len(self._brought_bytes) < self.form.strips:
            outputs = self._measure(image, strip, inputs, loss, deferred)
        else:
            outputs = self._run_strip(image, strip, inputs, loss, deferred)
        self._stash[index] = Stash(tuple(inputs), (), deferred)
        return () if loss is not None else self._given_on(strip, outputs)

    @contextmanager
    def watched(self, watch: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
        """Pass the outputs of the operations of each strip to `watch`."""
        with super().watched(watch), self.form.watched(watch):
            yield

    def brought_bytes(self, index: int) -> int:
        """Return the bytes that forward of a strip added.

        This is the size of what it keeps, plus what it leaves for the next strip, less what the
        strip before left for it.
        """
        return self._brought_bytes[index % self.form.strips]

    def kept_bytes(self, index: int) -> int:
        """Return the bytes that forward of a strip keeps until its backward."""
        return self._kept_bytes[index % self.form.strips]

    def reset(self) -> None:
        """Drop all micro-batches in flight after a failed step."""
        super().reset()
        self._images.clear()

    def meter(self, index: int, inputs: Sequence[Tensor]) -> StashMeter:
        """Return a meter that holds what the next forward of an image saves of its own."""
        image, _ = self._image_of(index)
        return StashMeter(self._known([*inputs, *image.sample.static]), holds=True)

    def forget_image(self, number: int) -> None:
        """Drop a micro-batch whose backward will not run."""
        self._images.pop(number, None)
        for index in range(number * self.form.strips, (number + 1) * self.form.strips):
            self._stash.pop(index, None)
            self._deferred.pop(index, None)

    def _image_of(self, index: int) -> tuple[Image, int]:
        """Return the image of a strip that is about to run, and the number of the strip in it."""
        number, strip = divmod(index, self.form.strips)
        if strip == 0:
            self._images[number] = Image(StripSample(self.form, self._draws, not self.is_first))
        return self._images[number], strip

    def _run_strip(
        self,
        image: Image,
        strip: int,
        inputs: Sequence[Tensor],
        loss: Loss | None,
        deferred: DeferredGradients | None,
    ) -> tuple[Tensor | None, ...]:
        outputs = image.sample.forward(self._takes.given(inputs, strip, self.device), deferred)
        self._end_strip(image, strip, outputs, loss)
        return outputs

    def _end_strip(
        self, image: Image, strip: int, outputs: tuple[Tensor | None, ...], loss: Loss | None
    ) -> None:
        """Keep the outputs of a strip of the last stage until the loss follows the last strip."""
        if loss is not None:
            image.outputs.append(outputs)
            if strip == self.form.strips - 1:
                self._add_loss(image, loss)

    def _add_loss(self, image: Image, loss: Loss) -> None:
        """Compute the loss from the last strip's outputs, or from the rows of all strips."""
        image.cuts = [
            [
                Cut() if tensor is not None and tensor.is_floating_point() else None
                for tensor in outputs
            ]
            for outputs in image.outputs
        ]
        strips = [
            [
                each if cut is None or each is None else begin(cut, each)
                for cut, each in zip(cuts, outputs, strict=True)
            ]
            for cuts, outputs in zip(image.cuts, image.outputs, strict=True)
        ]
        image.outputs = []
        whole = self.form.joined(strips)
        del strips
        image.loss = gradient_edges(as_tuple(loss(whole)))

    def _alike(self, index: int) -> int:
        return index % self.form.strips

    def deferring_to(self, deferred: DeferredGradients | None) -> AbstractContextManager[None]:
        """Defer nothing: forward has passed it to the operations."""
        return nullcontext()

    def _backward(
        self, index: int, stash: Stash, gradients: Sequence[Tensor]
    ) -> tuple[Tensors, Tensors]:
        number, strip = divmod(index, self.form.strips)
        image = self._images[number]
        if image.cuts:
            if image.loss:
                run_backward(image.loss, gradients)
                image.loss = ()
                for cut in (each for cuts in image.cuts for each in cuts if each is not None):
                    # a part of the gradient of all strips, which each part would keep alive
                    if cut.gradient is not None:
                        cut.gradient = cut.gradient.clone()
            given = [None if cut is None else cut.gradient for cut in image.cuts.pop()]
        else:
            given = self._gives.spread(gradients, strip, have_gradient=True)
        found = image.sample.backward(given)
        if strip == 0:
            del self._images[number]
        inputs: Tensors = stash.inputs
        if self.is_first:
            return (), inputs
        made = []
        for place in self._takes.places(strip, have_gradient=True):
            boundary = self._takes.boundaries[place]
            gradient = found[place]
            if gradient is None:
                gradient = torch.zeros(
                    boundary.strip_shape(strip), dtype=boundary.dtype, device=self.device
                )
            made.append(gradient)
        return tuple(made), inputs

    def _measure(
        self,
        image: Image,
        strip: int,
        inputs: Sequence[Tensor],
        loss: Loss | None,
        deferred: DeferredGradients | None,
    ) -> tuple[Tensor | None, ...]:
        """Run a strip and measure the memory that it keeps."""
        known = self._known([*inputs, *image.sample.static])
        with StashMeter(known) as meter:
            outputs = self._run_strip(image, strip, inputs, loss, deferred)
        saved = storage_addresses(known) | meter.saved.keys()
        self._kept_bytes.setdefault(strip, meter.saved_bytes)
        before = image.left_bytes
        self._count_left(image, outputs, lambda tensor: bool(storage_addresses([tensor]) & saved))
        self._brought_bytes.setdefault(strip, meter.saved_bytes + image.left_bytes - before)
        return outputs

    def _count_left(
        self, image: Image, outputs: Sequence[Tensor | None], is_counted: Callable[[Tensor], bool]
    ) -> None:
        """Count what a strip leaves to the next one, and its outputs that wait for the loss.

        Tensors for which `is_counted` is true are left out.
        """
        static = storage_addresses(image.sample.static)
        made = (each for each in outputs if each is not None and not is_counted(each))
        image.waiting_bytes = image.waiting_bytes + new_bytes(made, static) if image.outputs else 0
        left = new_bytes((each for each in image.sample.left if not is_counted(each)), static)
        image.left_bytes = left + image.waiting_bytes


class EvaluationInStrips(InStrips):
    """Runs forward of strips in order, image after image, and keeps what the next strip needs.

    The last stage gives the whole output with the last strip of an image. It uses the weights that
    the modules of the form have at the time.
    """

    def __init__(self, layers: StripLayers, is_last: bool) -> None:
        """Take the layers with their form in evaluation."""
        super().__init__(layers)
        self._is_last = is_last
        self._strip = 0
        self._carries: dict[int, list[Tensor]] = {}  # by the strip that takes them
        self._outputs: list[tuple[Tensor | None, ...]] = []  # on the last stage, by strip

    def infer(self, inputs: Sequence[Tensor]) -> Any:
        """Run the next strip and return its outputs; nothing holds the inputs afterwards."""
        strip = self._strip
        taken = storage_addresses(inputs)
        with torch.no_grad():
            given = self._takes.given(self.rows_of(strip, inputs), strip, self.device)
            outputs, kept = self.form.forward(strip, given, self._carries.pop(strip, ()))
            for held, tensor in zip(self.form.held(strip), kept, strict=True):
                self._carries.setdefault(held.to, []).append(_alone(tensor, taken))
        self.poll()
        is_end = strip == self.form.strips - 1
        self._strip = 0 if is_end else strip + 1
        if not self._is_last:
            return self._given_on(strip, outputs)
        self._outputs.append(
            tuple(None if tensor is None else _alone(tensor, taken) for tensor in outputs)
        )
        if not is_end:
            return None
        found = self._outputs
        self._outputs = []
        return self.form.joined(found)

    def reset(self) -> None:
        """Drop the image under way after a failed step."""
        super().reset()
        self._strip = 0
        self._carries.clear()
        self._outputs = []


def _alone(tensor: Tensor, taken: set[int]) -> Tensor:
    """Return a tensor to keep, copied if it is part of more memory or of inputs that are reused."""
    storage = tensor.untyped_storage()
    return (
        tensor.clone()
        if storage.data_ptr() in taken or storage.nbytes() > tensor.nbytes
        else tensor
    )

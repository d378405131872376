"""Stages that take an image strip by strip, with the interface of a stage for whole images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.storages import StashMeter, new_bytes, storage_addresses
from gems.engine.stage import Loss, Tensors
from gems.engine.stages.boundary_tensors import BoundaryTensors
from gems.engine.stages.strip_losses import ImageLoss, LossAtEnd, LossOfStrips
from gems.engine.stages.whole import Stash, WholeStage
from gems.streaming.block_plan import Box, is_empty
from gems.streaming.strip_run import Draws
from gems.streaming.strip_sample import StripSample
from gems.streaming.strip_stage import StripStage


@dataclass(slots=True)
class Image:
    """A micro-batch on its way through a stage.

    `left_bytes` is the size of what only the next strip or the loss will read, and `waiting_bytes`
    the part that only the loss will read. Both are counted while sizes are measured, or for the
    store.
    """

    sample: StripSample
    loss: ImageLoss | None = None
    left_bytes: int = 0
    waiting_bytes: int = 0


@dataclass(frozen=True, slots=True)
class StripLayers:
    """The layers of a stage with their streaming form, and what they need of the rank.

    `draws` gives the seeds of the current image. If the loss of a strip needs no other strip, the
    last stage gets the `parts` of the maps that its strips give.
    """

    modules: nn.ModuleList
    form: StripStage
    is_first: bool
    poll: Callable[[], None]
    device: torch.device
    draws: Draws | None = None
    parts: Sequence[Box] | None = None


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
        self._parts = layers.parts

    def part_of(self, index: int) -> Box | None:
        """Return the part of the maps that a strip gives, if its loss needs no other."""
        return None if self._parts is None else self._parts[index % self.form.strips]

    def rows_of(self, strip: int, inputs: Sequence[Tensor]) -> Tensors:
        """Return the inputs of a strip; on the first stage, its rows of the images."""
        if not self.is_first:
            return tuple(inputs)
        return tuple(self._takes.rows_of(tensor, strip) for tensor in inputs)

    def _given_on(self, strip: int, outputs: Sequence[Tensor | None]) -> Tensors:
        """Return the tensors of the next boundary."""
        return tuple(
            tensor for place in self._gives.places(strip) if (tensor := outputs[place]) is not None
        )


class StreamedStage(InStrips):
    """Runs forward of strips from the first to the last, then backward from the last to the first.

    Strips are numbered in place of micro-batches: x is strip x % k of micro-batch x // k. The last
    stage gives nothing, and has its loss in the last strip, or that of each strip there. For
    evaluation, see `EvaluationInStrips`.
    """

    def __init__(self, layers: StripLayers) -> None:
        super().__init__(layers)
        self.draws = layers.draws
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

    def has_loss(self, index: int) -> bool:
        """Return whether the last stage computes a loss in a strip."""
        part = self.part_of(index)
        return (index + 1) % self.form.strips == 0 if part is None else not is_empty(part)

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
            self._images[number] = Image(self._new_sample())
        return self._images[number], strip

    def _new_sample(self) -> StripSample:
        return StripSample(self.form, self.draws, not self.is_first)

    def _run_strip(
        self,
        image: Image,
        strip: int,
        inputs: Sequence[Tensor],
        loss: Loss | None,
        deferred: DeferredGradients | None,
    ) -> tuple[Tensor | None, ...]:
        outputs = image.sample.forward(self._takes.given(inputs, strip, self.device), deferred)
        self._add_loss(image, strip, outputs, loss)
        return outputs

    def _add_loss(
        self,
        image: Image,
        strip: int,
        outputs: tuple[Tensor | None, ...],
        loss: Loss | None,
        is_run_again: bool = False,
    ) -> None:
        """Compute the loss that comes with a strip of the last stage, if there is one."""
        if loss is None:
            return
        if image.loss is None:
            is_at_end = self._parts is None
            image.loss = (
                LossAtEnd(self.form) if is_at_end else LossOfStrips(self.form, self.has_loss)
            )
        image.loss.forward(strip, outputs, loss, is_run_again)

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
        if image.loss is None:
            output_grads = self._gives.spread(gradients, strip, have_gradient=True)
        else:
            output_grads = image.loss.backward(strip, gradients)
        input_grads = image.sample.backward(output_grads)
        if strip == 0:
            del self._images[number]
        inputs: Tensors = stash.inputs
        if self.is_first:
            return (), inputs
        boundary_grads = []
        for place in self._takes.places(strip, have_gradient=True):
            boundary = self._takes.boundaries[place]
            gradient = input_grads[place]
            if gradient is None:
                gradient = torch.zeros(
                    boundary.strip_shape(strip), dtype=boundary.dtype, device=self.device
                )
            boundary_grads.append(gradient)
        return tuple(boundary_grads), inputs

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
        uncounted = (tensor for tensor in outputs if tensor is not None and not is_counted(tensor))
        waits = image.loss is not None and image.loss.waits
        image.waiting_bytes = image.waiting_bytes + new_bytes(uncounted, static) if waits else 0
        left_bytes = new_bytes(
            (tensor for tensor in image.sample.left if not is_counted(tensor)), static
        )
        image.left_bytes = left_bytes + image.waiting_bytes


class EvaluationInStrips(InStrips):
    """Runs forward of strips in order, image after image, and keeps what the next strip needs.

    The last stage gives the whole output with the last strip of an image, or if it `gives_parts`
    those of each strip that has any. It uses the weights that the modules of the form have at the
    time.
    """

    def __init__(self, layers: StripLayers, is_last: bool) -> None:
        """Take the layers with their form in evaluation."""
        super().__init__(layers)
        self._is_last = is_last
        self._strip = 0
        self._carries: dict[int, list[Tensor]] = {}  # by the strip that takes them
        self._outputs: list[tuple[Tensor | None, ...]] = []  # on the last stage, by strip

    def part_of(self, index: int) -> Box | None:
        """Return the part of the maps that a strip gives, if it gives parts."""
        return super().part_of(index) if self.gives_parts else None

    def infer(self, inputs: Sequence[Tensor]) -> Any:
        """Run the next strip and return its outputs; nothing holds the inputs afterwards."""
        strip = self._strip
        taken = storage_addresses(inputs)
        with torch.no_grad():
            taken_inputs = self._takes.given(self.rows_of(strip, inputs), strip, self.device)
            outputs, carries = self.form.forward(strip, taken_inputs, self._carries.pop(strip, ()))
            for carry, tensor in zip(self.form.held(strip), carries, strict=True):
                self._carries.setdefault(carry.to, []).append(_alone(tensor, taken))
        self.poll()
        is_end = strip == self.form.strips - 1
        self._strip = 0 if is_end else strip + 1
        if not self._is_last:
            return self._given_on(strip, outputs)
        part = self.part_of(strip)
        if part is not None:
            output: Any = outputs
            return None if is_empty(part) else self.form.structured(output)
        self._outputs.append(
            tuple(None if tensor is None else _alone(tensor, taken) for tensor in outputs)
        )
        if not is_end:
            return None
        strips = self._outputs
        self._outputs = []
        return self.form.joined(strips)

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

"""The strips of stages on fake tensors.

Each strip runs forward and backward as in a run, and the bytes that it keeps are counted. Strips
with equal shapes run once. As a child process, it reads a resolved run as JSON on stdin, cut at
parallel.boundaries, and prints its strip profile.
"""

from __future__ import annotations

import math
import sys
from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge

from gems.autograd.cuts import Cut, begin
from gems.autograd.outputs import tensors_in
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.data import task_of
from gems.errors import ConfigError
from gems.losses.summed import SummedLoss
from gems.models import Layer, layers_of
from gems.models.build import freeze, input_spec
from gems.models.mixed import Precision
from gems.models.streaming_errors import config_errors, until_in
from gems.profile.profilers.chain import Lab
from gems.profile.profilers.fake import fake_lab
from gems.profile.profilers.layer_run import Loss, give_gradients, static_tensors, task_loss
from gems.profile.profilers.layers import answer
from gems.profile.profilers.live_bytes import LiveBytes, SavedStorages, storage_of, unique_bytes
from gems.profile.strip_profile import StripBytes, StripProfile
from gems.profile.subject import Subject
from gems.streaming.block_plan import Box, is_empty
from gems.streaming.operations.operation import STATIC
from gems.streaming.strip_run import RunMode
from gems.streaming.strip_stage import Boundary, StripStage
from gems.utils.units import SIDES

IMAGE_SIZES = tuple(f"data.{name}" for name in SIDES)
_Known = dict[Hashable, tuple[StripBytes, list[bool]]]
# By stage: an image of another size, or in another division, often has strips of the same shapes.
_KNOWN: dict[Hashable, _Known] = defaultdict(dict)


def take(subject: Subject) -> StripProfile:
    """Return the strips of a resolved run that is cut at parallel.boundaries.

    Raises:
        ConfigError: A layer needs the whole image.
    """
    boundaries = subject.parallel.boundaries
    assert boundaries is not None
    precision = Precision.of(subject.train.layer_dtype)
    lab = fake_lab(subject.machine, precision)
    passed: tuple[Boundary, ...] = (images(subject, precision),)
    layers = layers_of(subject.model, subject.data)
    names = [layer.name for layer in layers]
    seen = {name: value for name, value in subject.layers.items() if name not in IMAGE_SIZES}
    model = repr(
        (seen, subject.machine.device, subject.optimizer.frozen, subject.parallel.strips_until)
    )
    stages = []
    parts = None
    for first, end in pairwise(boundaries):
        until = until_in(names[first:end], names, subject.parallel.strips_until)
        modules, form = streaming_stage(subject, layers[first:end], passed, lab, until)
        is_last = end == len(layers)
        parts = parts_with_loss(subject, form) if is_last else None
        with lab.mode:
            give_gradients(modules)
            loss = None
            if is_last:
                loss = StripLoss(task_loss(subject.data), parts)
            strips = _Strips(form, modules, passed, first == 0, loss, lab)
            stages.append(strips.all(_KNOWN[model, first, end, form.values]))
        passed = form.outputs
    return StripProfile(tuple(boundaries), tuple(stages), masks=mask_sizes(subject, parts))


def mask_sizes(subject: Subject, parts: Sequence[Box] | None) -> tuple[int, ...]:
    """Return the bytes of each of the `parts` of the masks of a micro-batch, or those of all."""
    data = subject.data
    if task_of(data) != "segmentation":
        return ()
    whole = tuple((0, side) for side in data.sides_px)
    pixel_bytes = subject.parallel.micro_batch_size * np.min_scalar_type(-data.num_classes).itemsize
    return tuple(
        pixel_bytes * math.prod(max(0, end - begin) for begin, end in (*box, *whole[len(box) :]))
        for box in (parts or (whole,))
    )


def parts_with_loss(subject: Subject, form: StripStage) -> tuple[Box, ...] | None:
    """Return the parts of maps that the strips of the last stage give, if each has its own loss.

    Return None if the loss follows the last strip.
    """
    data = subject.data
    parts = form.parts_of(data.sides_px)
    if parts is None:
        return None
    dtype = form.outputs[0].dtype
    like = [
        torch.empty(boundary.shape, dtype=boundary.dtype, device="meta")
        for boundary in form.outputs
    ]
    with suppress(ConfigError):  # ranks refuse such a loss
        loss = SummedLoss(subject.loss, data, dtype, torch.device("cpu"), form.structured(like))
        return parts if loss.divides() else None
    return None


def images(subject: Subject, precision: Precision) -> Boundary:
    """Return the input of the first stage of a resolved run."""
    spec = input_spec(subject.data, subject.parallel.micro_batch_size, precision.compute)
    return Boundary.even(spec.shape, spec.dtype, subject.parallel.grid)


def streaming_stage(
    subject: Subject,
    layers: Sequence[Layer],
    takes: Sequence[Boundary],
    lab: Lab,
    until: str | None,
) -> tuple[nn.ModuleList, StripStage]:
    """Return layers on a lab's tensors, and their streaming form up to the layer `until`.

    Raises:
        ConfigError: A layer needs the whole image.
    """
    modules = nn.ModuleList([lab.build(layer, place).train() for place, layer in enumerate(layers)])
    named = [(layer.name, module) for layer, module in zip(layers, modules, strict=True)]
    freeze(named, subject.optimizer.frozen)
    with config_errors(subject.parallel.strips):
        return modules, StripStage(
            named, takes, subject.parallel.grid, subject.parallel.min_strip_positions, until
        )


class StripLoss(NamedTuple):
    """The loss of the last stage, after the last strip unless the strips give `parts` of maps."""

    function: Loss
    parts: tuple[Box, ...] | None


class _Forward(NamedTuple):
    """A strip whose forward has run.

    `saved` and `by_loss` are the bytes of storages that the strip and the loss have saved. `edges`
    are the ends of its graph, outputs first, with shape and type of the gradients that arrive
    there; the first `num_received` gradients come from elsewhere. `loss` is the end of the loss's
    graph, with the places at which the gradients of outputs arrive. `ends` are the outputs, or on
    the last stage those that the loss takes: those of the whole image, which the last strip has,
    if strips have no losses of their own.
    """

    saved: dict[int, int]
    by_loss: dict[int, int]
    outputs: list[Tensor]
    ends: list[Tensor]
    kept: tuple[Tensor, ...]
    left: list[Tensor]
    edges: list[tuple[GradientEdge, Tensor]]
    num_received: int
    loss: tuple[GradientEdge, list[Cut]] | None


class _Kept(NamedTuple):
    """A tensor that a strip keeps for the strip `step` strips later."""

    step: int
    size: int
    is_static: bool


class _Waiting(NamedTuple):
    """A tensor that waits for a strip: whether it needs a gradient, and the bytes of both."""

    has_gradient: bool
    size: int
    gradient: int


class _Strips:
    """The strips of a stage, which run on fake tensors."""

    def __init__(
        self,
        form: StripStage,
        modules: nn.ModuleList,
        takes: Sequence[Boundary],
        is_first: bool,
        loss: StripLoss | None,
        lab: Lab,
    ) -> None:
        self._form = form
        self._takes = takes
        self._is_first = is_first
        self._loss = loss
        self._workspace = lab.workspace
        self._static = static_tensors(modules)

    def all(self, known: _Known) -> tuple[StripBytes, ...]:
        """Return the bytes of all strips; those that are known by their shapes do not run."""
        carries: dict[Hashable, list[_Kept]] = {}
        arriving: dict[int, list[_Waiting]] = defaultdict(list)  # by the strip that takes it
        waiting_bytes = gradient_bytes = 0
        strips = []
        for strip in range(self._form.strips):
            shapes = self._form.shapes_of(strip)
            if shapes not in carries:
                carries[shapes] = self._kept_after(strip)
            taken = arriving.pop(strip, [])
            flags = tuple(waiting.has_gradient for waiting in taken)
            key = shapes, flags, self._reads_of_loss(strip)
            if key not in known:
                known[key] = self._measure(strip, flags)
            strip_bytes, needs = known[key]
            carried_back = gradient_bytes
            for item, has_gradient in zip(carries[shapes], needs, strict=True):
                gradient = item.size * has_gradient
                own = 0 if item.is_static else item.size
                arriving[strip + item.step].append(_Waiting(has_gradient, own, gradient))
                waiting_bytes += own
                gradient_bytes += gradient
            waiting_bytes -= sum(waiting.size for waiting in taken)
            gradient_bytes -= sum(waiting.gradient for waiting in taken)
            strips.append(replace(strip_bytes, left=waiting_bytes, carried_back=carried_back))
        return tuple(strips)

    def _kept_after(self, strip: int) -> list[_Kept]:
        return [
            _Kept(
                carry.to - strip, torch.Size(shape).numel() * dtype.itemsize, carry.kind == STATIC
            )
            for carry, (shape, dtype) in zip(
                self._form.held(strip), self._form.carries(strip), strict=True
            )
        ]

    def _is_last(self, strip: int) -> bool:
        return strip == self._form.strips - 1

    def _has_loss(self, strip: int) -> bool:
        if self._loss is None or self._loss.parts is None:
            return self._loss is not None and self._is_last(strip)
        return not is_empty(self._loss.parts[strip])

    def _waits(self, strip: int) -> bool:
        """Return whether the outputs of a strip wait for a loss."""
        is_whole = self._loss is not None and self._loss.parts is None
        return is_whole and not self._is_last(strip)

    def _reads_of_loss(self, strip: int) -> Hashable:
        """Return a key that is equal for strips whose losses take outputs of equal shapes."""
        if not self._has_loss(strip):
            return None
        is_whole = self._loss is not None and self._loss.parts is None
        return self._form.outputs if is_whole else "own"

    def _measure(self, strip: int, flags: Sequence[bool]) -> tuple[StripBytes, list[bool]]:
        """Return the bytes of a strip, and which of its carries need a gradient.

        `flags` tell the same of the carries that it receives.
        """
        inputs = self._inputs(strip)
        shapes = [self._form.carries(source)[place] for source, place in self._form.given(strip)]
        carried = [torch.empty(shape, dtype=dtype) for shape, dtype in shapes]
        static = set(self._form.static_carries(strip))
        own = [tensor for place, tensor in enumerate(carried) if place not in static]
        received = [tensor for tensor in inputs if tensor is not None]
        before = self._before(strip)
        unsaved = {storage_of(tensor) for tensor in (*received, *before, *self._static)}
        unsaved |= {storage_of(carried[place]) for place in static}

        flagged = list(zip(carried, flags, strict=True))

        def forward(deferred: DeferredGradients | None) -> tuple[_Forward, LiveBytes]:
            live = LiveBytes([*received, *carried, *before, *self._static], self._workspace)
            with live:
                run = self._forward(strip, inputs, flagged, before, deferred)
            return run, live

        run, live = forward(None)
        forward_peak = live.peak_bytes
        saved = {name: size for name, size in run.saved.items() if size and name not in unsaved}
        by_loss = tuple(
            size for name, size in run.by_loss.items() if name not in unsaved | saved.keys()
        )
        outputs, carries = (
            {storage_of(tensor) for tensor in tensors} for tensors in (run.outputs, own)
        )
        has_own_loss = self._loss is not None and self._loss.parts is not None
        sizes = self._boundary_sizes(run, received, is_loss_ahead=self._waits(strip), saved=saved)
        sizes["shared_slot"] = self._shared_slot(run, received, flagged)
        sizes["loss_gradient"] = sum(tensor.nbytes for tensor in before)
        needs = [tensor.requires_grad for tensor in run.kept]
        backward_peak, _ = self._backward(run, live)
        sizes |= self._split_backward(forward, unsaved)
        return (
            StripBytes(
                **sizes,
                left=0,  # what waits depends on other strips
                carried_back=0,
                saved=(
                    *(size for name, size in saved.items() if name not in outputs | carries),
                    *(by_loss if has_own_loss else ()),
                ),
                saved_outputs=tuple(
                    size for name, size in saved.items() if name in outputs - carries
                ),
                carried=tuple(
                    tensor.untyped_storage().nbytes() for tensor in own if tensor.numel()
                ),
                saved_carried=tuple(size for name, size in saved.items() if name in carries),
                saved_by_loss=() if has_own_loss else by_loss,
                forward_peak=forward_peak,
                backward_peak=backward_peak,
            ),
            needs,
        )

    def _inputs(self, strip: int) -> list[Tensor | None]:
        return [
            (
                None
                if boundary.ends is None and not self._is_last(strip)
                else torch.empty(boundary.strip_shape(strip), dtype=boundary.dtype)
            )
            for boundary in self._takes
        ]

    def _boundary_sizes(
        self, run: _Forward, inputs: Sequence[Tensor], saved: Mapping[int, int], is_loss_ahead: bool
    ) -> dict[str, int]:
        """Return the bytes of a strip's inputs and outputs, by the fields of `StripBytes`."""
        waiting = run.outputs if is_loss_ahead else ()
        handed_back = 0 if self._is_first else _float_bytes(inputs)
        with_gradient = (tensor for tensor in run.ends if tensor.requires_grad or not self._loss)
        around = (tensor for tensor in (*inputs, *run.ends) if storage_of(tensor) not in saved)
        return {
            "given": unique_bytes(inputs),
            "handed_on": 0 if self._loss else unique_bytes(run.outputs),
            "given_back": 0 if self._loss else _float_bytes(run.outputs),
            "handed_back": handed_back,
            "slot": sum(saved.values())
            + unique_bytes(around)
            + _float_bytes(with_gradient)
            + handed_back,
            "waiting": sum(
                tensor.untyped_storage().nbytes()
                for tensor in waiting
                if storage_of(tensor) not in saved
            ),
        }

    def _shared_slot(
        self, run: _Forward, inputs: Sequence[Tensor], carried: Sequence[tuple[Tensor, bool]]
    ) -> int:
        """Return the bytes of a strip's graphs, each tensor that goes in or out among them."""
        fixed = {storage_of(tensor) for tensor in self._static}
        ends = [*run.outputs, *run.kept]
        new = (
            tensor
            for tensor in (*inputs, *(tensor for tensor, _ in carried), *ends)
            if storage_of(tensor) not in run.saved.keys() | fixed
        )
        saved = sum(size for name, size in run.saved.items() if name not in fixed)
        arriving = _float_bytes(tensor for tensor in ends if tensor.requires_grad)
        leaving = sum(tensor.nbytes for tensor, flag in carried if flag)
        leaving += 0 if self._is_first else _float_bytes(inputs)
        return saved + unique_bytes(new) + arriving + leaving

    def _split_backward(
        self, forward: Callable[[DeferredGradients], tuple[_Forward, LiveBytes]], unsaved: set[int]
    ) -> dict[str, int]:
        """Return the bytes of a strip whose weight gradients come later, by the fields' names."""
        deferred = DeferredGradients()
        run, live = forward(deferred)
        by_forward = live.references(run.saved.keys() | {storage_of(tensor) for tensor in run.ends})
        num_received = run.num_received
        peak, gradients = self._backward(run, live)
        names = unsaved | {storage_of(tensor) for tensor in gradients[:num_received]}
        tensors = [tensor for tensor in deferred.tensors() if storage_of(tensor) not in names]
        # the memory of what has been freed may have been used again
        names = {name for name, reference in by_forward.items() if reference() is not None}
        made_here = [tensor for tensor in tensors if storage_of(tensor) not in names]
        arrived = {storage_of(tensor) for tensor in gradients}
        start = live.restart()
        with live:
            deferred.run(lambda: None)
        return {
            "held_for_weights": unique_bytes(tensors),
            "made_for_weights": unique_bytes(made_here),
            "made_by_backward": unique_bytes(
                tensor for tensor in made_here if storage_of(tensor) not in arrived
            ),
            "input_gradient_peak": peak,
            "weight_gradient_peak": live.peak_bytes - start,
        }

    def _before(self, strip: int) -> list[Tensor]:
        """Return the outputs of earlier strips in the last stage, for the loss of the image."""
        if self._loss is None or self._loss.parts is not None or not self._is_last(strip):
            return []
        return [
            torch.empty(boundary.strip_shape(earlier), dtype=boundary.dtype)
            for earlier in range(strip)
            for boundary in self._form.outputs
            if boundary.ends is not None
        ]

    def _forward(
        self,
        strip: int,
        inputs: Sequence[Tensor | None],
        carried: Sequence[tuple[Tensor, bool]],
        before: Sequence[Tensor],
        deferred: DeferredGradients | None,
    ) -> _Forward:
        """Run a strip; `carried` has its carried tensors, and whether they need gradients."""
        begun = [
            (
                tensor
                if tensor is None or self._is_first or not tensor.is_floating_point()
                else begin(Cut(), tensor)
            )
            for tensor in inputs
        ]
        kept_before = [
            begin(Cut(), tensor) if has_gradient else tensor for tensor, has_gradient in carried
        ]
        draws = (lambda _: 0) if self._form.draws else None
        with SavedStorages() as saved:
            outputs, carries = self._form.forward(
                strip, begun, kept_before, RunMode(draws, deferred)
            )
        own_outputs = [tensor for tensor in outputs if tensor is not None]
        by_loss = SavedStorages()
        loss = None
        ends = list(own_outputs) if self._loss is None else []
        if self._loss is not None and self._has_loss(strip):
            cuts: list[Cut] = []
            whole = self._whole(outputs, before, cuts)
            ends = list(tensors_in(whole))
            with by_loss:
                value = self._loss.function(whole)
            loss = get_gradient_edge(value), cuts
        left = [
            tensor.detach().clone()
            for carry, tensor in zip(self._form.held(strip), carries, strict=True)
            if carry.kind != STATIC
        ]
        edges = [
            (get_gradient_edge(tensor), torch.empty_like(tensor, device="meta"))
            for tensor in (*own_outputs, *carries)
            if tensor.requires_grad
        ]
        num_received = 0
        if self._loss is None:
            num_received = sum(tensor.requires_grad for tensor in own_outputs)
        return _Forward(
            saved.num_bytes,
            by_loss.num_bytes,
            own_outputs,
            ends,
            carries,
            left,
            edges,
            num_received,
            loss,
        )

    def _whole(
        self, outputs: Sequence[Tensor | None], before: Sequence[Tensor], cuts: list[Cut]
    ) -> Any:
        """Return what the loss takes: the rows of all strips, or of one that has its own loss.

        Their gradients arrive at `cuts`.
        """

        def cut(tensor: Tensor | None) -> Tensor | None:
            if tensor is None or not tensor.is_floating_point():
                return tensor
            cuts.append(Cut())
            return begin(cuts[-1], tensor.detach())

        if self._loss is not None and self._loss.parts is not None:
            begun: Any = list(map(cut, outputs))
            return self._form.structured(begun)
        tensors = iter(before)
        earlier = [
            [
                cut(next(tensors)) if boundary.ends is not None else None
                for boundary in self._form.outputs
            ]
            for _ in range(self._form.strips - 1)
        ]
        return self._form.joined([*earlier, [cut(tensor) for tensor in outputs]])

    def _backward(self, run: _Forward, live: LiveBytes) -> tuple[int, list[Tensor]]:
        """Run backward from all ends.

        Return its peak beyond the saved tensors, and the gradients that arrive, received ones first.
        """
        edges = list(run.edges)
        loss = run.loss
        for tensors in (run.outputs, run.ends, run.left, run.edges):
            tensors.clear()
        del run
        start = live.restart()
        with live:
            if loss is not None:
                torch.autograd.backward([loss[0]], [torch.empty(())])
                is_own = self._loss is not None and self._loss.parts is not None
                for cut in loss[1]:  # those of a strip's own loss are among the gradients below
                    gradient = None if is_own else cut.gradient
                    cut.gradient = None if gradient is None else gradient.clone()
            gradients = [torch.empty(like.shape, dtype=like.dtype) for _, like in edges]
            if edges:
                torch.autograd.backward([edge for edge, _ in edges], gradients)
        return live.peak_bytes - start, gradients


def _float_bytes(tensors: Iterable[Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors if tensor.is_floating_point())


if __name__ == "__main__":
    sys.exit(answer(take))

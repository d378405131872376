"""Run a module on whole images, strip by strip, with the gradients of the module itself."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from gems.autograd.outputs import tensors_in
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.storages import check_unchanged
from gems.streaming.compare import TOLERANCES, ConstantDraws, largest_difference, play
from gems.streaming.errors import StreamingError
from gems.streaming.ghost_norm import GhostBatchNorm2d, set_row_ends
from gems.streaming.strip_run import Draws, RunMode
from gems.streaming.strip_sample import StripSample
from gems.streaming.strip_stage import Boundary, StripStage

_SIDES_PX = (32, 64, 128, 256, 512)  # of the images on which a module is compared with itself
_MASK = 2**63 - 1
# rows x columns x images of a convolution: the weight gradient of fewer takes mostly time to read
# and write weights
MIN_POSITIONS = 1024


class Streamed(nn.Module):
    """A module that computes what `module` computes, in strips of rows or in blocks.

    Forward keeps the inputs, of each strip what later ones need, and the activations of the last
    `kept` strips. Backward runs the other strips again, last to first, so that the activations of a
    single one are held at a time. The parameters are those of `module`, in the mode and with the
    values that they have at the time.
    """

    def __init__(
        self,
        module: nn.Module,
        takes: Sequence[Boundary],
        grid: Sequence[int],
        until: str | None = None,
        kept: int = 1,
        min_positions: int = 1,
    ) -> None:
        """Take the module and the shapes of its inputs.

        Raises:
            StreamingError: The module needs the whole image, or has no layer `until`.
        """
        super().__init__()
        self.module = module
        self._takes = tuple(takes)
        self._grid = tuple(grid)
        self._until = until
        self._kept = kept
        self._min_positions = min_positions
        self._forms: dict[tuple[bool, ...], StripStage] = {}
        self._form()

    def forward(self, *inputs: Tensor) -> Any:
        """Return the output of the module for inputs of the shapes that it was made for.

        Raises:
            StreamingError: The inputs have other shapes or types, or autocast is on.
        """
        shapes = [(tuple(tensor.shape), tensor.dtype) for tensor in inputs]
        expected = [(tensor.shape, tensor.dtype) for tensor in self._takes]
        if shapes != expected:
            raise StreamingError(
                f"the inputs are {_listed(shapes)}, and were {_listed(expected)} when this module was"
                " streamed",
                "stream the module again with a sample like these inputs",
            )
        if any(torch.is_autocast_enabled(tensor.device.type) for tensor in inputs):
            raise StreamingError("autocast is on", "let the module cast what it computes with")
        form = self._form()
        draws = _seeds() if form.draws else None
        if torch.is_grad_enabled():
            parameters = list(self.module.parameters())
            return run_streamed(form, self._takes, inputs, draws, parameters, kept=self._kept)
        return infer_streamed(form, self._takes, inputs, draws)

    def _form(self) -> StripStage:
        """Return the streaming form of the module in its present mode."""
        mode = tuple(module.training for module in self.module.modules())
        if mode not in self._forms:
            name = type(self.module).__name__
            until = None if self._until is None else f"{name}.{self._until}"
            with torch.enable_grad():
                self._forms[mode] = StripStage(
                    [(name, self.module)], self._takes, self._grid, self._min_positions, until
                )
        return self._forms[mode]


def stream(
    module: nn.Module,
    sample: Tensor | Sequence[Tensor],
    divisions: int | Sequence[int],
    check: bool = True,
    until: str | None = None,
    kept: int = 1,
    min_positions: int | None = None,
) -> Streamed:
    """Return a module that computes `module` part by part, exactly, in less memory.

    Args:
        module: Any module of convolutions, poolings, activations and other operations of known
            rows. Norms need statistics that do not depend on the image.
        sample: A tensor (N, C, H, W) or (N, C, D, H, W) like the input, or several. Only shapes and
            types are read, so it may be on the meta device. Other inputs are taken whole.
        divisions: The number of strips along the first axis, or the numbers of parts along each:
            [rows, columns], or [depth, rows, columns]. Memory for what strips keep grows with their
            number; with blocks it grows with the border between blocks.
        check: Whether to compare outputs, gradients and buffers with those of the module, in
            float64 on a small image of random numbers.
        until: A layer of the module, such as "layer4". All that runs after it takes whole maps in
            the last part, so it may contain any operation.
        kept: The number of last strips or blocks whose activations are kept for backward. The
            others run again. With 1, no more is held than with 0: the last strip is the first of
            backward. Each further one costs memory and saves time.
        min_positions: The rows x columns x images that a convolution or linear layer takes at
            least: it waits for strips until there are so many. By default 1024, but 1 in blocks,
            where it would wait for the full width, and with norms by strip.

    Raises:
        StreamingError: The module or the sample cannot be divided, or the results differ.
    """
    samples = (sample,) if isinstance(sample, Tensor) else tuple(sample)
    grid = (divisions,) if isinstance(divisions, int) else tuple(divisions)
    images = [tensor for tensor in samples if _is_divided(tensor, grid)]
    if not grid or not images or not _fits(images, grid):
        raise StreamingError(
            f"divisions={divisions} of {_listed([(tuple(tensor.shape),) for tensor in samples])}",
            "give images (N, C, H, W) or (N, C, D, H, W), and from 1 part of an axis to its size",
        )
    if not 0 <= kept <= math.prod(grid):
        raise StreamingError(f"kept={kept}", f"give a number from 0 to {math.prod(grid)}")
    if min_positions is None:
        is_bound = any(isinstance(tensor, GhostBatchNorm2d) for tensor in module.modules())
        min_positions = 1 if is_bound or len(grid) > 1 else MIN_POSITIONS
    streamed = Streamed(module, _boundaries(samples, grid), grid, until, kept, min_positions)
    if check:
        _check(module, samples, grid, until)
    return streamed


def run_streamed(
    form: StripStage,
    takes: Sequence[Boundary],
    inputs: Sequence[Tensor],
    draws: Draws | None,
    parameters: Sequence[nn.Parameter],
    deferred: DeferredGradients | None = None,
    kept: int = 1,
) -> Any:
    """Run a form on whole inputs, with gradients.

    The graphs of the last `kept` strips are kept for backward; the others run again. Weight
    gradients that can wait go to `deferred`.
    """
    num_again = form.strips - kept
    image = _Image(form, takes, draws, deferred, num_again, len(inputs), list(parameters))
    return form.structured(_apply(image, *inputs, *parameters))


def infer_streamed(
    form: StripStage, takes: Sequence[Boundary], inputs: Sequence[Tensor], draws: Draws | None
) -> Any:
    """Run a form on whole inputs, without gradients."""
    carries: dict[int, list[Tensor]] = {}
    strips = []
    with torch.no_grad():
        for strip in range(form.strips):
            cut = _cut(takes, inputs, strip, form.strips)
            outputs, kept = form.forward(strip, cut, carries.pop(strip, ()), RunMode(draws))
            for carry, tensor in zip(form.held(strip), kept, strict=True):
                carries.setdefault(carry.to, []).append(tensor)
            strips.append(outputs)
    return form.joined(strips)


class _Image:
    """The strips of one image, between forward and backward."""

    def __init__(
        self,
        form: StripStage,
        takes: Sequence[Boundary],
        draws: Draws | None,
        deferred: DeferredGradients | None,
        num_again: int,
        num_inputs: int,
        parameters: list[nn.Parameter],
    ) -> None:
        self.form = form
        self.takes = takes
        self.num_inputs = num_inputs
        self.parameters = parameters
        self._versions = [parameter._version for parameter in parameters]
        self._draws = draws
        self._deferred = deferred
        self._num_again = num_again
        self._carried: list[tuple[Tensor, ...]] = []

    def forward(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run all strips, and return the outputs."""
        self._sample = StripSample(
            self.form, self._draws, any(tensor.requires_grad for tensor in inputs)
        )
        strips = []
        for strip in range(self.form.strips):
            self._carried.append(self._sample.carried)
            strips.append(
                self._sample.forward(
                    _cut(self.takes, inputs, strip, self.form.strips),
                    self._deferred,
                    is_run_again=strip < self._num_again,
                )
            )
        return list(tensors_in(self.form.joined(strips)))

    def backward(
        self, inputs: Sequence[Tensor], gradients: Sequence[Tensor | None]
    ) -> list[Tensor | None]:
        """Run the backward of all strips, and return the gradients of the inputs."""
        for parameter, version in zip(self.parameters, self._versions, strict=True):
            check_unchanged(parameter, version, "forward in strips")
        strips = []
        for strip in reversed(range(self.form.strips)):
            carried = self._carried.pop()
            if strip < self._num_again:
                rows = _cut(self.takes, inputs, strip, self.form.strips)
                self._sample.run_again(strip, rows, carried, self._deferred)
            output_grads = _cut(self.form.outputs, gradients, strip, self.form.strips)
            strips.append(self._sample.backward(output_grads))
        input_grads: list[Tensor | None] = []
        for place, boundary in enumerate(self.takes):
            parts = [strip_grads[place] for strip_grads in strips[::-1]]
            like = next((part for part in parts if part is not None), None)
            if boundary.ends is None or like is None:
                input_grads.append(parts[-1])
                continue
            blocks = [
                like.new_zeros(boundary.strip_shape(strip)) if part is None else part
                for strip, part in enumerate(parts)
            ]
            input_grads.append(boundary.joined(blocks))
        return input_grads


class _InStrips(Function):
    """Run the strips of an image as one function of its inputs and of the parameters."""

    @staticmethod
    def forward(ctx: Any, image: _Image, *tensors: Tensor) -> tuple[Tensor, ...]:
        inputs = tensors[: image.num_inputs]
        ctx.image = image
        ctx.save_for_backward(*inputs)
        ctx.set_materialize_grads(False)
        with torch.enable_grad():
            outputs = image.forward(inputs)
        ctx.mark_non_differentiable(
            *(tensor for tensor in outputs if not tensor.is_floating_point())
        )
        return tuple(outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        image: _Image = ctx.image
        # strips add to .grad: collect what they add, and let autograd add it as of any function
        before = [parameter.grad for parameter in image.parameters]
        try:
            for parameter in image.parameters:
                parameter.grad = None
            with torch.enable_grad():  # in which strips run again
                input_grads = image.backward(ctx.saved_tensors, gradients)
            added = [parameter.grad for parameter in image.parameters]
        finally:
            for parameter, gradient in zip(image.parameters, before, strict=True):
                parameter.grad = gradient
        return (None, *input_grads, *added)


_apply: Any = _InStrips.apply


def _boundaries(samples: Sequence[Tensor], grid: Sequence[int]) -> list[Boundary]:
    return [
        Boundary.even(tuple(sample.shape), sample.dtype, grid)
        if _is_divided(sample, grid)
        else Boundary(tuple(sample.shape), sample.dtype, None, (None,) * len(grid))
        for sample in samples
    ]


def _is_divided(sample: Tensor, grid: Sequence[int]) -> bool:
    """Return whether a sample is an image or a volume, with all axes of the grid."""
    return max(4, 2 + len(grid)) <= sample.dim() <= 5


def _fits(images: Sequence[Tensor], grid: Sequence[int]) -> bool:
    return all(
        1 <= parts <= size
        for image in images
        for parts, size in zip(grid, image.shape[2:], strict=False)
    )


def _cut(
    boundaries: Sequence[Boundary], values: Sequence[Tensor | None], strip: int, strips: int
) -> list[Tensor | None]:
    """Return a strip of each value; one without axes is there in the last strip."""
    parts: list[Tensor | None] = []
    for boundary, value in zip(boundaries, values, strict=True):
        if value is None or boundary.ends is None:
            parts.append(value if strip == strips - 1 else None)
        else:
            parts.append(boundary.cut(value, strip))
    return parts


def _seeds() -> Draws:
    """Return seeds for the random numbers of one image, drawn by torch's own generator."""
    first = int(torch.randint(_MASK, ()))
    return lambda checksum: (first + checksum * 0x9E3779B97F4A7C15) & _MASK


def _check(
    module: nn.Module, samples: Sequence[Tensor], grid: Sequence[int], until: str | None
) -> None:
    """Compare a module in strips with itself, on the smallest image that it takes.

    Raises:
        StreamingError: They differ, or the module takes no images of random numbers.
    """
    problem: Exception | None = None
    is_image = [_is_divided(image, grid) for image in samples]
    images = [image for image, flag in zip(samples, is_image, strict=True) if flag]
    largest_px = max(max(image.shape[2:]) for image in images)
    for side in (*(side for side in _SIDES_PX if side < largest_px), largest_px):
        values = [
            _small(image, side if flag else largest_px)
            for image, flag in zip(samples, is_image, strict=True)
        ]
        least = [
            min(min(image.shape[2 + axis], side) for image in images) for axis in range(len(grid))
        ]
        small = tuple(map(min, grid, least))
        for dtype, tolerance in TOLERANCES.items():
            try:
                error = _compared(module, values, small, dtype, until)
            except Exception as caught:
                problem = caught
                continue
            if not error <= tolerance:
                raise StreamingError(
                    f"{type(module).__name__} in strips differs from itself, by {error:.1e} of the"
                    " largest value",
                    "run it whole",
                )
            return
    raise StreamingError(
        f"{type(module).__name__} cannot be compared with itself ({type(problem).__name__}:"
        f" {problem})",
        "pass check=False",
    ) from problem


def _small(sample: Tensor, side: int) -> Tensor:
    shape = [*sample.shape[:2], *(min(size, side) for size in sample.shape[2:])]
    if sample.is_floating_point():
        return torch.randn(shape, dtype=torch.float64)
    return torch.zeros(shape, dtype=sample.dtype)


def _compared(
    module: nn.Module,
    values: Sequence[Tensor],
    grid: Sequence[int],
    dtype: torch.dtype,
    until: str | None,
) -> float:
    """Return the largest difference of a copy of a module and of the copy in strips."""
    tensors = (*module.parameters(), *module.buffers())
    device = next((tensor.device for tensor in tensors), torch.device("cpu"))
    twin = copy.deepcopy(module).to(dtype)
    inputs = [
        tensor.to(device, dtype if tensor.is_floating_point() else tensor.dtype)
        for tensor in values
    ]
    takes = _boundaries(inputs, grid)
    form = Streamed(twin, takes, grid, until)._form()
    set_row_ends(type(twin).__name__, twin, form.norm_ends)
    parameters = list(twin.parameters())
    with torch.random.fork_rng(), ConstantDraws() if form.draws else nullcontext():  # type: ignore[no-untyped-call]
        wanted, back = play(twin, inputs, lambda inputs: twin(*inputs))
        results, _ = play(
            twin,
            inputs,
            lambda inputs: run_streamed(form, takes, inputs, lambda _: 0, parameters),
            back,
        )
    return largest_difference(results, wanted)


def _listed(values: Sequence[tuple[Any, ...]]) -> str:
    return ", ".join(" ".join(map(str, value)) for value in values)

"""Each layer of a network in strips, evaluated in strips and with a split backward, held against the layer itself.

It is done in float64, or float32 where the layer takes no other, on a small image. As a child
process it reads a resolved run as JSON on stdin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.layers import SplitLayers
from gems.autograd.strips.sample import StripSample
from gems.autograd.strips.stage import Boundary, StripStage
from gems.autograd.strips.trace import KEY
from gems.config.schema import DataConfig, RunSpec
from gems.errors import ConfigError, one_line
from gems.models import Layer, layers_of
from gems.models.blocks.parts import GhostBatchNorm2d
from gems.models.build import TensorSpec, as_tuple, build_layers, freeze, input_spec
from gems.models.outputs import tensors_in
from gems.profile.exactness import Exactness
from gems.profile.profilers.take import answer

SIDES_PX = (32, 64, 128, 256)
BATCH = 2
STRIPS = 4
MAX_PARAMETERS = 200_000_000
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
FLOOR = 1e-6  # of the largest value of a layer, with which smaller ones are compared
Values = list[Tensor | None]
Named = list[tuple[str, nn.Module]]


def take(spec: RunSpec) -> Exactness:
    """Compare the layers of a resolved run on the smallest image on which they stream.

    Raises:
        ConfigError: a layer that differs from itself.
    """
    why = "no image of up to 256 px a side suits it"
    for data in _images(spec.data):
        try:
            layers = layers_of(spec.model, data)
        except ConfigError:
            continue
        for dtype in TOLERANCES:
            try:
                left_out = _Comparison(spec, data, layers, dtype).run()
            except _DiffersError as error:
                raise ConfigError(*error.args) from None
            except ConfigError as error:  # rows are too few for the strips, say
                why = str(error)
                break
            except Exception as error:
                why = one_line(f"{type(error).__name__}: {error}")[:200]
                continue
            return Exactness((data.height_px, data.width_px), left_out)
    return Exactness(None, why)


def _images(data: DataConfig) -> Iterator[DataConfig]:
    """Yield the data with images of growing sides, up to its own."""
    seen = set()
    for side in SIDES_PX:
        height = min(side, data.height_px)
        width = min(side, data.width_px)
        if (height, width) not in seen:
            seen.add((height, width))
            yield replace(data, height_px=height, width_px=width)


class _DiffersError(Exception):
    """The arguments of the ConfigError for a layer that differs."""


class _Comparison:
    """The layers of a network in one type, on one image."""

    def __init__(
        self, spec: RunSpec, data: DataConfig, layers: Sequence[Layer], dtype: torch.dtype
    ) -> None:
        self._spec = spec
        self._dtype = dtype
        modules = build_layers(layers, 0, len(layers), spec.seed, dtype)
        self._layers: Named = [
            (layer.name, module) for layer, module in zip(layers, modules, strict=True)
        ]
        freeze(self._layers, spec.optimizer.frozen)
        self._images = input_spec(data, BATCH, dtype)

    def run(self) -> str:
        """Compare all layers; return what could not be."""
        parameters = sum(each.numel() for _, module in self._layers for each in module.parameters())
        if parameters > MAX_PARAMETERS:
            return f"it has {parameters} parameters, more than {MAX_PARAMETERS}"
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            if self._spec.parallel.strips > 1:
                left_out = self._train_in_strips()
                self._evaluate_in_strips()
            else:
                left_out = []
            self._split()
        return f"{', '.join(left_out)} draw random numbers" if left_out else ""

    def _image(self) -> Tensor:
        return torch.randn(self._images.shape, dtype=self._dtype)

    def _train_in_strips(self) -> list[str]:
        values: tuple[Tensor, ...] = (self._image(),)
        takes: tuple[Boundary, ...] = (self._boundary(self._images),)
        left_out = []
        for name, module in self._layers:
            form = StripStage([(name, module.train())], takes, STRIPS)
            if form.draws:
                form = StripStage([(name, module.eval())], takes, STRIPS)
            for path, norm in module.named_modules():
                if isinstance(norm, GhostBatchNorm2d):
                    norm.row_ends = form.norm_ends.get(f"{name}.{path}" if path else name)
            wanted, back = _play(module, values, lambda given, module=module: module(*given))
            if form.draws:
                left_out.append(name)
            else:
                found, _ = _play(
                    module,
                    values,
                    lambda given, form=form, takes=takes: _Streamed(form, takes, given),
                    back,
                )
                self._hold(name, "in strips", found, wanted)
            values = _next(wanted, form.outputs)
            takes = form.outputs
        return left_out

    def _evaluate_in_strips(self) -> None:
        values: tuple[Tensor, ...] = (self._image(),)
        takes: tuple[Boundary, ...] = (self._boundary(self._images),)
        with torch.no_grad():
            for name, module in self._layers:
                try:
                    form = StripStage([(name, module.eval())], takes, STRIPS)
                except ConfigError:  # then whole images are evaluated
                    return
                if form.draws:
                    return
                wanted = list(tensors_in(module(*(value.clone() for value in values))))
                carries: tuple[Tensor, ...] = ()
                strips = []
                for strip in range(STRIPS):
                    outputs, carries = form.forward(strip, _rows(takes, values, strip), carries)
                    strips.append(outputs)
                self._hold(
                    name, "evaluated in strips", list(tensors_in(form.joined(strips))), wanted
                )
                values = tuple(wanted)
                takes = form.outputs

    def _split(self) -> None:
        values: tuple[Tensor, ...] = (self._image(),)
        for name, module in self._layers:
            module.train()
            for norm in module.modules():
                if isinstance(norm, GhostBatchNorm2d):
                    norm.row_ends = None
            wanted, back = _play(module, values, lambda given, module=module: module(*given))
            layers = SplitLayers(nn.ModuleList([module]))
            deferred = DeferredGradients()

            def run(
                given: Any,
                module: nn.Module = module,
                layers: SplitLayers = layers,
                to: Any = deferred,
            ) -> Any:
                with layers.defer_to(to):
                    return module(*given)

            found, _ = _play(module, values, run, back, partial(deferred.run, lambda: None))
            self._hold(name, "with a split backward", found, wanted)
            values = tuple(each for each in wanted[: len(back)] if each is not None)

    def _hold(
        self, name: str, how: str, found: Sequence[Tensor | None], wanted: Sequence[Tensor | None]
    ) -> None:
        largest = max(
            (float(each.abs().max()) for each in wanted if each is not None and each.numel()),
            default=0.0,
        )
        error = max(
            (
                _difference(one, other, FLOOR * largest)
                for one, other in zip(found, wanted, strict=True)
            ),
            default=0.0,
        )
        if not error <= TOLERANCES[self._dtype]:
            is_split = how.startswith("with")
            key, value = (
                ("schedule", self._spec.schedule.name)
                if is_split
                else (KEY, self._spec.parallel.strips)
            )
            advice = (
                "set a schedule with a full backward, such as 1f1b" if is_split else f"set {KEY}=1"
            )
            text = f"layer {name} {how} differs from itself, by {error:.1e} of the largest value"
            raise _DiffersError(key, value, text, advice)

    def _boundary(self, images: TensorSpec) -> Boundary:
        return Boundary.of_images(images, STRIPS)


class _Streamed:
    """The outputs of a layer in strips, and its backward."""

    def __init__(
        self, form: StripStage, takes: Sequence[Boundary], values: Sequence[Tensor]
    ) -> None:
        self._form, self._takes, self._sample = form, takes, StripSample(form)
        self.outputs = form.joined(
            [self._sample.forward(_rows(takes, values, strip)) for strip in range(STRIPS)]
        )

    def backward(self, back: Sequence[Tensor | None]) -> Values:
        """Return the gradients of the inputs."""
        found: list[list[Tensor]] = [[] for _ in self._takes]
        for strip in reversed(range(STRIPS)):
            given = self._sample.backward(_rows(self._form.outputs, back, strip))
            for place, boundary in enumerate(self._takes):
                gradient = given[place]
                if boundary.ends is None and strip < STRIPS - 1:
                    continue
                shape = boundary.strip_shape(strip)
                found[place].append(
                    torch.zeros(shape, dtype=boundary.dtype) if gradient is None else gradient
                )
        return [
            torch.cat(parts[::-1], boundary.dim) if boundary.ends is not None else parts[0]
            for parts, boundary in zip(found, self._takes, strict=True)
        ]


def _rows(
    boundaries: Sequence[Boundary], values: Sequence[Tensor | None], strip: int
) -> list[Tensor | None]:
    """Return the rows of a strip of values, which are whole in the last strip if they have no rows."""
    found: list[Tensor | None] = []
    for boundary, value in zip(boundaries, values, strict=True):
        if value is None or boundary.ends is None:
            found.append(value if strip == STRIPS - 1 else None)
        else:
            first = boundary.ends[strip - 1] if strip else 0
            found.append(value.narrow(boundary.dim, first, boundary.ends[strip] - first))
    return found


def _play(
    module: nn.Module,
    values: Sequence[Tensor],
    run: Callable[..., Any],
    back: Sequence[Tensor | None] | None = None,
    after: Callable[[], None] = lambda: None,
) -> tuple[Values, list[Tensor | None]]:
    """Run forward and backward; return outputs, gradients and buffers, and the gradients that outputs were given.

    Buffers are as before afterwards, and random numbers those of any other call.
    """
    torch.default_generator.manual_seed(1)
    buffers = [(each, each.detach().clone()) for each in module.buffers()]
    parameters = list(module.parameters())
    for parameter in parameters:
        parameter.grad = None
    leaves = [each.detach().clone().requires_grad_(each.is_floating_point()) for each in values]
    made = run([leaf.clone() for leaf in leaves])
    is_streamed = isinstance(made, _Streamed)
    outputs = list(tensors_in(made.outputs if is_streamed else made))
    if back is None:
        back = [torch.randn_like(each) if each.requires_grad else None for each in outputs]
    if is_streamed:
        gradients = made.backward(back)
    else:
        pairs = [
            (each, gradient)
            for each, gradient in zip(outputs, back, strict=True)
            if gradient is not None
        ]
        if pairs:
            torch.autograd.backward(
                [each for each, _ in pairs], [gradient for _, gradient in pairs]
            )
        gradients = [leaf.grad for leaf in leaves]
    after()
    moved = [each.detach().clone() for each, _ in buffers]
    for buffer, before in buffers:
        buffer.data.copy_(before)
    found = [
        *(each.detach() for each in outputs),
        *gradients,
        *(parameter.grad for parameter in parameters),
        *moved,
    ]
    for parameter in parameters:
        parameter.grad = None
    return found, list(back)


def _next(wanted: Values, outputs: Sequence[Boundary]) -> tuple[Tensor, ...]:
    """Return what the next layer takes."""
    return as_tuple(tuple(each for each in wanted[: len(outputs)] if each is not None))


def _difference(found: Tensor | None, wanted: Tensor | None, floor: float) -> float:
    if wanted is None or found is None:
        there = wanted if found is None else found
        return 0.0 if there is None or not there.any() else float("inf")
    if found.shape != wanted.shape:
        return float("inf")
    if not wanted.numel():
        return 0.0
    largest = max(float(wanted.abs().max()), floor)
    return float((found.double() - wanted.double()).abs().max()) / (largest or 1.0)


if __name__ == "__main__":
    sys.exit(answer(take))

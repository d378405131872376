"""Compare each layer of a network in strips, or with a split backward, with the layer itself.

Strips are compared in training and in evaluation. As a child process, it reads a resolved run as
JSON on stdin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.outputs import tensors_in
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.layers import SplitLayers
from gems.config.schema import DataConfig
from gems.errors import ConfigError, one_line
from gems.models import Layer, layers_of
from gems.models.build import build_layers, freeze, input_spec
from gems.models.streaming_errors import KEY, until_in
from gems.profile.exactness import Exactness
from gems.profile.profilers.layers import answer
from gems.profile.subject import Subject
from gems.streaming.buffers import Dims
from gems.streaming.compare import TOLERANCES, ConstantDraws, largest_difference, play
from gems.streaming.errors import StreamingError
from gems.streaming.ghost_norm import set_row_ends
from gems.streaming.streamed import infer_streamed, run_streamed
from gems.streaming.strip_stage import Boundary, StripStage
from gems.utils.units import with_sides

SIDES_PX = (32, 64, 128, 256, 512)
BATCH = 2
GRIDS = {1: (4,), 2: (2, 3), 3: (2, 3, 2)}  # by the axes that are divided
MAX_PARAMETERS = 1_000_000_000
MAX_OF_LAYER = 200_000_000
_PLAIN = (int, float, complex, bool, type(None), torch.dtype, torch.device, set)
# the dimension of each axis of each tensor between layers, or None if it has none
Axes = Sequence[Dims]


def take(subject: Subject) -> Exactness:
    """Compare the layers of a resolved run on the smallest image on which all, or most, stream.

    Raises:
        ConfigError: A layer differs from itself.
    """
    best: Exactness | None = None
    fewest = 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads are slower for small layers
    try:
        for data in _images(subject.data):
            try:
                layers = layers_of(subject.model, data)
            except ConfigError:
                continue
            comparison = _Comparison(subject, data, layers)
            left_out = comparison.run()
            if best is None or len(left_out) < fewest:
                text = "; ".join(f"{name} ({why})" for name, why in left_out.items())
                best = Exactness(data.sides_px, text)
                fewest = len(left_out)
            if not comparison.may_be_too_small:
                break
    finally:
        torch.set_num_threads(threads)
    return best or Exactness(
        None, f"all (the network takes no image of up to {SIDES_PX[-1]} px a side)"
    )


def _images(data: DataConfig) -> Iterator[DataConfig]:
    """Yield the data with images of increasing sides, up to its own."""
    seen = set()
    for side in SIDES_PX:
        smaller = with_sides(data, (min(side, most) for most in data.sides_px))
        if smaller.sides_px not in seen:
            seen.add(smaller.sides_px)
            yield smaller


class _DiffersError(Exception):
    """The arguments of the ConfigError for a layer that differs."""


class _Comparison:
    """The layers of a network on one image, each separately on the output of the one before.

    Equal layers are compared once. Only the current layer is in float64, or in float32 if it
    accepts no other type.
    """

    def __init__(self, subject: Subject, data: DataConfig, layers: Sequence[Layer]) -> None:
        self._subject = subject
        self._grid = GRIDS[len(subject.parallel.grid)]
        self._dtype = torch.float64
        self._names = [layer.name for layer in layers]
        self._left_out: dict[str, str] = {}
        self.may_be_too_small = False
        alone = build_layers(layers, 0, len(layers), 0, device="meta")
        self._parameters = sum(
            parameter.numel() for module in alone for parameter in module.parameters()
        )
        self._modules: list[nn.Module] = []
        if self._parameters <= MAX_PARAMETERS:
            self._modules = build_layers(layers, 0, len(layers), 0)
            freeze(zip(self._names, self._modules, strict=True), subject.optimizer.frozen)
        self._images = input_spec(data, BATCH, torch.float64)

    def run(self) -> dict[str, str]:
        """Compare all layers; return the reasons why some could not be compared, by name."""
        if not self._modules:
            return {
                "all": f"the network has {self._parameters} parameters, more than {MAX_PARAMETERS}"
            }
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            if self._subject.parallel.num_strips > 1:
                self._each(True, self._train_in_strips)
                self._each(False, self._evaluate_in_strips)
            else:
                self._each(True, self._split)
        return self._left_out

    def _each(
        self,
        training: bool,
        compare: Callable[[str, nn.Module, Sequence[Tensor], Axes], Axes | None],
    ) -> None:
        values: tuple[Tensor, ...] = (torch.randn(self._images.shape, dtype=self._images.dtype),)
        num_axes = len(self._grid)
        axes: Axes = (tuple(range(2, 2 + num_axes)),)
        known: dict[Hashable, tuple[tuple[Tensor, ...], Axes]] = {}
        for name, module in zip(self._names, self._modules, strict=True):
            module.train(training)
            key = _likeness(module), *((value.shape, value.dtype) for value in values), *axes
            if key not in known:
                try:
                    axes_after = self._alone(name, module, values, axes, compare)
                    with torch.no_grad():
                        outputs = tuple(
                            tensors_in(module(*(value.clone() for value in self._cast(values))))
                        )
                except _DiffersError as error:
                    raise ConfigError(*error.args) from None
                except Exception as error:
                    after = "" if name == self._names[-1] else ", nor what follows it"
                    self._left_out[name] = (
                        one_line(f"{type(error).__name__}: {error}")[:200] + after
                    )
                    return
                values = tuple(
                    value.double() if value.is_floating_point() else value for value in outputs
                )
                num_dims = len(self._images.shape)
                known[key] = (
                    values,
                    axes_after or [_likely_axes(value, num_dims, num_axes) for value in outputs],
                )
            values, axes = known[key]
            module.float()

    def _alone(
        self,
        name: str,
        module: nn.Module,
        values: Sequence[Tensor],
        axes: Axes,
        compare: Callable[[str, nn.Module, Sequence[Tensor], Axes], Axes | None],
    ) -> Axes | None:
        """Compare a layer, or note why it cannot be compared.

        Return the row dimensions of its output, if they are known.
        """
        parameters = sum(parameter.numel() for parameter in module.parameters())
        if parameters > MAX_OF_LAYER:
            self._dtype = torch.float32
            self._left_out[name] = f"it has {parameters} parameters, more than {MAX_OF_LAYER}"
            return None
        why = ""
        for self._dtype in TOLERANCES:
            module.to(self._dtype)
            try:
                return compare(name, module, self._cast(values), axes)
            except _DiffersError:
                raise
            except StreamingError as error:  # for example, its map has too few rows
                self.may_be_too_small = True
                why = why or error.reason
            except Exception as error:
                why = why or one_line(f"{type(error).__name__}: {error}")[:200]
        self._left_out[name] = why
        return None

    def _cast(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [value.to(self._dtype) if value.is_floating_point() else value for value in values]

    def _train_in_strips(
        self, name: str, module: nn.Module, values: Sequence[Tensor], axes: Axes
    ) -> Axes:
        takes = _boundaries(values, axes, self._grid)
        form = StripStage([(name, module)], takes, self._grid, until=self._until(name))
        set_row_ends(name, module, form.norm_ends)
        deferred = DeferredGradients()
        with ConstantDraws() if form.draws else nullcontext():  # type: ignore[no-untyped-call]
            expected, back = play(module, values, lambda inputs: module(*inputs))
            parameters = list(module.parameters())

            def in_strips(inputs: Sequence[Tensor]) -> Any:
                return run_streamed(
                    form, takes, inputs, lambda _: 0, parameters, deferred, kept=form.strips
                )

            actual, _ = play(module, values, in_strips, back, partial(deferred.run, lambda: None))
        self._hold(name, "in strips", actual, expected)
        return [boundary.dims for boundary in form.outputs]

    def _evaluate_in_strips(
        self, name: str, module: nn.Module, values: Sequence[Tensor], axes: Axes
    ) -> Axes | None:
        takes = _boundaries(values, axes, self._grid)
        with torch.no_grad():
            try:
                form = StripStage([(name, module)], takes, self._grid, until=self._until(name))
            except StreamingError:  # then whole images are evaluated
                return None
            with ConstantDraws() if form.draws else nullcontext():  # type: ignore[no-untyped-call]
                expected = list(tensors_in(module(*(value.clone() for value in values))))
                outputs = infer_streamed(form, takes, values, lambda _: 0)
        self._hold(name, "evaluated in strips", list(tensors_in(outputs)), expected)
        return [boundary.dims for boundary in form.outputs]

    def _until(self, name: str) -> str | None:
        return until_in([name], self._names, self._subject.parallel.strips_until)

    def _split(self, name: str, module: nn.Module, values: Sequence[Tensor], axes: Axes) -> None:
        expected, back = play(module, values, lambda inputs: module(*inputs))
        layers = SplitLayers(nn.ModuleList([module]))
        deferred = DeferredGradients()

        def run(inputs: Any) -> Any:
            with layers.defer_to(deferred):
                return module(*inputs)

        actual, _ = play(module, values, run, back, partial(deferred.run, lambda: None))
        self._hold(name, "with a split backward", actual, expected)

    def _hold(
        self,
        name: str,
        how: str,
        actual: Sequence[Tensor | None],
        expected: Sequence[Tensor | None],
    ) -> None:
        error = largest_difference(actual, expected)
        if not error <= TOLERANCES[self._dtype]:
            is_split = how.startswith("with")
            key, value = (
                ("schedule", "split backward") if is_split else (KEY, self._subject.parallel.strips)
            )
            advice = (
                "set a schedule with a full backward, such as 1f1b" if is_split else f"set {KEY}=1"
            )
            text = f"layer {name} {how} differs from itself, by {error:.1e} of the largest value"
            raise _DiffersError(key, value, text, advice)


def _likely_axes(tensor: Tensor, num_dims: int, count: int) -> Dims:
    is_map = tensor.dim() == num_dims
    return tuple(dim if is_map and tensor.shape[dim] > 1 else None for dim in range(2, 2 + count))


def _boundaries(values: Sequence[Tensor], axes: Axes, grid: Sequence[int]) -> list[Boundary]:
    """Return a layer's inputs in strips whose numbers of rows differ by at most one."""
    return [
        Boundary.even(tuple(value.shape), value.dtype, grid, dims)
        for value, dims in zip(values, axes, strict=True)
    ]


def _likeness(module: nn.Module) -> Hashable:
    """Return a key that is equal for layers that only differ in the values of their tensors."""
    pieces = {
        piece
        for path, _ in (*module.named_modules(), *module.named_parameters())
        for piece in (path, *path.split("."))
    }
    numbers: dict[Any, int] = {}

    def like(value: Any) -> Hashable:
        if isinstance(value, Tensor):
            number = numbers.setdefault(id(value), len(numbers))
            return number, value.shape, value.stride(), value.dtype, value.requires_grad
        if isinstance(value, tuple | list):
            return tuple(map(like, value))
        if isinstance(value, dict):
            return tuple((like(key), like(inner)) for key, inner in value.items())
        # generated by fx
        if isinstance(value, FunctionType) and value.__code__.co_filename.startswith(
            "<eval_with_key>"
        ):
            code = value.__code__
            return (
                code.co_code,
                like(code.co_names),
                like([submodule for submodule in code.co_consts if submodule is not None]),
            )
        if isinstance(value, str):
            return numbers.setdefault(value, len(numbers)) if value in pieces else value
        return repr(value) if isinstance(value, _PLAIN) else id(value)

    skipped = ("_modules", "_output_names")
    return tuple(
        (
            type(submodule),
            *(like(value) for key, value in vars(submodule).items() if key not in skipped),
        )
        for submodule in module.modules()
    )


if __name__ == "__main__":
    sys.exit(answer(take))

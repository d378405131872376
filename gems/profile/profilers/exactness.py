"""Compare each layer of a network in strips, or with a split backward, with the layer itself.

Strips are compared in training and in evaluation. As a child process, it reads a resolved run as
JSON on stdin.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import FunctionType
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.outputs import tensors_in
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.autograd.split_backward.layers import SplitLayers
from gems.autograd.torch_internals import TorchDispatchMode
from gems.config.schema import DataConfig, RunSpec
from gems.errors import ConfigError, one_line
from gems.models import Layer, layers_of
from gems.models.build import build_layers, freeze, input_spec
from gems.profile.exactness import Exactness
from gems.profile.profilers.take import answer
from gems.streaming.ghost_norm import GhostBatchNorm2d
from gems.streaming.strip_sample import StripSample
from gems.streaming.strip_stage import Boundary, StripStage
from gems.streaming.trace import KEY

SIDES_PX = (32, 64, 128, 256, 512)
BATCH = 2
STRIPS = 4
MAX_PARAMETERS = 1_000_000_000
MAX_OF_LAYER = 200_000_000
TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3}
# smaller values are compared relative to this share of a layer's largest value
FLOOR = 1e-6
_PLAIN = (int, float, complex, bool, type(None), torch.dtype, torch.device, set)
_DRAWS = ("bernoulli", "rand", "normal", "uniform", "exponential")
Values = list[Tensor | None]
# the dimension of rows of each tensor between layers, or None if it has none
Rows = Sequence[int | None]


def take(spec: RunSpec) -> Exactness:
    """Compare the layers of a resolved run on the smallest image on which all, or most, stream.

    Raises:
        ConfigError: A layer differs from itself.
    """
    best: Exactness | None = None
    fewest = 0
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several threads are slower for small layers
    try:
        for data in _images(spec.data):
            try:
                layers = layers_of(spec.model, data)
            except ConfigError:
                continue
            comparison = _Comparison(spec, data, layers)
            left_out = comparison.run()
            if best is None or len(left_out) < fewest:
                text = "; ".join(f"{name} ({why})" for name, why in left_out.items())
                best = Exactness((data.height_px, data.width_px), text)
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
        height = min(side, data.height_px)
        width = min(side, data.width_px)
        if (height, width) not in seen:
            seen.add((height, width))
            yield replace(data, height_px=height, width_px=width)


class _DiffersError(Exception):
    """The arguments of the ConfigError for a layer that differs."""


class _LeftOutError(Exception):
    """The reason why a layer cannot be compared."""


class _Constant(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A mode that replaces random numbers by a constant, because strips draw in another order."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        if torch.Tag.nondeterministic_seeded not in func.tags:
            return made
        name = func.overloadpacket.__name__
        if not name.startswith(_DRAWS):
            raise _LeftOutError(f"draws random numbers by {name}")
        return made.fill_(0.5)


class _Comparison:
    """The layers of a network on one image, each separately on the output of the one before.

    Equal layers are compared once. Only the current layer is in float64, or in float32 if it
    accepts no other type.
    """

    def __init__(self, spec: RunSpec, data: DataConfig, layers: Sequence[Layer]) -> None:
        self._spec = spec
        self._dtype = torch.float64
        self._names = [layer.name for layer in layers]
        self._left_out: dict[str, str] = {}
        self.may_be_too_small = False
        alone = build_layers(layers, 0, len(layers), spec.seed, device="meta")
        self._parameters = sum(each.numel() for module in alone for each in module.parameters())
        self._modules: list[nn.Module] = []
        if self._parameters <= MAX_PARAMETERS:
            self._modules = build_layers(layers, 0, len(layers), spec.seed)
            freeze(zip(self._names, self._modules, strict=True), spec.optimizer.frozen)
        self._images = input_spec(data, BATCH, torch.float64)

    def run(self) -> dict[str, str]:
        """Compare all layers; return the reasons why some could not be compared, by name."""
        if not self._modules:
            return {
                "all": f"the network has {self._parameters} parameters, more than {MAX_PARAMETERS}"
            }
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            if self._spec.parallel.strips > 1:
                self._each(True, self._train_in_strips)
                self._each(False, self._evaluate_in_strips)
            else:
                self._each(True, self._split)
        return self._left_out

    def _each(
        self,
        training: bool,
        compare: Callable[[str, nn.Module, Sequence[Tensor], Rows], Rows | None],
    ) -> None:
        values: tuple[Tensor, ...] = (torch.randn(self._images.shape, dtype=self._images.dtype),)
        rows: Rows = (2,)
        known: dict[Hashable, tuple[tuple[Tensor, ...], Rows]] = {}
        for name, module in zip(self._names, self._modules, strict=True):
            module.train(training)
            key = _likeness(module), *((value.shape, value.dtype) for value in values), *rows
            if key not in known:
                try:
                    rows_after = self._alone(name, module, values, rows, compare)
                    with torch.no_grad():
                        made = tuple(
                            tensors_in(module(*(each.clone() for each in self._cast(values))))
                        )
                except _DiffersError as error:
                    raise ConfigError(*error.args) from None
                except Exception as error:
                    after = "" if name == self._names[-1] else ", nor what follows it"
                    self._left_out[name] = (
                        one_line(f"{type(error).__name__}: {error}")[:200] + after
                    )
                    return
                values = tuple(each.double() if each.is_floating_point() else each for each in made)
                known[key] = (
                    values,
                    rows_after
                    or [2 if each.dim() == 4 and each.shape[2] > 1 else None for each in made],
                )
            values, rows = known[key]
            module.float()

    def _alone(
        self,
        name: str,
        module: nn.Module,
        values: Sequence[Tensor],
        rows: Rows,
        compare: Callable[[str, nn.Module, Sequence[Tensor], Rows], Rows | None],
    ) -> Rows | None:
        """Compare a layer, or note why it cannot be compared.

        Return the row dimensions of its output, if they are known.
        """
        parameters = sum(each.numel() for each in module.parameters())
        if parameters > MAX_OF_LAYER:
            self._dtype = torch.float32
            self._left_out[name] = f"it has {parameters} parameters, more than {MAX_OF_LAYER}"
            return None
        why = ""
        for self._dtype in TOLERANCES:
            module.to(self._dtype)
            try:
                return compare(name, module, self._cast(values), rows)
            except _DiffersError:
                raise
            except ConfigError as error:  # for example, its map has too few rows
                self.may_be_too_small = True
                why = why or error.allowed
            except _LeftOutError as error:
                why = why or str(error)
            except Exception as error:
                why = why or one_line(f"{type(error).__name__}: {error}")[:200]
        self._left_out[name] = why
        return None

    def _cast(self, values: Sequence[Tensor]) -> list[Tensor]:
        return [each.to(self._dtype) if each.is_floating_point() else each for each in values]

    def _train_in_strips(
        self, name: str, module: nn.Module, values: Sequence[Tensor], rows: Rows
    ) -> Rows:
        takes = _boundaries(values, rows)
        form = StripStage([(name, module)], takes, STRIPS)
        for path, norm in module.named_modules():
            if isinstance(norm, GhostBatchNorm2d):
                norm.row_ends = form.norm_ends.get(f"{name}.{path}" if path else name)
        deferred = DeferredGradients()
        with _Constant() if form.draws else nullcontext():  # type: ignore[no-untyped-call]
            wanted, back = _play(module, values, lambda given: module(*given))
            after = partial(deferred.run, lambda: None)
            found, _ = _play(
                module, values, lambda given: _Streamed(form, takes, given, deferred), back, after
            )
        self._hold(name, "in strips", found, wanted)
        return [None if each.ends is None else each.dim for each in form.outputs]

    def _evaluate_in_strips(
        self, name: str, module: nn.Module, values: Sequence[Tensor], rows: Rows
    ) -> Rows | None:
        takes = _boundaries(values, rows)
        with torch.no_grad():
            try:
                form = StripStage([(name, module)], takes, STRIPS)
            except ConfigError:  # then whole images are evaluated
                return None
            with _Constant() if form.draws else nullcontext():  # type: ignore[no-untyped-call]
                wanted = list(tensors_in(module(*(value.clone() for value in values))))
                carries: tuple[Tensor, ...] = ()
                strips = []
                for strip in range(STRIPS):
                    outputs, carries = form.forward(
                        strip, _rows(takes, values, strip), carries, lambda _: 0
                    )
                    strips.append(outputs)
        self._hold(name, "evaluated in strips", list(tensors_in(form.joined(strips))), wanted)
        return [None if each.ends is None else each.dim for each in form.outputs]

    def _split(self, name: str, module: nn.Module, values: Sequence[Tensor], rows: Rows) -> None:
        wanted, back = _play(module, values, lambda given: module(*given))
        layers = SplitLayers(nn.ModuleList([module]))
        deferred = DeferredGradients()

        def run(given: Any) -> Any:
            with layers.defer_to(deferred):
                return module(*given)

        found, _ = _play(module, values, run, back, partial(deferred.run, lambda: None))
        self._hold(name, "with a split backward", found, wanted)

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


def _boundaries(values: Sequence[Tensor], rows: Rows) -> list[Boundary]:
    """Return a layer's inputs in strips whose numbers of rows differ by at most one."""
    return [
        Boundary(tuple(each.shape), each.dtype, None)
        if dim is None
        else Boundary.even(tuple(each.shape), each.dtype, STRIPS, dim)
        for each, dim in zip(values, rows, strict=True)
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
                like([each for each in code.co_consts if each is not None]),
            )
        if isinstance(value, str):
            return numbers.setdefault(value, len(numbers)) if value in pieces else value
        return repr(value) if isinstance(value, _PLAIN) else id(value)

    skipped = ("_modules", "_output_names")
    return tuple(
        (type(each), *(like(value) for key, value in vars(each).items() if key not in skipped))
        for each in module.modules()
    )


class _Streamed:
    """The outputs of a layer in strips, and its backward."""

    def __init__(
        self,
        form: StripStage,
        takes: Sequence[Boundary],
        values: Sequence[Tensor],
        deferred: DeferredGradients,
    ) -> None:
        self._form, self._takes, self._sample = form, takes, StripSample(form, lambda _: 0)
        strips = [
            self._sample.forward(_rows(takes, values, strip), deferred) for strip in range(STRIPS)
        ]
        self.outputs = form.joined(strips)

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
    """Return the rows of a strip of values; values without rows are whole in the last strip."""
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
    """Run forward and backward; return outputs, gradients and buffers, and the output gradients.

    Buffers are restored afterwards, and random numbers are the same in every call.
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

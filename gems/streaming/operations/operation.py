"""An operation on a map in blocks, and the kinds of values that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NoReturn

import torch

from gems.streaming.axis_plan import AxisValue
from gems.streaming.axis_rules import Rule
from gems.streaming.buffers import Dims
from gems.streaming.errors import StreamingError
from gems.streaming.ghost_norm import GhostBatchNorm2d
from gems.streaming.operations.kernels import Run
from gems.streaming.trace import Ref, Step, Weight, changed_weights

MAP = "map"
WHOLE = "whole"
STATIC = "static"
PARTS = "parts"
UNTIL_ADVICE = "pass until=<a layer before it>"


@dataclass(frozen=True, slots=True)
class Info:
    """The kind of a value, and the dimensions in which it comes in blocks.

    Attributes:
        kind: MAP, a tensor in blocks; PARTS, several such outputs of one operation (a split of
            channels); WHOLE, a value without axes (after a global pooling); STATIC, one that
            depends on no input (a standardised weight).
        value: An example of the whole value.
        dims: The dimension of each axis; None if the axis was reduced, so that the value only
            exists in the last part of that axis.
    """

    kind: str
    value: Any
    dims: Dims = ()

    @property
    def first(self) -> Any:
        """The tensor, or the first of several."""
        return self.value[0] if self.kind == PARTS else self.value

    @property
    def axes(self) -> dict[int, int]:
        """The axes by their dimensions."""
        return {dim: axis for axis, dim in enumerate(self.dims) if dim is not None}

    def size(self, axis: int) -> int:
        """Return the size of the whole map along an axis, 1 if the value does not have it."""
        dim = self.dims[axis] if self.dims else None
        return 1 if dim is None else int(self.first.shape[dim])

    def moved(self, value: Any, dims: Dims) -> Info:
        """Return the info of an output with other dimensions; it is WHOLE if no axis is left."""
        if all(dim is None for dim in dims):
            return Info(WHOLE, value, dims)
        return Info(PARTS if isinstance(value, tuple | list) else MAP, value, dims)


@dataclass(frozen=True, slots=True)
class Operation:
    """A step, and how it runs on a block.

    Attributes:
        step: The traced step.
        info: The info of its output.
        run: Runs the step on one block.
        reads: The numbers of the values in blocks that it reads.
        rules: The rule of each axis, or None if each output only needs the input at its place.
        how: How the output is written: by the step itself ("copy"), as an activation, or as a sum
            or concatenation of its inputs.
        summed: The axis that it sums or averages.
        has_zeros: Its padding writes zeros.
        is_elementwise: Its tensors are broadcast.
        finish: For a reduction over all positions, computes the output from the state after the
            last block; `run` then returns the next state, of shapes and types `state["kept"]`.
        state: Options of `run`.
    """

    step: Step
    info: Info
    run: Run
    reads: tuple[int, ...] = ()
    rules: tuple[Rule | None, ...] = ()
    how: str = "copy"
    summed: int | None = None
    has_zeros: bool = False
    is_elementwise: bool = False
    finish: Callable[..., Any] | None = None
    state: dict[str, Any] = field(default_factory=dict)

    def values(
        self, infos: Sequence[Info], reads: tuple[int, ...], together: int
    ) -> list[AxisValue]:
        """Return the operation's output along each axis, for the plan of its blocks.

        `reads` numbers its inputs in that plan; `together` is how many strips of rows it takes at
        once.
        """
        source = infos[self.reads[0]]
        if self.finish is not None:  # a block contributes exactly the positions that it reads
            return [AxisValue(source.size(axis), reads=reads) for axis in range(len(source.dims))]
        rules = self.rules or (None,) * len(source.dims)
        is_windowed = any(
            rule is not None and axis != self.summed for axis, rule in enumerate(rules)
        )
        return [
            AxisValue(
                self.info.size(axis),
                (),
                rule,
                reads,
                is_windowed=is_windowed,
                is_summed=axis == self.summed,
                has_zeros=self.has_zeros,
                is_late=self._is_late(infos, axis),
                together=1 if axis else together,
            )
            for axis, rule in enumerate(rules)
        ]

    def _is_late(self, infos: Sequence[Info], axis: int) -> bool:
        is_gone = self.info.dims[axis] is None
        return is_gone and any(infos[read].dims[axis] is not None for read in self.reads)


@dataclass(slots=True)
class Known:
    """The infos of the values that were lowered so far."""

    infos: list[Info]
    is_head: bool = False  # no later step reads neighbouring positions

    def first(self, step: Step) -> Info:
        """Return the info of a step's first argument; refuse the step unless it comes in blocks."""
        argument = step.args[0]
        if not isinstance(argument, Ref) or self.infos[argument.number].kind not in (MAP, PARTS):
            self.refuse(step, "takes rows elsewhere than as its first argument")
        return self.infos[argument.number]

    def refuse(
        self, step: Step, why: str, advice: str = UNTIL_ADVICE, cause: str = "whole"
    ) -> NoReturn:
        """Raise StreamingError for a step that cannot run in blocks."""
        where = f"layer {step.name} ({step.kind}: {step.operation})"
        raise StreamingError(f"{where} {why}", advice, cause)


def products(operation: Operation, infos: Sequence[Info]) -> int:
    """Return the number of multiplications by weights per output value, at least 1."""
    if operation.step.operation not in _PRODUCTS:
        return 1
    weight = arguments(operation.step)["weight"]
    tensor = infos[weight.number].value if isinstance(weight, Ref) else weight.get()
    channels = operation.info.value.shape[_PRODUCTS[operation.step.operation]]
    return max(1, int(tensor.numel() // channels))


def changed_buffer(step: Step) -> Weight | None:
    """Return the buffer that a step changes in place, such as a counter, if any."""
    return next(iter(changed_weights(step.args, step.kwargs, step.target)), None)


def refuse_changed(known: Known, operations: Sequence[Operation]) -> None:
    """Refuse a parameter or buffer that one operation changes and another one uses.

    STATIC operations are exempt: they run once for an image, in order; others run in each strip.
    """
    users: dict[Weight, list[Operation]] = {}
    for operation in operations:
        for weight in {leaf for leaf in leaves(operation.step) if isinstance(leaf, Weight)}:
            users.setdefault(weight, []).append(operation)
    for weight, users_of_weight in users.items():
        if len(users_of_weight) == 1 or all(
            operation.info.kind == STATIC for operation in users_of_weight
        ):
            continue
        for step in (operation.step for operation in users_of_weight):
            if weight in changed_weights(step.args, step.kwargs, step.target):
                known.refuse(
                    step, f"changes {weight.name}, which the layer uses elsewhere too", "", ""
                )


def is_ghost_norm(step: Step) -> bool:
    """Return whether a step normalizes each block by its own statistics."""
    is_norm = step.kind == GhostBatchNorm2d.__name__ and step.operation == "batch_norm"
    return is_norm and bool(arguments(step)["training"])


def strips_at_once(
    operation: Operation, infos: Sequence[Info], grid: Sequence[int], min_positions: int
) -> int:
    """Return how many strips an operation takes at once.

    In thin strips, products would read all weights for few positions, and a norm by strip would
    have statistics of few values. The count is a power of two, so that counts of consecutive
    operations divide each other.
    """
    name = operation.step.operation
    count = 1
    if operation.info.kind != MAP or (name not in _PRODUCTS and not is_ghost_norm(operation.step)):
        return count
    shape = operation.info.value.shape
    positions = operation.info.value.numel() / shape[_PRODUCTS.get(name, 1)]
    while count < grid[0] and positions * count < min_positions * math.prod(grid):
        count *= 2
    return min(count, grid[0])


# products with weights, and the dimension of their output channels
_PRODUCTS = {
    **{f"conv{axes}d": 1 for axes in (1, 2, 3)},
    **{f"conv_transpose{axes}d": 1 for axes in (1, 2, 3)},
    "linear": -1,
}


def refs(step: Step) -> list[Ref]:
    """Return the references to the values that a step reads."""
    return [leaf for leaf in leaves(step) if isinstance(leaf, Ref)]


def leaves(step: Step) -> Iterator[Any]:
    """Yield all arguments of a step, those inside lists and dictionaries too."""
    nested: list[Any] = [step.args, step.kwargs]
    while nested:
        value = nested.pop(0)
        if isinstance(value, list | tuple | Mapping):
            nested[:0] = value.values() if isinstance(value, Mapping) else value
        else:
            yield value


def map_refs(function: Callable[[Ref], Any], value: Any) -> Any:
    """Replace each reference in nested arguments by `function(reference)`."""
    if isinstance(value, Ref):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(map_refs(function, part) for part in value)
    if isinstance(value, Mapping):
        return {key: map_refs(function, part) for key, part in value.items()}
    return value


def with_argument(step: Step, name: str, value: Any) -> Step:
    """Replace one argument of a step."""
    named = arguments(step) | {name: value}
    schema = step.target._schema.arguments
    args = tuple(named[argument.name] for argument in schema if not argument.kwarg_only)
    return replace(
        step,
        args=args,
        kwargs={argument.name: named[argument.name] for argument in schema if argument.kwarg_only},
    )


def reshaped(step: Step, ref: Ref, value: Any) -> Step:
    """Return a step that reshapes a value to the shape of another one."""
    args = (ref, list(value.shape))
    return replace(step, target=torch.ops.aten.reshape.default, args=args, kwargs={}, value=value)


def arguments(step: Step) -> dict[str, Any]:
    """Return the arguments of a step by name, with defaults."""
    named = {}
    for position, argument in enumerate(step.target._schema.arguments):
        if position < len(step.args):
            named[argument.name] = step.args[position]
        else:
            named[argument.name] = step.kwargs.get(argument.name, argument.default_value)
    return named

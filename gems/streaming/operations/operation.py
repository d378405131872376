"""An operation on a map in blocks, and what is known of the values that it reads."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
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
    """What is known of a value: whether it comes in blocks, and in which dimensions.

    `dims` has the dimension of each axis, or None for an axis that is gone: such a value is there
    in the last part of that axis only. "whole" values have no axis left (after a global pooling),
    "static" ones depend on no input (a weight that is standardised), "parts" are tensors in blocks
    that one operation gives (a split of channels).
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
        """Return a value in blocks of other dimensions, or a whole one if no axis is left."""
        if all(dim is None for dim in dims):
            return Info(WHOLE, value, dims)
        return Info(PARTS if isinstance(value, tuple | list) else MAP, value, dims)


@dataclass(frozen=True, slots=True)
class Operation:
    """A step, and how it runs on a block.

    `is_elementwise` are those whose tensors are broadcast. `how` is what writes its output where
    that is no function of its own: an activation, or a sum or concatenation of what it reads.
    `reads` are the values in blocks that it reads. `rules` has a rule for each axis, or None where
    it makes each output of the input at the same place. It adds up along the axis `summed`. If it
    has a `finish`, it runs over all positions: its run adds a block to tensors that go from block
    to block (of the shapes and types `state["kept"]`), of which the last block makes the output.
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
        """Return what the operation gives along each axis, for the plan of its blocks.

        There, `reads` are the values that it reads; it takes `together` strips of rows at once.
        """
        source = infos[self.reads[0]]
        if self.finish is not None:  # what is new in a block is what it reads there
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
    """What is known of the values so far."""

    infos: list[Info]
    is_head: bool = False  # nothing after the next step reads neighbouring positions

    def first(self, step: Step) -> Info:
        """Return what is known of a step's first argument, which comes in blocks."""
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
    """Return the multiplications with a weight for each value of the output, at least 1."""
    if operation.step.operation not in _PRODUCTS:
        return 1
    weight = arguments(operation.step)["weight"]
    tensor = infos[weight.number].value if isinstance(weight, Ref) else weight.get()
    channels = operation.info.value.shape[_PRODUCTS[operation.step.operation]]
    return max(1, int(tensor.numel() // channels))


def changed_buffer(step: Step) -> Weight | None:
    """Return the buffer that a step changes in place, such as a counter."""
    return next(iter(changed_weights(step.args, step.kwargs, step.target)), None)


def refuse_changed(known: Known, operations: Sequence[Operation]) -> None:
    """Refuse a parameter or buffer that one operation changes and another uses.

    Operations on no rows are exempt: they run once for an image, in their order; others run in each
    strip.
    """
    users: dict[Weight, list[Operation]] = {}
    for operation in operations:
        for weight in _weights(operation.step):
            users.setdefault(weight, []).append(operation)
    for weight, using in users.items():
        if len(using) == 1 or all(each.info.kind == STATIC for each in using):
            continue
        for step in (each.step for each in using):
            if weight in changed_weights(step.args, step.kwargs, step.target):
                known.refuse(
                    step, f"changes {weight.name}, which the layer uses elsewhere too", "", ""
                )


def is_ghost_norm(step: Step) -> bool:
    """Return whether a step normalizes by the statistics of the rows that are there."""
    is_norm = step.kind == GhostBatchNorm2d.__name__ and step.operation == "batch_norm"
    return is_norm and bool(arguments(step)["training"])


def strips_at_once(
    operation: Operation, infos: Sequence[Info], grid: Sequence[int], min_positions: int
) -> int:
    """Return how many strips an operation takes at once.

    Thin ones would read its weights once for few positions.
    Those of a norm by strip would give statistics of few values.
    It is a power of two, so that what takes several takes those that the operation before has
    taken.
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


# what multiplies with weights, and the dimension of its channels
_PRODUCTS = {
    **{f"conv{axes}d": 1 for axes in (1, 2, 3)},
    **{f"conv_transpose{axes}d": 1 for axes in (1, 2, 3)},
    "linear": -1,
}


def refs(step: Step) -> list[Ref]:
    """Return the values that a step reads."""
    found: list[Ref] = []
    each(found.append, (step.args, step.kwargs))
    return found


def each(function: Callable[[Ref], Any], value: Any) -> Any:
    """Return arguments with a function's value in place of each reference."""
    if isinstance(value, Ref):
        return function(value)
    if isinstance(value, list | tuple):
        return type(value)(each(function, part) for part in value)
    if isinstance(value, Mapping):
        return {key: each(function, part) for key, part in value.items()}
    return value


def _weights(step: Step) -> set[Weight]:
    """Return the parameters and buffers that a step reads or changes."""
    found: set[Weight] = set()
    left: list[Any] = [step.args, step.kwargs]
    while left:
        value = left.pop()
        if isinstance(value, Weight):
            found.add(value)
        elif isinstance(value, list | tuple | Mapping):
            left += value.values() if isinstance(value, Mapping) else value
    return found


def with_argument(step: Step, name: str, value: Any) -> Step:
    """Return a step with another value of an argument."""
    named = arguments(step) | {name: value}
    schema = step.target._schema.arguments
    args = tuple(named[each.name] for each in schema if not each.kwarg_only)
    return replace(
        step, args=args, kwargs={each.name: named[each.name] for each in schema if each.kwarg_only}
    )


def reshaped(step: Step, ref: Ref, value: Any) -> Step:
    """Return a step that changes the shape of a value to that of another, without memory."""
    args = (ref, list(value.shape))
    return replace(step, target=torch.ops.aten.reshape.default, args=args, kwargs={}, value=value)


def arguments(step: Step) -> dict[str, Any]:
    """Return the arguments of a step by name, with defaults."""
    found = {}
    for position, argument in enumerate(step.target._schema.arguments):
        if position < len(step.args):
            found[argument.name] = step.args[position]
        else:
            found[argument.name] = step.kwargs.get(argument.name, argument.default_value)
    return found

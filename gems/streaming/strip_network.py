"""The operations of a network in order, and what they make, read and keep in each block."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gems.streaming.axis_rules import Bins
from gems.streaming.block_plan import (
    BlockPlan,
    BlockValue,
    Box,
    ByBlock,
    Path,
    Place,
    is_empty,
    offsets,
    sizes,
)
from gems.streaming.buffers import Layout, Patch
from gems.streaming.operations.kernels import Along
from gems.streaming.operations.lower import draws_numbers
from gems.streaming.operations.operation import STATIC, Info, Operation, changed_buffer, refs
from gems.streaming.trace import Weight

Parts = Sequence[Sequence[tuple[Tensor, Box]]]  # the pieces of what is read, with their boxes
PatchOf = Callable[[Box, Box], Patch]


class CarriedTensor(NamedTuple):
    """An item that is kept from a block for the block `to`.

    It is a box of a map, partial sums, a tensor of the state of a reduction over all positions, or
    a value that depends on no input.
    """

    kind: str
    number: int
    to: int
    place: Place = Place((), ())  # of a map, where it is now
    path: Path = ()  # of a map, the tensor that it will be
    box: Box = ()
    place_in_state: int = 0


class Stored(NamedTuple):
    """How a value is written in a block: what is wanted of it, the layout, and what is carried.

    Without a layout, what the operation gives is all that is wanted.
    """

    wanted: tuple[Patch, ...]
    layout: Layout | None
    paths: list[Path]


class StripNetwork:
    """Operations in order, and the plan of the values in blocks.

    `planned` maps the number of a value to its number in the plan.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        infos: Sequence[Info],
        num_inputs: int,
        outputs: Sequence[int],
        planned: dict[int, int],
        plan: BlockPlan,
    ) -> None:
        self.operations, self.infos, self.num_inputs = tuple(operations), tuple(infos), num_inputs
        self.outputs = tuple(outputs)
        self.planned = planned
        self.plan = plan
        self._readers: dict[int, set[int]] = {}
        last: dict[int, int] = {}
        for number, operation in enumerate(operations, num_inputs):
            for ref in refs(operation.step):
                last[ref.number] = number
                self._readers.setdefault(ref.number, set()).add(number)
            last[number] = number
        # by operation: the values that nothing reads after it
        self.released: dict[int, list[int]] = {}
        for value, reader in last.items():
            self.released.setdefault(reader, []).append(value)
        # called with the results of each module's operations
        self.watch: Callable[[str, tuple[Any, ...]], None] | None = None
        # weights that are changed in the first strip
        self.changed = {
            weight
            for operation in operations
            if operation.info.kind == STATIC and (weight := changed_buffer(operation.step))
        }
        self.drawing = {
            number
            for number, operation in enumerate(operations, num_inputs)
            if draws_numbers(operation)
        }
        used = {
            ref.number
            for operation in operations
            if operation.info.kind != STATIC
            for ref in refs(operation.step)
        }
        self._statics = sorted(
            number for number in used | {*outputs} if infos[number].kind == STATIC
        )
        self._held: dict[int, tuple[CarriedTensor, ...]] = {}
        self._begins: dict[int, int] = {}  # by the number of a reduction over all positions
        self._wanted: ByBlock[int, tuple[Patch, ...]] = ByBlock()
        self._patches: ByBlock[tuple[int, Place], Patch] = ByBlock()
        self._along: ByBlock[int, tuple[tuple[Along, ...], Along | None]] = ByBlock()
        # by the number of a value, and whether it has a new box
        self.stored: ByBlock[tuple[int, bool], Stored] = ByBlock()

    def at(self, block: int, number: int) -> BlockValue:
        """Return the plan of a value in a block."""
        return self.plan.at(block, self.planned[number])

    def shape_of(self, carry: CarriedTensor) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and type of a kept item."""
        if carry.kind == "state":
            state_specs = self.operations[carry.number - self.num_inputs].state["kept"]
            return state_specs[carry.place_in_state]  # type: ignore[no-any-return]
        value = self.infos[carry.number].value
        shape = list(value.shape)
        dtype = value.dtype
        info = self.infos[carry.number]
        if carry.kind == "sum":
            operation = self.operations[carry.number - self.num_inputs]
            info = self.infos[operation.reads[0]]
            shape = [*info.value.shape[:2], *operation.state["bins"]]
            dtype = operation.state["dtype"]
        if carry.kind != "static":
            for dim, size in zip(info.dims, sizes(carry.box), strict=True):
                if dim is not None:
                    shape[dim] = size
        return tuple(shape), dtype

    def wanted(self, block: int, number: int) -> tuple[Patch, ...]:
        """Return the patches of a value's fresh tensor that are read or kept."""
        known = self._wanted.of(block)
        if number not in known:
            at = self.at(block, number)
            places = [piece.place for piece in at.kept]
            for reader in self._readers.get(number, set()) & self.planned.keys():
                reads = self.operations[reader - self.num_inputs].reads
                for read, taken in zip(reads, self.at(block, reader).taken, strict=True):
                    places += taken if read == number else ()
            if number in self.outputs and not is_empty(at.new):
                places.append(Place(self.plan.whole, at.new))
            patches = {
                self.patch(number, place.box, at.fresh)
                for place in places
                if place.path == self.plan.whole
            }
            known[number] = tuple(sorted(patches))
        return known[number]

    def patch_of(self, block: int, number: int, place: Place) -> Patch:
        """Return where a box is in the tensor that holds it in a block."""
        known = self._patches.of(block)
        key = number, place
        if key not in known:
            at = self.at(block, number)
            is_fresh = place.path == self.plan.whole
            start = at.fresh if is_fresh else at.carried[place.path]
            known[key] = self.patch(number, place.box, start)
        return known[key]

    def patch(self, number: int, box: Box, start: Box) -> Patch:
        """Return where a box of a value is in the tensor of another, along the axes it has."""
        has = [dim is not None for dim in self.infos[number].dims]
        return Patch(
            tuple(value for value, flag in zip(offsets(box, start), has, strict=True) if flag),
            tuple(value for value, flag in zip(sizes(box), has, strict=True) if flag),
        )

    def along(self, block: int, number: int) -> tuple[tuple[Along, ...], Along | None]:
        """Return the axes of an operation in a block, and the one along which it adds up."""
        known = self._along.of(block)
        if number not in known:
            operation = self.operations[number - self.num_inputs]
            axes = dict(self._find_along(operation, self.at(block, number)))
            summed = axes.pop(operation.summed, None)
            known[number] = tuple(axes.values()), summed
        return known[number]

    def _find_along(
        self, operation: Operation, at: BlockValue
    ) -> Iterator[tuple[int | None, Along]]:
        source = self.infos[operation.reads[0]]
        for axis, (new, there) in enumerate(zip(at.new, at.window, strict=True)):
            is_summed = axis == operation.summed
            is_source = is_summed or operation.finish is not None
            dim = (source if is_source else operation.info).dims[axis]
            if dim is None:
                continue
            window = there
            rule = operation.rules[axis] if operation.rules else None
            if rule is not None and not is_summed:
                window = rule.reads(*new)
            size = rule.count if isinstance(rule, Bins) else operation.info.size(axis)
            yield axis, Along(dim, *new, *window, size, source.size(axis), there)

    def dims(self, number: int) -> tuple[int, ...]:
        """Return the dimensions of the axes that a value has."""
        return tuple(self.infos[number].axes)

    def device(self, tensors: Sequence[Tensor | None]) -> torch.device:
        """Return the device of the tensors, or of the weights if there are no tensors."""
        weights = (
            part.get()
            for operation in self.operations
            for part in operation.step.args
            if isinstance(part, Weight)
        )
        device = next(
            (tensor for tensor in chain(tensors, weights) if isinstance(tensor, Tensor)), None
        )
        return torch.device("cpu") if device is None else device.device

    def held(self, block: int) -> tuple[CarriedTensor, ...]:
        """Return the items that are kept after a block, in order."""
        if block not in self._held:
            self._held[block] = tuple(self._find_held(block))
        return self._held[block]

    def given(self, block: int) -> list[tuple[int, int]]:
        """Return what a block is given: the blocks that kept it, and the places there, in order."""
        steps = sorted({self.plan.step(axis) for axis in range(len(self.plan.grid))}, reverse=True)
        return [
            (block - step, place)
            for step in steps
            if step <= block
            for place, carry in enumerate(self.held(block - step))
            if carry.to == block
        ]

    def _find_held(self, block: int) -> Iterator[CarriedTensor]:
        index = self.plan.index(block)
        for number, row in self.planned.items():
            for piece in self.at(block, number).kept:
                to = block + self.plan.step(piece.axis)
                yield CarriedTensor("map", number, to, piece.place, piece.path, piece.place.box)
            if number < self.num_inputs:
                continue
            operation = self.operations[number - self.num_inputs]
            axis = operation.summed
            if operation.finish is not None and self._has_begun(block, number):
                for place, _ in enumerate(operation.state["kept"]):
                    yield CarriedTensor("state", number, block + 1, place_in_state=place)
            if axis is None:
                continue
            rule = operation.rules[axis]
            assert isinstance(rule, Bins)
            along = self.plan.axes[axis]
            read = self.planned[operation.reads[0]]
            begun = rule.begun(along.ends[read][index[axis]])
            box = list(self.at(block, number).window)
            box[axis] = along.ends[row][index[axis]], begun
            if index[axis] < self.plan.grid[axis] - 1 and not is_empty(tuple(box)):
                to = block + self.plan.step(axis)
                yield CarriedTensor("sum", number, to, box=tuple(box))
        if block < self.plan.num_blocks - 1:
            for number in self._statics:
                yield CarriedTensor("static", number, block + 1)

    def begun(self, block: int) -> tuple[bool, ...]:
        """Return of which reductions over all positions a block leaves a state."""
        return tuple(
            self._has_begun(block, number)
            for number, operation in enumerate(self.operations, self.num_inputs)
            if operation.finish is not None
        )

    def _has_begun(self, block: int, number: int) -> bool:
        """Return whether a later block takes what a reduction has of this one and those before."""
        if number not in self._begins:
            positions = enumerate(self.plan.positions(self.planned[number]))
            self._begins[number] = next(place for place, num in positions if num)
        return self._begins[number] <= block < self.plan.num_blocks - 1

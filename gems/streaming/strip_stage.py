"""The streaming form of a stage.

Its layers take an image block by block, and as arguments what they kept of earlier blocks. With one
axis, the blocks are strips of rows; the text calls every block a strip.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.outputs import map_tensors, tensors_in
from gems.streaming.axis_plan import AxisValue
from gems.streaming.axis_rules import even_ends
from gems.streaming.block_plan import BlockPlan, Box, index_of, is_empty, sizes
from gems.streaming.buffers import Dims, join
from gems.streaming.lowering import lower_trace
from gems.streaming.operations.kernels import drop_rows
from gems.streaming.operations.lower import draws_numbers
from gems.streaming.operations.operation import (
    MAP,
    STATIC,
    WHOLE,
    Info,
    Known,
    Operation,
    is_ghost_norm,
    products,
    refuse_changed,
    strips_at_once,
)
from gems.streaming.strip_network import CarriedTensor, StripNetwork
from gems.streaming.strip_run import RunMode, StripRun
from gems.streaming.trace import LayerTrace, Weight, trace

DEFAULT_MODE = RunMode()


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor between stages in strips.

    It has the shape of the whole, and `ends`, for each axis the positions after each part along its
    dimension in `dims`. Strips are numbered in raster order, the last axis fastest. A tensor that
    has lost an axis (None in `dims`) is there in the last part of that axis only. Without `ends` it
    has no axes and arrives in the last strip.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    ends: tuple[tuple[int, ...], ...] | None
    dims: Dims = (2,)

    @classmethod
    def even(
        cls,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        grid: int | Sequence[int],
        dims: Dims | None = None,
    ) -> Boundary:
        """Return a tensor in a grid of equal parts, or of one more row or column.

        A number is that of strips of rows. The axes are the dimensions after (N, C) unless `dims`
        are given; a dimension of None has been lost.
        """
        parts = (grid,) if isinstance(grid, int) else tuple(grid)
        dims = tuple(range(2, 2 + len(parts))) if dims is None else dims
        if all(dim is None for dim in dims):
            return cls(shape, dtype, None, dims)
        ends = tuple(
            even_ends(1 if dim is None else shape[dim], count)
            for dim, count in zip(dims, parts, strict=True)
        )
        return cls(shape, dtype, ends, dims)

    def box(self, strip: int) -> Box:
        """Return the span of a strip along each axis."""
        assert self.ends is not None
        index = index_of(strip, [len(ends) for ends in self.ends])
        return tuple(
            (ends[part - 1] if part else 0, ends[part])
            for ends, part in zip(self.ends, index, strict=True)
        )

    def is_there(self, strip: int) -> bool:
        """Return whether there is anything of the tensor in a strip, given that it has axes."""
        return not is_empty(self.box(strip))

    def strip_shape(self, strip: int) -> tuple[int, ...]:
        """Return the shape of a strip's tensor, which may have no rows."""
        if self.ends is None:
            return self.shape
        shape = list(self.shape)
        for dim, size in zip(self.dims, sizes(self.box(strip)), strict=True):
            if dim is not None:
                shape[dim] = size
        if not self.is_there(strip):
            shape = list(self.shape)
            shape[min(dim for dim in self.dims if dim is not None)] = 0
        return tuple(shape)

    def cut(self, tensor: Tensor, strip: int) -> Tensor:
        """Return a strip of the whole tensor."""
        box = self.box(strip)
        if is_empty(box):
            return tensor.new_empty(self.strip_shape(strip))
        for dim, (begin, end) in zip(self.dims, box, strict=True):
            if dim is not None:
                tensor = tensor.narrow(dim, begin, end - begin)
        return tensor

    def joined(self, strips: Sequence[Tensor | None]) -> Tensor:
        """Return the whole tensor of those of all strips, of which some have no rows."""
        if self.ends is None:
            return next(tensor for tensor in reversed(strips) if tensor is not None)
        parts = [
            (self.box(strip), tensor)
            for strip, tensor in enumerate(strips)
            if tensor is not None and self.is_there(strip)
        ]
        # in memory of its own, also if one strip has it all
        return parts[0][1].clone() if len(parts) == 1 else join(parts, self.dims)


def trace_stage(layers: Sequence[tuple[str, nn.Module]], inputs: Sequence[Boundary]) -> LayerTrace:
    """Trace layers to operations that hold for any division of such inputs.

    Raises:
        StreamingError: A layer has operations that depend on values.
    """
    return trace(
        layers,
        [torch.empty(boundary.shape, dtype=boundary.dtype, device="meta") for boundary in inputs],
    )


class StripStage:
    """Layers in a streaming form.

    The form is for one shape of image, one division into strips and one mode (training or
    evaluation). `forward` is a function of its arguments: its caller holds what it returns, and may
    cut the graph of autograd there. Weights are those that the modules have at the time.

    Attributes:
        inputs: The inputs of the stage.
        outputs: Its outputs, which are the inputs of the next one.
        strips: The number of strips (or blocks) of the image.
        draws: Whether it draws random numbers, for which `forward` needs seeds.
        draws_by_row: The name of the first module that draws them row by row, unlike a layer that
            gets the whole image.
        norm_ends: The rows after each strip for each norm by strip, keyed by the name of its
            module.
    """

    def __init__(
        self,
        layers: Sequence[tuple[str, nn.Module]] | LayerTrace,
        inputs: Sequence[Boundary],
        grid: int | Sequence[int],
        min_positions: int = 1,
        until: str | None = None,
    ) -> None:
        """Trace the named layers, unless a trace is given, and plan all strips.

        `grid` is the number of strips of rows, or of parts along each axis. A convolution, linear
        layer or norm by strip whose map has less than `min_positions` (rows x columns x images) in
        a strip waits for more strips, and takes them at once. What comes after the layer `until`
        ("": all) takes whole maps, in the last strip.

        Raises:
            StreamingError: A layer needs the whole image, or has an unknown operation.
        """
        traced = layers if isinstance(layers, LayerTrace) else trace_stage(layers, inputs)
        parts = (grid,) if isinstance(grid, int) else tuple(grid)
        self.inputs = tuple(inputs)
        self.strips = math.prod(parts)
        self._structure = traced.structure
        known = Known(
            [
                Info(MAP, meta, boundary.dims)
                if boundary.ends is not None
                else Info(WHOLE, meta, (None,) * len(parts))
                for boundary, meta in zip(inputs, traced.inputs, strict=True)
            ]
        )
        operations, outputs = lower_trace(known, traced, until)
        refuse_changed(known, operations)
        planned: dict[int, int] = {}
        self._at_once: dict[int, int] = {}
        values: list[list[AxisValue]] = []
        for number, boundary in enumerate(inputs):
            if boundary.ends is not None:
                planned[number] = len(values)
                whole = map(known.infos[number].size, range(len(parts)))
                values.append(list(map(AxisValue, whole, boundary.ends)))
        for number, operation in enumerate(operations, len(inputs)):
            if operation.reads:
                planned[number] = len(values)
                at_once = strips_at_once(operation, known.infos, parts, min_positions)
                self._at_once[number] = at_once
                reads = tuple(planned[read] for read in operation.reads)
                values.append(operation.values(known.infos, reads, at_once))
        plan = BlockPlan(values, parts)
        self._network = StripNetwork(operations, known.infos, len(inputs), outputs, planned, plan)
        self.draws = any(draws_numbers(operation) for operation in operations)
        self.draws_by_row = next(
            (each.step.name for each in operations if each.run is drop_rows), None
        )
        self.outputs = tuple(self._boundary(number) for number in outputs)
        self.norm_ends: dict[str, tuple[int, ...]] = {}
        for number, operation in enumerate(operations, len(inputs)):
            if is_ghost_norm(operation.step) and operation.info.kind == MAP:
                self._add_norm(known, operation, plan, planned[number])

    def carries(self, strip: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return shape and type of what `forward` of a strip returns for later strips."""
        return tuple(self._network.shape_of(carry) for carry in self._network.held(strip))

    def given(self, strip: int) -> list[tuple[int, int]]:
        """Return what a strip takes of earlier ones: which strip, and the place in its carries."""
        return self._network.given(strip)

    def shapes_of(self, strip: int) -> Hashable:
        """Return a key that is equal for strips whose operations have equal shapes.

        They may be of images of different sizes. Values that depend on no input are made in the
        first strip and kept up to the last.
        """
        network = self._network
        parts = zip(network.plan.kinds, network.plan.index(strip), strict=True)
        return (
            (strip == 0, strip == self.strips - 1),
            (network.begun(strip - 1), network.begun(strip)),
            *(kinds[part] for kinds, part in parts),
        )

    @cached_property
    def values(self) -> Hashable:
        """The types of all values, and their shapes but for the axes of the image."""
        return tuple(
            (
                info.kind,
                tuple(
                    (
                        tensor.dtype,
                        tuple(n for dim, n in enumerate(tensor.shape) if dim not in info.axes),
                    )
                    for tensor in tensors_in(info.value)
                ),
            )
            for info in self._network.infos
        )

    def work(self) -> Iterator[tuple[str, int, list[int]]]:
        """Yield the work of each operation.

        Each item is its module's name, how many strips it takes at once, and its products in each
        strip.
        """
        network = self._network
        for number, place in network.planned.items():
            if number < network.num_inputs:
                continue
            operation = network.operations[number - network.num_inputs]
            source = (
                operation.info if operation.finish is None else network.infos[operation.reads[0]]
            )
            values = source.first
            positions = math.prod(network.plan.sizes(place))
            of_one = values.numel() // positions * products(operation, network.infos)
            work = [of_one * new for new in network.plan.positions(place)]
            yield operation.step.name, self._at_once[number], work

    def held(self, strip: int) -> tuple[CarriedTensor, ...]:
        """Return what a strip keeps, in the order of `carries`."""
        return self._network.held(strip)

    def static_carries(self, strip: int) -> list[int]:
        """Return which of the tensors that a strip takes are determined by weights alone."""
        return [
            place
            for place, (source, own) in enumerate(self._network.given(strip))
            if self._network.held(source)[own].kind == STATIC
        ]

    def changed_buffers(self) -> dict[Weight, Tensor]:
        """Return copies of the buffers that the first strip changes.

        The vectors of a spectral norm are such buffers.
        """
        return {weight: weight.get().clone() for weight in self._network.changed}

    def forward(
        self,
        strip: int,
        inputs: Sequence[Tensor | None],
        carries: Sequence[Tensor] = (),
        mode: RunMode = DEFAULT_MODE,
    ) -> tuple[tuple[Tensor | None, ...], tuple[Tensor, ...]]:
        """Run a strip.

        Args:
            strip: Its number; strips run first to last.
            inputs: Its rows of each input, and None for one that is not there yet.
            carries: What earlier strips returned for it, in the order of `given`.
            mode: How it is run; its buffers are what `changed_buffers` returned before.

        Returns:
            The outputs: rows (perhaps none), or a whole tensor in the last strip and None before.
                And the carries for later strips.

        Raises:
            ValueError: Random numbers are drawn, and there are no seeds.
        """
        if self.draws and mode.draws is None:
            raise ValueError("these layers draw random numbers: give the seeds of the image")
        run = StripRun(self._network, strip, inputs, carries, mode)
        return run.outputs(), run.carries()

    def parts_of(self, sides: tuple[int, ...]) -> tuple[Box, ...] | None:
        """Return which part of maps with such sides the outputs of each strip are.

        Return None if there is an output that is no such map, or that comes at another time.
        """
        first = self.outputs[0]
        dims = tuple(range(2, 2 + len(first.dims)))
        for boundary in self.outputs:
            is_alike = (
                boundary.ends is not None and boundary.ends == first.ends and boundary.dims == dims
            )
            if not is_alike or boundary.shape[2:] != sides or not boundary.dtype.is_floating_point:
                return None
        return tuple(map(first.box, range(self.strips)))

    @contextmanager
    def watched(self, watch: Callable[[str, tuple[Any, ...]], None]) -> Iterator[None]:
        """Pass the result of each operation and its module's name to `watch` in a context."""
        self._network.watch = watch
        try:
            yield
        finally:
            self._network.watch = None

    def joined(self, strips: Sequence[Sequence[Tensor | None]]) -> Any:
        """Return the outputs of all strips as the last layer returns them.

        This is one tensor, or several.
        """
        whole = [
            boundary.joined([outputs[place] for outputs in strips])
            for place, boundary in enumerate(self.outputs)
        ]
        return self.structured(whole)

    def structured(self, outputs: Iterable[Tensor]) -> Any:
        """Return whole outputs as the last layer returns them."""
        tensors = iter(outputs)
        return map_tensors(lambda _: next(tensors), self._structure)

    def _add_norm(self, known: Known, operation: Operation, plan: BlockPlan, place: int) -> None:
        if len(plan.grid) > 1:
            known.refuse(operation.step, "normalizes strips of rows", "divide rows only", "")
        ends = plan.axes[0].ends[place]
        value = operation.info.value
        name = operation.step.name
        positions = value.numel() // (value.shape[1] * operation.info.size(0))  # of a row
        if any(0 < (end - begin) * positions < 2 for begin, end in pairwise((0, *ends))):
            known.refuse(
                operation.step, "has a single value of a channel in a strip", "use fewer strips", ""
            )
        if self.norm_ends.get(name, ends) != ends:
            known.refuse(operation.step, "normalizes several maps of unlike rows", "", "")
        self.norm_ends[name] = ends

    def _boundary(self, number: int) -> Boundary:
        info = self._network.infos[number]
        ends = None
        if info.kind == MAP:
            place = self._network.planned[number]
            ends = tuple(axis.ends[place] for axis in self._network.plan.axes)
        return Boundary(tuple(info.value.shape), info.value.dtype, ends, info.dims)

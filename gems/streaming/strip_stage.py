"""The streaming form of a stage.

Its layers take an image strip by strip, and as arguments what they kept of earlier strips.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.outputs import map_tensors
from gems.streaming.operations.kernels import drop_rows
from gems.streaming.operations.lower import draws_numbers, lower
from gems.streaming.operations.operation import (
    ROWS,
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
from gems.streaming.row_plan import RowValue, plan_rows
from gems.streaming.row_rules import even_ends
from gems.streaming.strip_run import RunMode, StripNetwork, StripRun
from gems.streaming.trace import LayerTrace, Weight, trace

DEFAULT_MODE = RunMode()


@dataclass(frozen=True, slots=True)
class Boundary:
    """A tensor between stages in strips.

    It has the shape of the whole, and `ends`, the number of rows of `dim` after each strip. Without
    `ends` it has no rows and arrives in the last strip.
    """

    shape: tuple[int, ...]
    dtype: torch.dtype
    ends: tuple[int, ...] | None
    dim: int = 2

    @classmethod
    def even(
        cls, shape: tuple[int, ...], dtype: torch.dtype, strips: int, dim: int = 2
    ) -> Boundary:
        """Return a tensor in strips of equal rows, or one more."""
        return cls(shape, dtype, even_ends(shape[dim], strips), dim)

    def rows(self, strip: int) -> tuple[int, int]:
        """Return the first row of a strip, and how many rows it has."""
        assert self.ends is not None
        first = self.ends[strip - 1] if strip else 0
        return first, self.ends[strip] - first

    def strip_shape(self, strip: int) -> tuple[int, ...]:
        """Return the shape of a strip's tensor, which may have no rows."""
        if self.ends is None:
            return self.shape
        _, rows = self.rows(strip)
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])


def trace_stage(layers: Sequence[tuple[str, nn.Module]], inputs: Sequence[Boundary]) -> LayerTrace:
    """Trace layers to operations that hold for any number of strips of such inputs.

    Raises:
        StreamingError: A layer has operations that depend on values.
    """
    return trace(
        layers, [torch.empty(each.shape, dtype=each.dtype, device="meta") for each in inputs]
    )


class StripStage:
    """Layers in a streaming form.

    The form is for one shape of image, one division into strips and one mode (training or
    evaluation). `forward` is a function of its arguments: its caller holds what it returns, and may
    cut the graph of autograd there. Weights are those that the modules have at the time.

    Attributes:
        inputs: The inputs of the stage.
        outputs: Its outputs, which are the inputs of the next one.
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
        strips: int,
        min_positions: int = 1,
    ) -> None:
        """Trace the named layers, unless a trace is given, and plan the rows of all strips.

        A convolution, linear layer or norm by strip whose map has less than `min_positions` (rows x
        columns x images) in a strip waits for more strips, and takes them at once.

        Raises:
            StreamingError: A layer needs the whole image, or has an unknown operation.
        """
        traced = layers if isinstance(layers, LayerTrace) else trace_stage(layers, inputs)
        given = zip(inputs, traced.inputs, strict=True)
        known = Known(
            [Info(WHOLE if each.ends is None else ROWS, meta, each.dim) for each, meta in given]
        )
        operations = tuple(lower(known, step) for step in traced.steps)
        refuse_changed(known, operations)
        self.inputs = tuple(inputs)
        self.strips = strips
        self._structure = traced.structure
        rows: dict[int, int] = {}
        self._at_once: dict[int, int] = {}
        values: list[RowValue] = []
        for number, boundary in enumerate(inputs):
            if boundary.ends is not None:
                rows[number] = len(values)
                values.append(RowValue(boundary.shape[boundary.dim], boundary.ends))
        for number, operation in enumerate(operations, len(inputs)):
            if operation.reads:
                rows[number] = len(values)
                reads = tuple(rows[read] for read in operation.reads)
                flags = operation.is_summed, operation.has_zeros, operation.is_late
                at_once = self._at_once[number] = strips_at_once(
                    operation, known.infos, strips, min_positions
                )
                values.append(
                    RowValue(operation.height, (), operation.rule, reads, *flags, at_once)
                )
        plan = plan_rows(values, strips)
        self._network = StripNetwork(
            operations, known.infos, len(inputs), traced.outputs, rows, plan
        )
        self.draws = any(draws_numbers(operation) for operation in operations)
        self.draws_by_row = next(
            (each.step.name for each in operations if each.run is drop_rows), None
        )
        self.outputs = tuple(self._boundary(number) for number in traced.outputs)
        self.norm_ends: dict[str, tuple[int, ...]] = {}
        for number, operation in enumerate(operations, len(inputs)):
            if is_ghost_norm(operation.step) and operation.info.kind == ROWS:
                self._add_norm(known, operation, plan.ends[rows[number]])

    def carries(self, strip: int) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        """Return shape and type of what `forward` of a strip returns for the next strip."""
        return tuple(self._network.shape_of(held) for held in self._network.held[strip])

    def shapes_of(self, strip: int) -> Hashable:
        """Return a key that is equal for strips whose operations have equal shapes."""
        before = self.carries(strip - 1) if strip else ()
        return before, self.carries(strip), self._network.plan.shapes_of(strip)

    def work(self) -> Iterator[tuple[str, int, list[int]]]:
        """Yield the work of each operation.

        Each item is its module's name, how many strips it takes at once, and its products in each
        strip.
        """
        network = self._network
        for number, row in network.rows.items():
            if number < network.num_inputs:
                continue
            operation = network.operations[number - network.num_inputs]
            values = (
                operation.info.value
                if isinstance(operation.info.value, Tensor)
                else operation.info.value[0]
            )
            of_row = values.numel() // max(1, operation.height) * products(operation, network.infos)
            ends = (0, *network.plan.ends[row])
            made = [of_row * (end - begin) for begin, end in pairwise(ends)]
            yield operation.step.name, self._at_once[number], made

    def static_carries(self, strip: int) -> list[int]:
        """Return the places of the `carries` that weights alone determine."""
        return [
            place for place, held in enumerate(self._network.held[strip]) if held.kind == STATIC
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
            carries: What the strip before returned.
            mode: How it is run; its buffers are what `changed_buffers` returned before.

        Returns:
            The outputs: rows (perhaps none), or a whole tensor in the last strip and None before.
                And the carries for the next strip.

        Raises:
            ValueError: Random numbers are drawn, and there are no seeds.
        """
        if self.draws and mode.draws is None:
            raise ValueError("these layers draw random numbers: give the seeds of the image")
        run = StripRun(self._network, strip, inputs, carries, mode)
        return run.outputs(), run.carries()

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
        whole: list[Tensor] = []
        for place, boundary in enumerate(self.outputs):
            parts = [each for outputs in strips if (each := outputs[place]) is not None]
            whole.append(parts[-1] if boundary.ends is None else torch.cat(parts, boundary.dim))
        return self.structured(whole)

    def structured(self, outputs: Iterable[Tensor]) -> Any:
        """Return whole outputs as the last layer returns them."""
        tensors = iter(outputs)
        return map_tensors(lambda _: next(tensors), self._structure)

    def _add_norm(self, known: Known, operation: Operation, ends: tuple[int, ...]) -> None:
        value = operation.info.value
        name = operation.step.name
        positions = value.numel() // (value.shape[1] * operation.height)  # of a row
        if any(0 < (end - begin) * positions < 2 for begin, end in pairwise((0, *ends))):
            known.refuse(
                operation.step, "has a single value of a channel in a strip", "use fewer strips"
            )
        if self.norm_ends.get(name, ends) != ends:
            known.refuse(operation.step, "normalizes several maps of unlike rows")
        self.norm_ends[name] = ends

    def _boundary(self, number: int) -> Boundary:
        info = self._network.infos[number]
        ends = self._network.plan.ends[self._network.rows[number]] if info.kind == ROWS else None
        return Boundary(tuple(info.value.shape), info.value.dtype, ends, info.dim)

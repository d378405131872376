"""From a trace to operations on blocks.

After the layer `until`, everything takes whole maps. A head after the last operation on
neighbouring positions may attend to all positions.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from gems.streaming.axis_rules import Lookup
from gems.streaming.errors import StreamingError
from gems.streaming.operations.kernels import plain
from gems.streaming.operations.lower import is_spatial, lower
from gems.streaming.operations.operation import MAP, Known, Operation, map_refs, reshaped
from gems.streaming.operations.tokens import Tokens, TokenSteps
from gems.streaming.trace import LayerTrace, Ref, Step

aten = torch.ops.aten


def lower_trace(
    known: Known, traced: LayerTrace, until: str | None
) -> tuple[list[Operation], tuple[int, ...]]:
    """Return the operations of a trace and the numbers of its outputs.

    A step may become several operations, so that later values have other numbers than in the trace.
    One that gives tokens becomes none before something needs the tokens themselves.

    Raises:
        StreamingError: A step needs the whole image, or there is no layer `until`.
    """
    lowering = _Lowering(known, traced, until)
    return lowering.operations, lowering.outputs


class _Lowering:
    def __init__(self, known: Known, traced: LayerTrace, until: str | None) -> None:
        self.operations: list[Operation] = []
        self._known = known
        self._steps = traced.steps
        self._num_inputs = len(traced.inputs)
        self._numbers = {number: number for number in range(self._num_inputs)}
        self._tokens: dict[int, Tokens] = {}
        self._waiting: dict[int, int] = {}  # by the number of a map
        self._end = len(traced.steps) if until is None else _end_of(traced, until)
        spatial = [place for place, step in enumerate(traced.steps) if is_spatial(step)]
        self._head = min(self._end, max(spatial, default=-1) + 1)
        rewriting = TokenSteps(known, self._numbers, self._tokens, self._add)
        has_grad = any(step.has_grad for step in traced.steps)
        for place, step in enumerate(traced.steps[: self._end]):
            # one that cuts the graph of autograd must run
            rewritten = rewriting.of(step) if step.has_grad or not has_grad else None
            number = self._num_inputs + place
            if isinstance(rewritten, Tokens):
                self._tokens[number] = rewritten
            else:
                self._numbers[number] = self._lower(place) if rewritten is None else rewritten
        for place in range(self._end, len(traced.steps)):
            self._number(self._num_inputs + place)
        self.outputs = tuple(self._number(number) for number in traced.outputs)

    def _number(self, number: int) -> int:
        """Return the operation that computes a value of the trace as it is there."""
        if number not in self._numbers:
            step = self._steps[number - self._num_inputs]
            tokens = self._tokens.get(number)
            if tokens is not None and tokens.is_plain and isinstance(step.value, Tensor):
                operation = self._add(reshaped(step, Ref(tokens.number), step.value))
            else:
                operation = self._lower(number - self._num_inputs)
            self._numbers[number] = operation
        return self._numbers[number]

    def _lower(self, place: int) -> int:
        step = self._steps[place]
        self._known.is_head = place >= self._head

        def moved(ref: Ref) -> Ref:
            number = self._number(ref.number)
            return Ref(self._whole(number, step) if place >= self._end else number)

        return self._add(
            replace(step, args=map_refs(moved, step.args), kwargs=map_refs(moved, step.kwargs))
        )

    def _add(self, step: Step | Operation) -> int:
        if isinstance(step, Operation):
            self.operations.append(step)
            self._known.infos.append(step.info)
        else:
            self.operations += lower(self._known, step)
        return len(self._known.infos) - 1

    def _whole(self, number: int, step: Step) -> int:
        """Return a map as a value that is there when all of it is."""
        info = self._known.infos[number]
        if info.kind != MAP:
            return number
        if number not in self._waiting:
            rules = tuple(
                None if dim is None else Lookup((0,), (info.size(axis),))
                for axis, dim in enumerate(info.dims)
            )
            alias = replace(
                step,
                target=aten.alias.default,
                args=(Ref(number),),
                kwargs={},
                value=info.value,
                has_grad=True,
            )
            whole = info.moved(info.value, (None,) * len(rules))
            self._waiting[number] = self._add(Operation(alias, whole, plain, (number,), rules))
        return self._waiting[number]


def _end_of(traced: LayerTrace, until: str) -> int:
    """Return the number of steps up to the last one of a layer, 0 without a name."""
    if not until:
        return 0
    places = [
        place
        for place, step in enumerate(traced.steps)
        if step.name == until or step.name.startswith(f"{until}.")
    ]
    if not places:
        names = dict.fromkeys(step.name for step in traced.steps)
        raise StreamingError(f"until={until} is no layer", f"give one of {', '.join(names)}")
    return places[-1] + 1

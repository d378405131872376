"""Run one strip through a network of operations."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import chain, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gems.autograd.random_draws import generators_of
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.streaming.buffers import Layout, Write, write_rows
from gems.streaming.operations.kernels import Call, Rows
from gems.streaming.operations.lower import draws_numbers
from gems.streaming.operations.operation import (
    PARTS,
    ROWS,
    STATIC,
    WHOLE,
    Info,
    Operation,
    changed_buffer,
    refs,
)
from gems.streaming.row_plan import FRESH, Piece, RowPlan, ValueStrip
from gems.streaming.row_rules import Bins, Span
from gems.streaming.trace import Ref, Step, Weight

# maps the checksum of a module's name to the seed of its random numbers
Draws = Callable[[int], int]
_MASK = 2**63 - 1
_NUMBERS = (int, float, bool, type(None))


class RunMode(NamedTuple):
    """How a strip is run.

    Attributes:
        draws: Gives seeds for random numbers; the same in all strips of an image.
        deferred: Takes the weight gradients of backward if they can wait.
        is_again: It has run before, so that running statistics include its rows already.
        buffers: The values before it ran first of the buffers that it changes.
    """

    draws: Draws | None = None
    deferred: DeferredGradients | None = None
    is_again: bool = False
    buffers: Mapping[Weight, Tensor] | None = None


class CarriedTensor(NamedTuple):
    """An item that is kept from a strip for the next.

    It is rows, partial sums of rows, or a value that depends on no input.
    """

    kind: str
    number: int
    rows: Span = (0, 0)


class StripNetwork:
    """Operations in order, and the plan of the values with rows.

    `rows` maps the number of a value to its number in the plan.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        infos: Sequence[Info],
        num_inputs: int,
        outputs: Sequence[int],
        rows: dict[int, int],
        plan: RowPlan,
    ) -> None:
        self.operations, self.infos, self.num_inputs = tuple(operations), tuple(infos), num_inputs
        self.outputs = tuple(outputs)
        self.rows = rows
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
            for each in operations
            if each.info.kind == STATIC and (weight := changed_buffer(each.step))
        }
        self.drawing = {
            number for number, each in enumerate(operations, num_inputs) if draws_numbers(each)
        }
        self.held = [self._held(strip) for strip in range(len(plan.strips))]
        self._wanted: dict[tuple[int, int], tuple[Span, ...]] = {}

    def at(self, strip: int, number: int) -> ValueStrip:
        """Return the plan of a value in a strip."""
        return self.plan.strips[strip][self.rows[number]]

    def shape_of(self, held: CarriedTensor) -> tuple[tuple[int, ...], torch.dtype]:
        """Return shape and type of a kept item."""
        value = self.infos[held.number].value
        shape = list(value.shape)
        dtype = value.dtype
        rows = held.rows[1] - held.rows[0]
        if held.kind == "rows":
            shape[self.infos[held.number].dim] = rows
        elif held.kind == "sum":
            operation = self.operations[held.number - self.num_inputs]
            shape = [
                *self.infos[operation.reads[0]].value.shape[:2],
                rows,
                operation.state["columns"],
            ]
            dtype = operation.state["dtype"]
        return tuple(shape), dtype

    def wanted(self, strip: int, number: int) -> tuple[Span, ...]:
        """Return the spans of a value's fresh piece that are read or kept.

        A span is its first row in the piece, and its number of rows.
        """
        key = strip, number
        if key not in self._wanted:
            at = self.at(strip, number)
            pieces = list(at.kept)
            for reader in self._readers.get(number, set()) & self.rows.keys():
                taken = self.at(strip, reader).taken
                for read, parts in zip(
                    self.operations[reader - self.num_inputs].reads, taken, strict=True
                ):
                    pieces += parts if read == number else ()
            if number in self.outputs and at.new[0] < at.new[1]:
                pieces.append(Piece(FRESH, *at.new))
            spans = {
                (piece.begin - at.fresh[0], piece.end - piece.begin)
                for piece in pieces
                if piece.source == FRESH
            }
            self._wanted[key] = tuple(sorted(spans))
        return self._wanted[key]

    def device(self, tensors: Sequence[Tensor | None]) -> torch.device:
        """Return the device of the tensors, or of the weights if there are no tensors."""
        weights = (
            part.get()
            for operation in self.operations
            for part in operation.step.args
            if isinstance(part, Weight)
        )
        found = next(
            (tensor for tensor in chain(tensors, weights) if isinstance(tensor, Tensor)), None
        )
        return torch.device("cpu") if found is None else found.device

    def _held(self, strip: int) -> list[CarriedTensor]:
        """Return the items that are kept after a strip, in order."""
        if strip == len(self.plan.strips) - 1:
            return []
        found = []
        for number in self.rows:
            found += [
                CarriedTensor("rows", number, (piece.begin, piece.end))
                for piece in self.at(strip, number).kept
            ]
            if number < self.num_inputs:
                continue
            operation = self.operations[number - self.num_inputs]
            if operation.is_summed:
                assert isinstance(operation.rule, Bins)
                done = self.plan.ends[self.rows[number]][strip]
                begun = operation.rule.begun(self.plan.ends[self.rows[operation.reads[0]]][strip])
                found += [CarriedTensor("sum", number, (done, begun))] if begun > done else []
        used = {
            ref.number
            for each in self.operations
            if each.info.kind != STATIC
            for ref in refs(each.step)
        }
        statics = sorted(
            number for number in used | {*self.outputs} if self.infos[number].kind == STATIC
        )
        return [*found, *(CarriedTensor("static", number) for number in statics)]


class StripRun:
    """A run of the operations on the rows of one strip."""

    def __init__(
        self,
        network: StripNetwork,
        strip: int,
        inputs: Sequence[Tensor | None],
        carries: Sequence[Tensor],
        mode: RunMode,
    ) -> None:
        self._network = network
        self._strip = strip
        self._mode = mode
        self._buffers = {weight: tensor.clone() for weight, tensor in (mode.buffers or {}).items()}
        self._is_last = strip == len(network.plan.strips) - 1
        self._values: dict[int, Any] = {}  # without rows, or parts
        self._carried: dict[int, list[Tensor]] = {}
        self._sums: dict[int, Tensor] = {}
        self._fresh: dict[int, dict[Span, Tensor]] = {}
        self._kept: dict[int, list[Tensor]] = {}
        self._given: dict[int, Tensor | None] = {}
        self._random: dict[tuple[str, int], list[Tensor]] = {}  # by module and call of it
        for held, kept in zip(network.held[strip - 1] if strip else [], carries, strict=True):
            if held.kind == "rows":
                self._carried.setdefault(held.number, []).append(kept)
            else:
                (self._sums if held.kind == "sum" else self._values)[held.number] = kept
        self._device = network.device((*inputs, *carries))
        for number, tensor in enumerate(inputs):
            if number in network.rows:
                assert tensor is not None
                self._store(number, "copy", [[(tensor, 0)]])
            else:
                self._values[number] = tensor
        for number, operation in enumerate(network.operations, network.num_inputs):
            with nullcontext() if operation.step.has_grad else torch.no_grad():
                self._step(number, operation)
            if network.watch is not None:
                made = (
                    self._fresh[number].values()
                    if number in self._fresh
                    else (self._values.get(number),)
                )
                network.watch(operation.step.name, tuple(made))
            for read in network.released.get(number, ()):
                self._release(read)
        for number in range(network.num_inputs):
            self._release(number)

    def outputs(self) -> tuple[Tensor | None, ...]:
        """Return the outputs of the network in this strip."""
        return tuple(self._given[number] for number in self._network.outputs)

    def carries(self) -> tuple[Tensor, ...]:
        """Return the tensors that are kept for the next strip."""
        taken = {number: iter(tensors) for number, tensors in self._kept.items()}
        found = []
        for held in self._network.held[self._strip]:
            if held.kind == "rows":
                found.append(next(taken[held.number]))
            else:
                found.append((self._sums if held.kind == "sum" else self._values)[held.number])
        return tuple(found)

    def _release(self, number: int) -> None:
        """Forget a value that nothing reads any more, except what is kept or returned."""
        if number in self._network.outputs and number not in self._given:
            self._given[number] = self._output(number)
        if number in self._network.rows and number not in self._kept:
            kept = self._network.at(self._strip, number).kept if not self._is_last else ()
            self._kept[number] = [self._piece(number, piece) for piece in kept]
        self._fresh.pop(number, None)
        self._carried.pop(number, None)
        if self._network.infos[number].kind != STATIC:
            self._values.pop(number, None)

    def _output(self, number: int) -> Tensor | None:
        if self._network.infos[number].kind != ROWS:
            return (
                self._values[number]
                if self._is_last or self._network.infos[number].kind == STATIC
                else None
            )
        begin, end = self._network.at(self._strip, number).new
        if begin < end:
            return self._piece(number, Piece(FRESH, begin, end))
        dtype = self._network.infos[number].value.dtype
        return torch.empty(self._no_rows(number), dtype=dtype, device=self._device)

    def _no_rows(self, number: int) -> list[int]:
        info = self._network.infos[number]
        return [0 if dim == info.dim else size for dim, size in enumerate(info.value.shape)]

    def _step(self, number: int, operation: Operation) -> None:
        if not operation.reads:
            if self._strip == 0 if operation.info.kind == STATIC else self._is_last:
                buffer = changed_buffer(operation.step) if self._mode.is_again else None
                if buffer is None or buffer in self._buffers:
                    self._values[number] = operation.run(self._call(operation, number, None))
                else:
                    self._values[number] = buffer.get()
            return
        at = self._network.at(self._strip, number)
        if operation.is_summed:
            self._add_up(number, operation, at)
        elif at.new[0] == at.new[1]:
            self._store(number, "copy", [])  # rows that were kept, in front of none
        elif operation.info.kind in (WHOLE, PARTS):
            self._values[number] = operation.run(self._call(operation, number, at))
        elif self._network.wanted(self._strip, number):
            if operation.how == "copy" or self._is_direct(number, operation, at):
                self._store(
                    number, "copy", [[(operation.run(self._call(operation, number, at)), 0)]]
                )
            else:
                parts = [
                    [(self._piece(read, piece), piece.begin - at.new[0]) for piece in taken]
                    for read, taken in zip(operation.reads, at.taken, strict=True)
                ]
                self._store(number, operation.how, parts, operation.state.get("channel_dim", 1))

    def _is_direct(self, number: int, operation: Operation, at: ValueStrip) -> bool:
        """Return whether an operation returns exactly the wanted rows, from single pieces.

        Then no rows need to be written in front of them.
        """
        wanted = self._network.wanted(self._strip, number)
        is_whole = at.fresh == at.new and wanted == ((0, at.new[1] - at.new[0]),)
        if operation.how in ("add", "cat"):
            is_whole = at.fresh == at.new
        return is_whole and all(len(taken) == 1 for taken in at.taken)

    def _add_up(self, number: int, operation: Operation, at: ValueStrip) -> None:
        """Run an operation whose output is sums over rows.

        Finished sums are stored; unfinished ones are carried on.
        """
        made = self._sums.pop(number, None)
        if at.window[0] < at.window[1]:
            call = self._call(operation, number, at, made)
            made = operation.run(call)
        done = at.new[1] - at.new[0]
        dtype = operation.step.value.dtype
        if made is not None and made.shape[2] > done:
            self._sums[number] = made.narrow(2, done, made.shape[2] - done)
        if operation.info.kind == WHOLE:
            if done:
                assert made is not None
                self._values[number] = made.reshape(operation.state["shape"]).to(dtype)
        else:
            self._store(
                number,
                "copy",
                [[(made.narrow(2, 0, done).to(dtype), 0)]] if done and made is not None else [],
            )

    def _call(
        self,
        operation: Operation,
        number: int,
        at: ValueStrip | None,
        carried: Tensor | None = None,
    ) -> Call:
        """Return an operation with its arguments."""
        network = self._network
        step = operation.step
        rows = Rows(0, 0, 0, 0, 0, 0, (0, 0))
        taken = iter(at.taken) if at is not None else iter(())
        if at is not None:
            source = network.infos[operation.reads[0]]
            window = at.window
            if operation.rule is not None and not operation.is_summed:
                window = operation.rule.reads(*at.new)
            rows = Rows(*at.new, *window, operation.height, source.height, at.window)

        def tensor(ref: Ref) -> Any:
            if ref.number not in operation.reads:
                return self._rows_of(self._values[ref.number], operation, at)
            if network.infos[ref.number].kind == PARTS:
                return self._values[ref.number]
            pieces = [self._piece(ref.number, piece) for piece in next(taken)]
            return (
                pieces[0] if len(pieces) == 1 else torch.cat(pieces, network.infos[ref.number].dim)
            )

        args = self._settle(step.args, operation, at, tensor)
        kwargs = {
            key: self._settle(value, operation, at, tensor) for key, value in step.kwargs.items()
        }
        return Call(
            step.name,
            step.target,
            args,
            kwargs,
            rows,
            operation.state,
            partial(self._seeded, step) if number in network.drawing else _unseeded,
            self._mode.deferred,
            carried,
            self._mode.is_again,
        )

    def _settle(
        self, value: Any, operation: Operation, at: ValueStrip | None, tensor: Callable[[Ref], Any]
    ) -> Any:
        """Return arguments with tensors, weights and the device filled in."""
        # a method: a nested function that calls itself would hold all tensors until Python collects
        # garbage
        if type(value) in _NUMBERS:
            return value
        if isinstance(value, Ref):
            return tensor(value)
        if isinstance(value, Weight):
            return self._rows_of(self._buffers.get(value, value.get()), operation, at)
        if isinstance(value, list | tuple):
            return type(value)(self._settle(part, operation, at, tensor) for part in value)
        return self._device if isinstance(value, torch.device) else value

    def _rows_of(self, value: Any, operation: Operation, at: ValueStrip | None) -> Any:
        """Return the strip's rows of a tensor for the whole map.

        An embedding of positions is such a tensor.
        """
        if at is None or not operation.is_elementwise or not isinstance(value, Tensor):
            return value
        dim = value.dim() - (operation.info.value.dim() - operation.info.dim)
        is_by_row = dim >= 0 and value.shape[dim] == operation.info.height > 1
        return value.narrow(dim, at.new[0], at.new[1] - at.new[0]) if is_by_row else value

    def _piece(self, number: int, piece: Piece) -> Tensor:
        at = self._network.at(self._strip, number)
        rows = piece.end - piece.begin
        if piece.source == FRESH:
            return self._fresh[number][piece.begin - at.fresh[0], rows]
        carried = self._carried[number][piece.source]
        return carried.narrow(
            self._network.infos[number].dim, piece.begin - at.carried[piece.source][0], rows
        )

    def _store(
        self,
        number: int,
        how: str,
        parts: Sequence[Sequence[tuple[Tensor, int]]],
        channel_dim: int = 1,
    ) -> None:
        """Write the rows of a value.

        `parts` are the pieces that make its new rows, with their first rows there.
        """
        at = self._network.at(self._strip, number)
        info = self._network.infos[number]
        wanted = self._network.wanted(self._strip, number) if info.kind == ROWS else ()
        if not wanted:
            return
        new = at.new[1] - at.new[0]
        if new and how == "copy" and not at.copied and at.fresh == at.new and wanted == ((0, new),):
            self._fresh[number] = {wanted[0]: parts[0][0][0]}
            return
        sources: list[Tensor] = []
        writes: list[Write] = []
        for piece in at.copied:
            before = self._carried[number][piece.source]
            row = piece.begin - at.carried[piece.source][0]
            writes.append(
                Write(
                    "copy",
                    ((len(sources), row),),
                    piece.begin - at.fresh[0],
                    piece.end - piece.begin,
                )
            )
            sources.append(before)
        if new:
            writes += _writes(how, parts, len(sources), at.new[0] - at.fresh[0], new, channel_dim)
            sources += [tensor for part in parts for tensor, _ in part]
        shape = list(info.value.shape)
        shape[info.dim] = at.fresh[1] - at.fresh[0]
        layout = Layout(tuple(shape), info.dim, channel_dim, tuple(writes), wanted)
        if not sources:
            sources = [
                torch.empty(self._no_rows(number), dtype=info.value.dtype, device=self._device)
            ]
        self._fresh[number] = dict(zip(wanted, write_rows(layout, sources), strict=True))

    @contextmanager
    def _seeded(self, step: Step, row: int | None) -> Iterator[None]:
        """Draw from the random stream of a step's module, or of one of its rows."""
        draws = self._mode.draws
        assert draws is not None
        generators = generators_of(self._device)
        outer = [generator.get_state() for generator in generators]
        seed = draws(zlib.crc32(step.name.encode()))
        call = (step.name, step.call)
        if row is None and call in self._random:
            for generator, state in zip(generators, self._random[call], strict=True):
                generator.set_state(state)
        else:
            for generator in generators:
                generator.manual_seed(seed if row is None else hash((seed, row)) & _MASK)
        try:
            yield
        finally:
            if row is None:
                self._random[call] = [generator.get_state() for generator in generators]
            for generator, state in zip(generators, outer, strict=True):
                generator.set_state(state)


def _unseeded(row: int | None) -> AbstractContextManager[None]:
    return nullcontext()


def _writes(
    how: str,
    parts: Sequence[Sequence[tuple[Tensor, int]]],
    first: int,
    row: int,
    rows: int,
    channel_dim: int,
) -> list[Write]:
    """Return the writes that make new rows from pieces of each part.

    The sources are numbered from `first`.
    """
    if how == "cat":
        out = []
        channel = 0
        source = first
        for part in parts:
            for position, (_, begin) in enumerate(part):
                end = part[position + 1][1] if position + 1 < len(part) else rows
                out.append(Write("cat", ((source, 0),), row + begin, end - begin, channel))
                source += 1
            channel += part[0][0].shape[channel_dim]
        return out
    starts = []
    number = first
    for part in parts:
        starts.append([(begin, number + index) for index, (_, begin) in enumerate(part)])
        number += len(part)
    borders = sorted({begin for each in starts for begin, _ in each} | {rows})
    out = []
    for begin, end in pairwise(borders):
        inside = [max(pair for pair in each if pair[0] <= begin) for each in starts]
        out.append(
            Write(
                how, tuple((source, begin - at) for at, source in inside), row + begin, end - begin
            )
        )
    return out

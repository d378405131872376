"""Run one block through a network of operations."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from itertools import pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from gems.autograd.random_draws import generators_of
from gems.autograd.split_backward.deferred import DeferredGradients
from gems.streaming.block_plan import BlockValue, Box, Path, Place, is_empty
from gems.streaming.buffers import Layout, Patch, Write, join, write_blocks
from gems.streaming.operations.kernels import Call
from gems.streaming.operations.operation import MAP, PARTS, STATIC, WHOLE, Operation, changed_buffer
from gems.streaming.strip_network import Parts, PatchOf, Stored, StripNetwork
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


class StripRun:
    """A run of the operations on one block."""

    def __init__(
        self,
        network: StripNetwork,
        block: int,
        inputs: Sequence[Tensor | None],
        carries: Sequence[Tensor],
        mode: RunMode,
    ) -> None:
        self._network = network
        self._block = block
        self._mode = mode
        self._buffers = {weight: tensor.clone() for weight, tensor in (mode.buffers or {}).items()}
        self._is_last = block == network.plan.num_blocks - 1
        self._values: dict[int, Any] = {}  # without axes, or parts
        self._carried: dict[int, dict[Path, Tensor]] = {}
        self._sums: dict[int, Tensor] = {}
        self._states: dict[int, tuple[Tensor, ...]] = {}
        self._fresh: dict[int, dict[Patch, Tensor]] = {}
        self._kept: dict[int, list[Tensor]] = {}
        self._given: dict[int, Tensor | None] = {}
        self._random: dict[tuple[str, int], list[Tensor]] = {}  # by module and call of it
        for (source, place), carried in zip(network.given(block), carries, strict=True):
            carry = network.held(source)[place]
            if carry.kind == "map":
                self._carried.setdefault(carry.number, {})[carry.path] = carried
            elif carry.kind == "state":
                self._states[carry.number] = (*self._states.get(carry.number, ()), carried)
            else:
                (self._sums if carry.kind == "sum" else self._values)[carry.number] = carried
        self._device = network.device((*inputs, *carries))
        for number, tensor in enumerate(inputs):
            if number in network.planned:
                assert tensor is not None
                at = network.at(block, number)
                self._store(number, "copy", [[(tensor, at.new)]] if tensor.numel() else [])
            else:
                self._values[number] = tensor
        for number, operation in enumerate(network.operations, network.num_inputs):
            with nullcontext() if operation.step.has_grad else torch.no_grad():
                self._step(number, operation)
            if network.watch is not None:
                by_path = (
                    self._fresh[number].values()
                    if number in self._fresh
                    else (self._values.get(number),)
                )
                network.watch(operation.step.name, tuple(by_path))
            for read in network.released.get(number, ()):
                self._release(read)
        for number in range(network.num_inputs):
            self._release(number)

    def outputs(self) -> tuple[Tensor | None, ...]:
        """Return the outputs of the network in this block."""
        return tuple(self._given[number] for number in self._network.outputs)

    def carries(self) -> tuple[Tensor, ...]:
        """Return the tensors that are kept for later blocks."""
        taken = {number: iter(tensors) for number, tensors in self._kept.items()}
        carries = []
        for carry in self._network.held(self._block):
            if carry.kind == "map":
                carries.append(next(taken[carry.number]))
            elif carry.kind == "state":
                carries.append(self._states[carry.number][carry.place_in_state])
            else:
                carries.append((self._sums if carry.kind == "sum" else self._values)[carry.number])
        return tuple(carries)

    def _release(self, number: int) -> None:
        """Forget a value that nothing reads any more, except what is kept or returned."""
        if number in self._network.outputs and number not in self._given:
            self._given[number] = self._output(number)
        if number in self._network.planned and number not in self._kept:
            pieces = self._network.at(self._block, number).kept
            self._kept[number] = [self._piece(number, piece.place) for piece in pieces]
        self._fresh.pop(number, None)
        self._carried.pop(number, None)
        if self._network.infos[number].kind != STATIC:
            self._values.pop(number, None)

    def _output(self, number: int) -> Tensor | None:
        info = self._network.infos[number]
        if info.kind != MAP:
            return self._values[number] if self._is_last or info.kind == STATIC else None
        new = self._network.at(self._block, number).new
        if not is_empty(new):
            return self._piece(number, Place(self._network.plan.whole, new))
        return self._nothing(number)

    def _nothing(self, number: int) -> Tensor:
        info = self._network.infos[number]
        shape = list(info.value.shape)
        shape[min(info.axes)] = 0
        return torch.empty(shape, dtype=info.value.dtype, device=self._device)

    def _step(self, number: int, operation: Operation) -> None:
        if not operation.reads:
            if self._block == 0 if operation.info.kind == STATIC else self._is_last:
                buffer = changed_buffer(operation.step) if self._mode.is_again else None
                if buffer is None or buffer in self._buffers:
                    self._values[number] = operation.run(self._call(operation, number, None))
                else:
                    self._values[number] = buffer.get()
            return
        at = self._network.at(self._block, number)
        if operation.finish is not None:
            state = self._states.get(number)
            if not is_empty(at.new):
                state = operation.run(self._call(operation, number, at, state))
                self._states[number] = state
            if self._is_last:
                self._values[number] = operation.finish(operation.state, *self._states[number])
        elif operation.summed is not None:
            self._add_up(number, operation, operation.summed, at)
        elif is_empty(at.new):
            self._store(number, "copy", [])  # what was kept, beside nothing
        elif operation.info.kind in (WHOLE, PARTS):
            self._values[number] = operation.run(self._call(operation, number, at))
        elif self._network.wanted(self._block, number):
            if operation.how == "copy" or self._is_direct(number, operation, at):
                output = operation.run(self._call(operation, number, at))
                self._store(number, "copy", [[(output, at.new)]])
            else:
                parts = [
                    [(self._piece(read, place), place.box) for place in taken]
                    for read, taken in zip(operation.reads, at.taken, strict=True)
                ]
                self._store(number, operation.how, parts, operation.state.get("channel_dim", 1))

    def _is_direct(self, number: int, operation: Operation, at: BlockValue) -> bool:
        """Return whether an operation returns exactly what is wanted, from single pieces.

        Then nothing needs to be written beside it.
        """
        is_whole = at.fresh == at.new
        if operation.how not in ("add", "cat"):
            patches = (self._network.patch(number, at.new, at.new),)
            is_whole = is_whole and self._network.wanted(self._block, number) == patches
        return is_whole and all(len(taken) == 1 for taken in at.taken)

    def _add_up(self, number: int, operation: Operation, axis: int, at: BlockValue) -> None:
        """Run an operation whose output is sums along an axis.

        Finished sums are stored; unfinished ones are carried on.
        """
        sums = self._sums.pop(number, None)
        if not is_empty(at.window):
            call = self._call(operation, number, at, sums)
            sums = operation.run(call)
        begin, end = at.new[axis]
        done = 0 if is_empty(at.new) else end - begin
        dim = self._network.infos[operation.reads[0]].dims[axis]
        assert dim is not None
        if sums is not None and sums.shape[dim] > done:
            self._sums[number] = sums.narrow(dim, done, sums.shape[dim] - done)
        info = operation.info
        parts = []
        if done and sums is not None:
            finished = sums.narrow(dim, 0, done).to(operation.step.value.dtype)
            shape = list(operation.state["shape"])
            for axis_dim, span in zip(info.dims, at.new, strict=True):
                if axis_dim is not None:
                    shape[axis_dim] = span[1] - span[0]
            finished = finished.reshape(shape)
            if info.kind == WHOLE:
                self._values[number] = finished
            parts = [[(finished, at.new)]]
        if info.kind == MAP:
            self._store(number, "copy", parts)

    def _call(
        self, operation: Operation, number: int, at: BlockValue | None, carried: Any = None
    ) -> Call:
        """Return an operation with its arguments."""
        step = operation.step
        taken = iter(at.taken) if at is not None else iter(())

        def tensor(ref: Ref) -> Any:
            if ref.number not in operation.reads:
                return self._block_of(self._values[ref.number], operation, at)
            if self._network.infos[ref.number].kind == PARTS:
                return self._values[ref.number]
            return self._joined(ref.number, next(taken))

        args = self._settle(step.args, operation, at, tensor)
        kwargs = {
            key: self._settle(value, operation, at, tensor) for key, value in step.kwargs.items()
        }
        along, summed = ((), None) if at is None else self._network.along(self._block, number)
        return Call(
            step.name,
            step.target,
            args,
            kwargs,
            along,
            summed,
            operation.state,
            partial(self._seeded, step) if number in self._network.drawing else _unseeded,
            self._mode.deferred,
            carried,
            self._mode.is_again,
        )

    def _joined(self, number: int, places: Sequence[Place]) -> Tensor:
        """Return the boxes of a value in one tensor."""
        if len(places) == 1:
            return self._piece(number, places[0])
        parts = [(place.box, self._piece(number, place)) for place in places]
        return join(parts, self._network.infos[number].dims)

    def _settle(
        self, value: Any, operation: Operation, at: BlockValue | None, tensor: Callable[[Ref], Any]
    ) -> Any:
        """Return arguments with tensors, weights and the device filled in."""
        # a method: a nested function that calls itself would hold all tensors until Python collects
        # garbage
        if type(value) in _NUMBERS:
            return value
        if isinstance(value, Ref):
            return tensor(value)
        if isinstance(value, Weight):
            return self._block_of(self._buffers.get(value, value.get()), operation, at)
        if isinstance(value, list | tuple):
            return type(value)(self._settle(part, operation, at, tensor) for part in value)
        return self._device if isinstance(value, torch.device) else value

    def _block_of(self, value: Any, operation: Operation, at: BlockValue | None) -> Any:
        """Return the block's part of a tensor for the whole map.

        An embedding of positions is such a tensor.
        """
        if at is None or not operation.is_elementwise or not isinstance(value, Tensor):
            return value
        info = operation.info
        for axis, axis_dim in enumerate(info.dims):
            if axis_dim is not None:
                dim = value.dim() - (info.value.dim() - axis_dim)
                if dim >= 0 and value.shape[dim] == info.size(axis) > 1:
                    begin, end = at.new[axis]
                    value = value.narrow(dim, begin, end - begin)
        return value

    def _piece(self, number: int, place: Place) -> Tensor:
        patch = self._network.patch_of(self._block, number, place)
        if place.path == self._network.plan.whole:
            return self._fresh[number][patch]
        tensor = self._carried[number][place.path]
        for dim, begin, size in zip(self._network.dims(number), *patch, strict=True):
            tensor = tensor.narrow(dim, begin, size)
        return tensor

    def _store(self, number: int, how: str, parts: Parts, channel_dim: int = 1) -> None:
        """Write the block of a value.

        `parts` are the pieces that make its new box, with their boxes.
        """
        known = self._network.stored.of(self._block)
        key = number, bool(parts)
        if key not in known:
            known[key] = self._stored(number, how, parts, channel_dim)
        wanted, layout, paths = known[key]
        if layout is not None:
            sources = [self._carried[number][path] for path in paths]
            sources += [tensor for part in parts for tensor, _ in part]
            aliases = write_blocks(layout, sources or [self._nothing(number)])
            self._fresh[number] = dict(zip(wanted, aliases, strict=True))
        elif wanted:
            self._fresh[number] = {wanted[0]: parts[0][0][0]}

    def _stored(self, number: int, how: str, parts: Parts, channel_dim: int) -> Stored:
        """Return how the block of a value is written."""
        network = self._network
        at = network.at(self._block, number)
        info = network.infos[number]
        wanted = network.wanted(self._block, number) if info.kind == MAP else ()
        new_patch = network.patch(number, at.new, at.fresh)
        is_given = parts and how == "copy" and at.fresh == at.new and wanted == (new_patch,)
        if not wanted or is_given:
            return Stored(wanted, None, [])
        writes: list[Write] = []
        for source, place in enumerate(at.copied):
            before = network.patch(number, place.box, at.carried[place.path])
            patch = network.patch(number, place.box, at.fresh)
            writes.append(Write("copy", ((source, before.offsets),), patch))
        if parts:
            patch_of = partial(network.patch, number)
            make = _writes_of_channels if how == "cat" else _writes
            writes += make(how, parts, len(writes), at.fresh, patch_of, channel_dim)
        shape = list(info.value.shape)
        dims = network.dims(number)
        for dim, size in zip(dims, network.patch(number, at.fresh, at.fresh).sizes, strict=True):
            shape[dim] = size
        edges = zip(at.fresh, network.plan.sizes(network.planned[number]), strict=True)
        inside = tuple((max(begin, 0), min(end, size)) for (begin, end), size in edges)
        layout = Layout(
            tuple(shape),
            dims,
            channel_dim,
            tuple(writes),
            wanted,
            network.patch(number, inside, at.fresh),
        )
        return Stored(wanted, layout, [place.path for place in at.copied])

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


def _writes_of_channels(
    how: str, parts: Parts, first: int, fresh: Box, patch_of: PatchOf, channel_dim: int
) -> list[Write]:
    """Return the writes that put the pieces of each part at channels of its own.

    The sources are numbered from `first`.
    """
    writes = []
    channel = 0
    source = first
    for part in parts:
        for _, box in part:
            start = patch_of(box, box)
            writes.append(Write(how, ((source, start.offsets),), patch_of(box, fresh), channel))
            source += 1
        channel += part[0][0].shape[channel_dim]
    return writes


def _writes(
    how: str, parts: Parts, first: int, fresh: Box, patch_of: PatchOf, channel_dim: int
) -> list[Write]:
    """Return the writes that make a box from pieces of each part, cut where any piece ends.

    The sources are numbered from `first`.
    """
    if all(len(part) == 1 for part in parts):
        box = parts[0][0][1]
        start = patch_of(box, box).offsets
        sources = tuple((first + place, start) for place in range(len(parts)))
        return [Write(how, sources, patch_of(box, fresh))]
    numbered = []
    for part in parts:
        numbered.append([(first + place, box) for place, (_, box) in enumerate(part)])
        first += len(part)
    boxes = [box for part in parts for _, box in part]
    borders = [sorted({edge for box in boxes for edge in box[axis]}) for axis in range(len(fresh))]
    writes = []
    for box in product(*map(pairwise, borders)):
        inside = [_holding(pieces, box) for pieces in numbered]
        taken = tuple((source, patch_of(box, piece_box).offsets) for source, piece_box in inside)
        writes.append(Write(how, taken, patch_of(box, fresh)))
    return writes


def _holding(pieces: Sequence[tuple[int, Box]], box: Box) -> tuple[int, Box]:
    """Return the piece that holds a box."""
    return next(
        (source, piece_box)
        for source, piece_box in pieces
        if all(
            begin <= first and last <= end
            for (begin, end), (first, last) in zip(piece_box, box, strict=True)
        )
    )

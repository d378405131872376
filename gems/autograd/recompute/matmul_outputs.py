"""Outputs of convolutions and matrix products, kept by selective recomputation.

Recomputation uses them instead of computing them twice.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from gems.autograd.torch_internals import TorchDispatchMode, TreeSpec, tree_flatten, tree_unflatten


class Random(Protocol):
    """The state of random generators."""

    def get(self) -> tuple[Tensor, ...]:
        """Return the state."""

    def set(self, state: tuple[Tensor, ...]) -> None:
        """Return to a state."""


_aten = torch.ops.aten
MATMULS = frozenset(
    {
        _aten.convolution,
        _aten.addmm,
        _aten.mm,
        _aten.bmm,
        _aten.baddbmm,
        _aten.addmv,
        _aten.mv,
        _aten.dot,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
    }
)
# Operators that use only the shape of a tensor and do not read its values, as dropout does for its
# mask.
_OF_SHAPES = frozenset(
    {
        "empty_like",
        "zeros_like",
        "ones_like",
        "full_like",
        "rand_like",
        "randn_like",
        "new_empty",
        "new_empty_strided",
        "new_zeros",
        "new_ones",
        "new_full",
    }
)
_OTHERWISE = "the recomputed forward does not call what it called the first time"


def is_matmul(func: Any) -> bool:
    """Return whether an operator of a dispatch mode is a convolution or a matrix product."""
    return func._overloadpacket in MATMULS


@dataclass(slots=True)
class MatmulOutput:
    """The outputs of one call, and how it was called; `outputs` is empty once they are dropped.

    If `is_changed`, the layers changed the outputs in place before anything read them. The changed
    values are kept, and recomputation skips that change.
    """

    func: Any
    shapes: tuple[torch.Size, ...]
    outputs: tuple[Any, ...]
    spec: TreeSpec
    versions: tuple[int, ...]
    random: tuple[Tensor, ...] | None
    is_read: bool = False
    is_changed: bool = False

    def tensors(self) -> Iterator[Tensor]:
        """Yield the tensors that are kept."""
        return (value for value in self.outputs if isinstance(value, Tensor))

    @property
    def is_valid(self) -> bool:
        """Whether the outputs are kept and unchanged since the layers ran."""
        return bool(self.outputs) and self.versions == tuple(
            tensor._version for tensor in self.tensors()
        )

    def detach(self) -> None:
        """Detach the outputs from their graph; their versions still show later changes in place."""
        self.outputs = tuple(
            value.detach() if isinstance(value, Tensor) else value for value in self.outputs
        )
        self.versions = tuple(tensor._version for tensor in self.tensors())

    def take(self) -> Any:
        """Return the outputs as new tensors over the same memory."""
        fresh = [value.data if isinstance(value, Tensor) else value for value in self.outputs]
        return tree_unflatten(fresh, self.spec)


class MatmulOutputs(deque[MatmulOutput]):
    """The outputs of one forward, in order."""

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that are kept."""
        for entry in self:
            yield from entry.tensors()


class RecordMatmuls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that keeps the outputs of convolutions and matrix products.

    An output that is changed in place before anything reads it is kept in its changed form (for
    example a convolution before an in-place activation). An output that is read first is dropped
    and recomputed.
    """

    def __init__(self, outputs: MatmulOutputs, random: Random) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs
        self._random = random
        self._by_memory: dict[int, MatmulOutput] = {}

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._by_memory.clear()
        for entry in self._outputs:
            entry.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator and record its effect on outputs that are kept."""
        kwargs = kwargs or {}
        self._track(func, args, kwargs)
        result = func(*args, **kwargs)
        if _is_recorded(func):
            values, spec = tree_flatten(result)
            random = self._random.get() if torch.Tag.nondeterministic_seeded in func.tags else None
            entry = MatmulOutput(func, _shapes(args, kwargs), tuple(values), spec, (), random)
            self._outputs.append(entry)
            for tensor in entry.tensors():
                self._by_memory[_memory(tensor)] = entry
        return result

    def _track(self, func: Any, args: Any, kwargs: Any) -> None:
        if not self._by_memory or _is_view(func) or func._overloadpacket.__name__ in _OF_SHAPES:
            return
        places = {place for place, _ in _written(func)}
        names = {name for _, name in _written(func)}
        written = _memories(_targets(func, args, kwargs))
        positional = [value for place, value in enumerate(args) if place not in places]
        read = _memories(
            (positional, [value for name, value in kwargs.items() if name not in names])
        )
        for memory in read & self._by_memory.keys():
            self._by_memory[memory].is_read = True
        for memory in written & self._by_memory.keys():
            entry = self._by_memory[memory]
            if entry.is_read or not _can_skip(func):
                entry.outputs = ()
                self._by_memory = {
                    key: other for key, other in self._by_memory.items() if other is not entry
                }
            else:
                entry.is_changed = True


class ReplayMatmuls(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A dispatch mode that returns the kept outputs, in order, instead of computing them.

    Autograd still records the calls.

    Raises:
        RuntimeError: The layers do not make the same calls as the first time.
    """

    def __init__(self, outputs: MatmulOutputs, random: Random) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._outputs = outputs
        self._random = random
        # a weak reference also keeps the address, so that no later allocation gets it
        self._changed: dict[int, StorageWeakRef] = {}

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None and self._outputs:
            raise RuntimeError(f"{_OTHERWISE}: {len(self._outputs)} matrix products fewer")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, unless its outputs are kept."""
        kwargs = kwargs or {}
        if _is_recorded(func):
            entry = self._next(func, args, kwargs)
            if not entry.is_valid:
                return func(*args, **kwargs)
            if entry.random is not None:
                self._random.set(entry.random)
            if entry.is_changed:
                for storage in (tensor.untyped_storage() for tensor in entry.tensors()):
                    self._changed[storage._cdata] = StorageWeakRef(storage)  # type: ignore[no-untyped-call]
            return entry.take()
        if self._changed and _can_skip(func):
            (target,) = _targets(func, args, kwargs)
            if _memory(target) in self._changed:
                return target
        return func(*args, **kwargs)

    def _next(self, func: Any, args: Any, kwargs: Any) -> MatmulOutput:
        if not self._outputs:
            raise RuntimeError(f"{_OTHERWISE}: {func} is one matrix product more")
        entry = self._outputs.popleft()
        shapes = _shapes(args, kwargs)
        if entry.func is not func or entry.shapes != shapes:
            was = f"{entry.func} of {[tuple(shape) for shape in entry.shapes]}"
            raise RuntimeError(
                f"{_OTHERWISE}: {func} of {[tuple(shape) for shape in shapes]}, was {was}"
            )
        return entry


@cache
def _is_recorded(func: Any) -> bool:
    return is_matmul(func) and not _written(func)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _memories(values: Any) -> set[int]:
    return {_memory(value) for value in tree_flatten(values)[0] if isinstance(value, Tensor)}


def _shapes(args: Any, kwargs: Any) -> tuple[torch.Size, ...]:
    return tuple(
        value.shape for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor)
    )


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the positions and names of the arguments that an operator writes to."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def _is_view(func: Any) -> bool:
    """Return whether an operator reads no values and returns a view of an argument."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases) and not _written(func)


@cache
def _can_skip(func: Any) -> bool:
    """Return whether an operator only changes the values of one tensor, and returns it."""
    is_alone = len(_written(func)) == 1 and len(func._schema.returns) == 1
    returned = func._schema.returns[0].alias_info if is_alone else None
    tags = (torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded)
    return returned is not None and returned.is_write and not any(tag in func.tags for tag in tags)


def _targets(func: Any, args: Any, kwargs: Any) -> list[Any]:
    return [
        args[place] if place < len(args) else kwargs.get(name) for place, name in _written(func)
    ]

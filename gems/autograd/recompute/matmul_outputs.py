"""Products: what convolutions and matrix products gave in a first run, for a second run to use instead of computing."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from gems.autograd.matmul_ops import is_product
from gems.autograd.recompute.layer_state import RandomState

# They are given a tensor for its shape, and read nothing of it: so dropout makes its mask.
_OF_SHAPES = frozenset(
    {
        "empty_like", "zeros_like", "ones_like", "full_like", "rand_like", "randn_like",
        "new_empty", "new_empty_strided", "new_zeros", "new_ones", "new_full",
    }
)  # fmt: skip


@dataclass(slots=True)
class Product:
    """What one product gave: `outputs`, empty once they are let go, and how it was called.

    `is_changed` says that the layers changed it in place before anything read it: the value kept is the later one, and
    the second run leaves that change out.
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
        """Return the tensors that are kept."""
        return (value for value in self.outputs if isinstance(value, Tensor))

    @property
    def is_whole(self) -> bool:
        """Whether it is kept, and nobody behind the layers has changed it since."""
        return bool(self.outputs) and self.versions == tuple(tensor._version for tensor in self.tensors())

    def detach(self) -> None:
        """Parts the outputs from the graph that they were made in; what changes them in place still shows."""
        self.outputs = tuple(value.detach() if isinstance(value, Tensor) else value for value in self.outputs)
        self.versions = tuple(tensor._version for tensor in self.tensors())

    def take(self) -> Any:
        """Return the outputs as new tensors in the same memory."""
        fresh = [value.data if isinstance(value, Tensor) else value for value in self.outputs]
        return tree_unflatten(fresh, self.spec)


@dataclass(slots=True)
class Products:
    """The products of one run, in order."""

    entries: deque[Product] = field(default_factory=deque)

    def tensors(self) -> Iterator[Tensor]:
        """Yield all tensors that are kept."""
        for entry in self.entries:
            yield from entry.tensors()


class KeepProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Keeps what products give inside the block.

    One that is changed in place is kept as it is then, if nothing has read it before: the convolution behind which an
    activation works in place. If something has, its value is lost, and the second run computes it.
    """

    def __init__(self, into: Products, random: RandomState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._into = into
        self._random = random
        self._of: dict[int, Product] = {}

    def __exit__(self, *details: Any) -> None:
        super().__exit__(*details)  # type: ignore[no-untyped-call]
        self._of.clear()
        for entry in self._into.entries:
            entry.detach()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, and notes what it does to what is kept."""
        kwargs = kwargs or {}
        self._note(func, args, kwargs)
        made = func(*args, **kwargs)
        if _is_kept(func):
            self._keep(func, args, kwargs, made)
        return made

    def _note(self, func: Any, args: Any, kwargs: Any) -> None:
        if not self._of or _is_view(func) or func._overloadpacket.__name__ in _OF_SHAPES:
            return
        written = _memory_written(func, args, kwargs)
        read = {_memory(tensor) for tensor in _tensors_read(func, args, kwargs)}
        for memory in read & self._of.keys():
            self._of[memory].is_read = True
        for memory in written & self._of.keys():
            entry = self._of[memory]
            if entry.is_read or not _can_skip(func):
                entry.outputs = ()
                self._of = {key: other for key, other in self._of.items() if other is not entry}
            else:
                entry.is_changed = True

    def _keep(self, func: Any, args: Any, kwargs: Any, made: Any) -> None:
        values, spec = tree_flatten(made)
        random = self._random.now() if torch.Tag.nondeterministic_seeded in func.tags else None
        entry = Product(func, _shapes(args, kwargs), tuple(values), spec, (), random)
        self._into.entries.append(entry)
        for tensor in entry.tensors():
            self._of[_memory(tensor)] = entry


class UseProducts(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Gives what products gave in the first run, in order, instead of running them. Autograd records them all the same.

    Raises:
        RuntimeError: the layers do not call the same products as the first time.
    """

    def __init__(self, kept: Products, random: RandomState) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._kept = kept
        self._random = random
        # a weak reference also holds the address, so that no memory made later has it
        self._changed: dict[int, StorageWeakRef] = {}

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        super().__exit__(kind, error, trace)  # type: ignore[no-untyped-call]
        if kind is None and self._kept.entries:
            raise RuntimeError(f"{_OTHERWISE}: {len(self._kept.entries)} products fewer")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run an operator, unless what it does is kept."""
        kwargs = kwargs or {}
        if _is_kept(func):
            entry = self._next(func, args, kwargs)
            if not entry.is_whole:
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

    def _next(self, func: Any, args: Any, kwargs: Any) -> Product:
        if not self._kept.entries:
            raise RuntimeError(f"{_OTHERWISE}: {func} is one product more")
        entry = self._kept.entries.popleft()
        shapes = _shapes(args, kwargs)
        if entry.func is not func or entry.shapes != shapes:
            was = f"{entry.func} of {[tuple(shape) for shape in entry.shapes]}"
            raise RuntimeError(f"{_OTHERWISE}: {func} of {[tuple(shape) for shape in shapes]}, was {was}")
        return entry


_OTHERWISE = "the forward that is run again does not call what it called the first time"


@cache
def _is_kept(func: Any) -> bool:
    return is_product(func) and not _written(func)


def _memory(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _shapes(args: Any, kwargs: Any) -> tuple[torch.Size, ...]:
    return tuple(value.shape for value in tree_flatten((args, kwargs))[0] if isinstance(value, Tensor))


@cache
def _written(func: Any) -> tuple[tuple[int, str], ...]:
    """Return the place and name of the arguments that an operator writes to."""
    return tuple(
        (place, argument.name)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def _is_view(func: Any) -> bool:
    """Return whether an operator reads nothing, but names the memory of an argument anew."""
    aliases = [argument.alias_info for argument in func._schema.arguments]
    return any(alias is not None and not alias.is_write for alias in aliases) and not _written(func)


@cache
def _can_skip(func: Any) -> bool:
    """Return whether all that an operator does is to change the values of one tensor, which it gives back."""
    is_alone = len(_written(func)) == 1 and len(func._schema.returns) == 1
    returned = func._schema.returns[0].alias_info if is_alone else None
    tags = (torch.Tag.inplace_view, torch.Tag.nondeterministic_seeded)
    return returned is not None and returned.is_write and not any(tag in func.tags for tag in tags)


def _targets(func: Any, args: Any, kwargs: Any) -> list[Any]:
    return [args[place] if place < len(args) else kwargs.get(name) for place, name in _written(func)]


def _memory_written(func: Any, args: Any, kwargs: Any) -> set[int]:
    found = tree_flatten(_targets(func, args, kwargs))[0]
    return {_memory(value) for value in found if isinstance(value, Tensor)}


def _tensors_read(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    places = {place for place, _ in _written(func)}
    names = {name for _, name in _written(func)}
    given = [value for place, value in enumerate(args) if place not in places]
    named = [value for name, value in kwargs.items() if name not in names]
    return [value for value in tree_flatten((given, named))[0] if isinstance(value, Tensor)]

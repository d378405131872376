"""Live bytes: the memory that tensors made since a moment hold, now and at most.

`torch.distributed._tools.mem_tracker.MemTracker` counts the same storages and return a whole model's peak (`fake.py`
prints it). For one layer's forward and backward it is too coarse: it has one peak for its lifetime, hooks itself onto
the parameters, and counts a gradient that autograd adds in place as a second tensor. The last is so because autograd's
engine adds two gradients of one tensor out of place as soon as any dispatch mode is on, and for fake tensors always.
Here such a sum takes the place of the gradient that the engine alone holds, as it does in a run.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from gems.profile.profilers.kernel_workspaces import Workspace

_ADD = torch.ops.aten.add.Tensor
Uses = tuple[int, int]


def storage_of(tensor: Tensor) -> int:
    """Return an ID of a tensor's memory, fake or real, valid while the memory is in use."""
    return int(tensor.untyped_storage()._cdata)


def unique_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, a storage that several share counted once."""
    return sum({storage_of(tensor): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


def tensors_in(result: Any) -> Iterator[Tensor]:
    """Yield the tensors in what an operation takes or returns."""
    if isinstance(result, Tensor):
        yield result
    elif isinstance(result, (tuple, list)):
        for item in result:
            yield from tensors_in(item)


class LiveBytes(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts the storages that operations make inside a `with` block, until they are freed.

    The memory of `given` is not counted. What a kernel allocates and frees within itself is not seen: `workspace` tells
    it, where it is known.
    """

    def __init__(self, given: Iterable[Tensor] = (), workspace: Workspace | None = None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._uses_of_engine = _uses_of_engine()
        self.live_bytes = 0
        self.peak_bytes = 0
        self._workspace = workspace
        self._given = {storage_of(tensor) for tensor in given}
        self._counted: dict[int, int] = {}
        self._references: dict[int, weakref.ref[Any]] = {}

    def restart(self) -> int:
        """Start a new peak from what is live, and return that."""
        self.peak_bytes = self.live_bytes
        return self.live_bytes

    def count(self, tensor: Tensor) -> None:
        """Count the memory of a tensor that no operation seen here has made."""
        storage = tensor.untyped_storage()
        key = int(storage._cdata)
        if key in self._given:
            return
        num_bytes = int(storage.nbytes())
        if key not in self._counted:
            self._references[key] = weakref.ref(storage, lambda _: self._free(key))
        self.live_bytes += num_bytes - self._counted.get(key, 0)
        self._counted[key] = num_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _ADD and isinstance(args[0], Tensor) and _is_replaced(args[0], result, self._uses_of_engine):
            key = storage_of(args[0])
            self.live_bytes -= self._counted.get(key, 0)
            if key in self._counted:
                self._counted[key] = 0
        for tensor in tensors_in(result):
            self.count(tensor)
        within = self._workspace(func, args) if self._workspace is not None else 0
        self.peak_bytes = max(self.peak_bytes, self.live_bytes + within)
        return result

    def _free(self, key: int) -> None:
        self.live_bytes -= self._counted.pop(key, 0)
        self._references.pop(key, None)


def _is_replaced(first: Tensor, result: Tensor, uses_of_engine: Uses) -> bool:
    """Whether autograd's engine would add to `first` in place: it alone holds it, and it has no gaps."""
    return (
        torch._C._current_autograd_node() is not None
        and not torch.is_grad_enabled()
        and _uses(first) == uses_of_engine
        and first.shape == result.shape
        and _is_dense(first)
    )


def _uses(tensor: Tensor) -> Uses:
    storage = tensor.untyped_storage()
    return int(tensor._use_count()), int(torch._C._storage_Use_Count(storage._cdata))  # type: ignore[attr-defined]


def _is_dense(tensor: Tensor) -> bool:
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1 and stride != expected:
            return False
        expected *= size
    return True


class _UsesInSum(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes how often the first operand of a sum is held."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[Uses] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is _ADD:
            self.found.append(_uses(args[0]))
        return result


@cache
def _uses_of_engine() -> Uses:
    """Return the reference counts of a gradient that the engine alone holds, as seen in a mode."""
    with _disable_current_modes(), torch.enable_grad():
        x = torch.zeros(1, requires_grad=True).view(1)
        y = torch.sin(x) + torch.cos(x)
        uses = _UsesInSum()
        with uses:
            torch.autograd.backward([y], [torch.zeros(1)])
    return uses.found[0]

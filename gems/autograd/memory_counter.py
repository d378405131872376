"""Bytes that a rank holds on its device, and the storages behind tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class MemoryCounter:
    """Bytes held on a device: counted on a CPU, asked of torch's allocator on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counted_bytes = 0

    def count_bytes(self, num_bytes: int) -> None:
        """Count bytes that were allocated (above 0) or freed (below 0)."""
        self._counted_bytes += num_bytes

    @property
    def held_bytes(self) -> int:
        """Device bytes in use by tensors."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return self._counted_bytes


class MemoryCategory:
    """Bytes of one kind, held now and at most; passed on to the rank's total. Counted on a GPU too."""

    def __init__(self, total: Callable[[int], None]) -> None:
        self._total = total
        self.held_bytes = 0
        self.peak_bytes = 0

    def count_bytes(self, num_bytes: int) -> None:
        """Count bytes that were allocated (above 0) or freed (below 0)."""
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._total(num_bytes)

    def set_bytes(self, held_bytes: int) -> None:
        """Replace the bytes held now."""
        self.count_bytes(held_bytes - self.held_bytes)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each storage counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def storage_addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the storages of tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def new_bytes(tensors: Iterable[Tensor], known: set[int]) -> int:
    """Return the bytes of the storages of tensors, without those whose addresses are in `known`."""
    return tensor_bytes(tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in known)


def check_unchanged(tensor: Tensor, version: int, what: str) -> Tensor:
    """Return the tensor.

    Raises:
        RuntimeError: it was changed in place since it had that version.
    """
    if tensor._version != version:
        raise RuntimeError(
            f"{what}: a tensor of shape {tuple(tensor.shape)} that backward needs was changed in place "
            f"(version {tensor._version}, expected {version})"
        )
    return tensor


class StashMeter:
    """Measure what autograd saves inside a `with` block: each storage once, without those of `known`."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = storage_addresses(known)
        self._saved: dict[int, int] = {}
        self._hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack)

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._saved[storage.data_ptr()] = storage.nbytes()
        return tensor, tensor._version

    def __enter__(self) -> StashMeter:
        self._hooks.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._hooks.__exit__(*details)  # type: ignore[arg-type]

    @property
    def saved_bytes(self) -> int:
        """Bytes of the storages saved so far."""
        return sum(self._saved.values())


def _unpack(packed: tuple[Tensor, int]) -> Tensor:
    # saved-tensor hooks switch off autograd's own check for changes in place
    return check_unchanged(*packed, "forward")

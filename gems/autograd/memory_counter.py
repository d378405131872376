"""The ledger: the bytes that a rank holds on its device, counted where they come and go."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class Ledger:
    """Bytes held now and at most. On a GPU torch's allocator is asked instead of counting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counted_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Count bytes that came (above 0) or went (below 0)."""
        self._counted_bytes += num_bytes

    @property
    def held_bytes(self) -> int:
        """Device bytes in use by tensors."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return self._counted_bytes


class Share:
    """One kind of what a ledger counts, by itself: bytes held now and at most. Passes on what it counts.

    On a GPU, where the ledger asks the allocator, a share is still counted.
    """

    def __init__(self, whole: Callable[[int], None]) -> None:
        self._whole = whole
        self.held_bytes = 0
        self.peak_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Count bytes that came (above 0) or went (below 0)."""
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)
        self._whole(num_bytes)


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, a storage that several share counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


def storages_of(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the memory that tensors lie in."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def new_bytes(tensors: Iterable[Tensor], known: set[int]) -> int:
    """Return the bytes of tensors, each storage once, without the storages in `known`."""
    return tensor_bytes(tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in known)


def check_unchanged(tensor: Tensor, version: int, what: str) -> Tensor:
    """Return the tensor back.

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
    """Measures what autograd saves inside a `with` block: unique storages, without those named as not new.

    A hook on saved tensors switches autograd's check for changes in place off, so the check is made here.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = storages_of(known)
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


def _unpack(kept: tuple[Tensor, int]) -> Tensor:
    return check_unchanged(*kept, "forward")

"""The ledger: the bytes that a rank holds on its device, counted where they come and go."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager

import torch
from torch import Tensor


class Ledger:
    """Bytes held now and at most. On a GPU torch's allocator is asked instead of counting."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._counted_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Counts bytes that came (above 0) or went (below 0)."""
        self._counted_bytes += num_bytes

    @property
    def held_bytes(self) -> int:
        """Device bytes in use by tensors."""
        if self._device.type == "cuda":
            return torch.cuda.memory_allocated(self._device)
        return self._counted_bytes


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Gives the bytes of tensors, a storage that several share counted once."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class StashMeter:
    """Measures what autograd saves inside a `with` block: unique storages, without those named as not new."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        self._known = {tensor.untyped_storage().data_ptr() for tensor in known}
        self._saved: dict[int, int] = {}
        self._hooks: AbstractContextManager[None] = torch.autograd.graph.saved_tensors_hooks(
            self._pack, lambda kept: kept
        )

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    def __enter__(self) -> StashMeter:
        self._hooks.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._hooks.__exit__(*details)  # type: ignore[arg-type]

    @property
    def saved_bytes(self) -> int:
        """Bytes of the storages saved so far."""
        return sum(self._saved.values())

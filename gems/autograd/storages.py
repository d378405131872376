"""The storages behind tensors: their bytes, their addresses, and changes in place."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import cache
from typing import Self

import torch
from torch import Tensor, UntypedStorage


def storage_sizes(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the bytes of the storages of tensors by address."""
    return {
        tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors
    }


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of the storages of tensors, each storage counted once."""
    return sum(storage_sizes(tensors).values())


def storage_addresses(tensors: Iterable[Tensor]) -> set[int]:
    """Return the addresses of the storages of tensors."""
    return {tensor.untyped_storage().data_ptr() for tensor in tensors}


def new_bytes(tensors: Iterable[Tensor], known: set[int]) -> int:
    """Return the bytes of the storages of tensors, without those whose addresses are in `known`."""
    return tensor_bytes(
        tensor for tensor in tensors if tensor.untyped_storage().data_ptr() not in known
    )


def check_unchanged(tensor: Tensor, version: int, what: str) -> Tensor:
    """Return the tensor if it has not changed since it had this version.

    Raises:
        RuntimeError: It was changed in place.
    """
    if tensor._version != version:
        raise RuntimeError(
            f"{what}: a tensor of shape {tuple(tensor.shape)} that backward needs was changed in"
            f" place (version {tensor._version}, expected {version})"
        )
    return tensor


@cache
def _empty(dtype: torch.dtype, device: torch.device) -> Tensor:
    return torch.empty(0, dtype=dtype, device=device)


def tensor_over(
    storage: UntypedStorage,
    dtype: torch.dtype,
    offset: int,
    size: Sequence[int],
    stride: Sequence[int],
) -> Tensor:
    """Return a new tensor of version 0 over a storage."""
    # a tensor's `data` may be set to other memory, and costs less than an empty tensor
    return _empty(dtype, storage.device).data.set_(storage, offset, size, stride).data


class StashMeter(torch.autograd.graph.saved_tensors_hooks):
    """Measure the bytes that autograd saves in a `with` block, except the storages of `known`.

    Attributes:
        known: The addresses of the storages of `known`.
        saved: The bytes of each other storage, by address.
        held: The saved tensors, if the meter `holds` them. Clear the list to free them: the meter
            refers to itself.
    """

    def __init__(self, known: Iterable[Tensor], holds: bool = False) -> None:
        self.known = storage_addresses(known)
        self.saved: dict[int, int] = {}
        self.held: list[Tensor] = []
        self._holds = holds
        # saved-tensor hooks switch off autograd's own check for changes in place
        super().__init__(
            self._pack, lambda packed: check_unchanged(packed[0], packed[1], "forward")
        )

    def _pack(self, tensor: Tensor) -> tuple[Tensor, int]:
        # tangents in forward mode may be zeros without memory
        if not tensor._is_zerotensor():
            storage = tensor.untyped_storage()
            if storage.data_ptr() not in self.known:
                self.saved[storage.data_ptr()] = storage.nbytes()
                if self._holds:
                    self.held.append(tensor)
        return tensor, tensor._version

    def __enter__(self) -> Self:  # type: ignore[override]
        super().__enter__()
        return self

    @property
    def saved_bytes(self) -> int:
        """Bytes of the storages saved so far."""
        return sum(self.saved.values())

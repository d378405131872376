"""Saved storages: what autograd has of a tensor while its memory is on the device, in host memory, or on its way."""

from __future__ import annotations

import weakref
from collections.abc import Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from gems.autograd.memory_counter import check_unchanged
from gems.engine.activation_store.copies import Copy

_NOBODY_S = -1  # a version that no tensor has


class Passed:
    """A tensor that is not the store's to move (a parameter, a received tensor): autograd keeps it as it is."""

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor.detach()  # with its graph it would hold the very node that saves it
        self.version = tensor._version

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place since it was saved."""
        return self.tensor._version != self.version

    def read(self) -> Tensor:
        """Return the tensor.

        Raises:
            RuntimeError: it was changed in place.
        """
        return check_unchanged(self.tensor, self.version, "forward")


class Handle:
    """What a node of autograd's graph keeps in place of a tensor: which part of which storage it is.

    While the storage is on the device, `tensor` is a view of it; so the graph owns the memory, and it is free as soon
    as the last node that saved it has run.
    """

    __slots__ = ("__weakref__", "_was_changed", "dtype", "offset", "size", "storage", "stride", "tensor", "version")

    def __init__(self, tensor: Tensor, storage: SavedStorage) -> None:
        self.storage = storage
        self.tensor: Tensor | None = tensor.detach()  # it shares the version, and not the graph
        self.version = tensor._version
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()
        self._was_changed = False

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place since it was saved."""
        return self._was_changed or (self.tensor is not None and self.tensor._version != self.version)

    def let_go(self) -> None:
        """Drop the memory, and remembers whether the tensor was changed until now."""
        self._was_changed = self.is_changed
        self.tensor = None

    def rebuild(self, storage: UntypedStorage) -> None:
        """Make the tensor again over a storage with the same bytes."""
        if self.tensor is None:
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            made = empty.set_(storage, self.offset, self.size, self.stride).data  # of version 0
            # what has the version noted by itself (a split layer) finds the same again
            for _ in range(self.version):
                torch.autograd.graph.increment_version(made)
            self.tensor = made

    def read(self) -> Tensor:
        """Return the tensor, which must be on the device.

        Raises:
            RuntimeError: it was changed in place.
        """
        assert self.tensor is not None
        if self._was_changed:
            raise RuntimeError(
                f"forward: a tensor of shape {tuple(self.size)} that backward needs was changed in place before its "
                "memory was copied to the host"
            )
        return check_unchanged(self.tensor, self.version, "forward")


class SavedStorage:
    """A storage that a micro-batch has saved, in one version; `number` tells it from all others of that micro-batch.

    `buffer` is its one copy in host memory, `coming` the copy back. `is_counted` says that it is held on the device.
    A weak reference keeps the address from being used again, as long as a tensor in flight may name the storage.
    """

    __slots__ = ("_handles", "_weak", "buffer", "coming", "copied_version", "is_counted", "num_bytes", "number")

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number
        self.num_bytes = num_bytes
        self.buffer: Tensor | None = None
        self.coming: Copy | None = None
        self.is_counted = False
        self.copied_version: int | None = None
        self._handles: list[weakref.ref[Handle]] = []
        self._weak: dict[int, StorageWeakRef] = {}

    @property
    def addresses(self) -> Iterator[int]:
        """What names the memory it lies or lay in."""
        return iter(self._weak)

    def name(self, memory: UntypedStorage) -> int:
        """Record a memory that it lies in, and gives what names that one and no other."""
        address = int(memory._cdata)
        if address not in self._weak:
            self._weak[address] = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
        return address

    def handle(self, tensor: Tensor, is_on_device: bool) -> Handle:
        """Make a handle for a tensor that lies in it; one that has left does not hold the tensor's memory."""
        made = Handle(tensor, self)
        if not is_on_device:
            made.let_go()
        self._handles.append(weakref.ref(made))
        return made

    def handles(self) -> Iterator[Handle]:
        """Yield those that somebody still has."""
        for reference in self._handles:
            handle = reference()
            if handle is not None:
                yield handle

    def memory(self) -> UntypedStorage | None:
        """Return the memory that it lies in; None where it has none and nobody needs it any more.

        A tensor in flight may still have it though no node of the graph does, and be saved again.
        """
        alive = (torch.UntypedStorage._new_with_weak_ptr(weak.cdata) for weak in self._weak.values())
        return next((memory for memory in alive if memory is not None), None)

    def has_changed_since_copy(self, tensor: Tensor) -> bool:
        """Whether a tensor in it has another version than the copy in host memory."""
        return self.copied_version is not None and tensor._version != self.copied_version

    def note_copied(self) -> None:
        """Record which version the copy in host memory has."""
        versions = [handle.tensor._version for handle in self.handles() if handle.tensor is not None]
        self.copied_version = max(versions, default=_NOBODY_S)

    def let_go(self) -> None:
        """Drop the memory on the device."""
        for handle in self.handles():
            handle.let_go()

    def rebuild(self, memory: UntypedStorage) -> None:
        """Put the memory, which holds the same bytes, under all its tensors."""
        for handle in self.handles():
            handle.rebuild(memory)

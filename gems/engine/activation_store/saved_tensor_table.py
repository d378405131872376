"""Tensors that autograd has saved for one micro-batch of a stage, by storage and version."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from gems.autograd.memory_counter import check_unchanged, storage_addresses
from gems.engine.activation_store.copies import Copy
from gems.memory.residency import Key, Residency

_NO_VERSION = -1


class UnmanagedTensor:
    """A saved tensor whose memory the store does not move: a parameter, or an input of the stage."""

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


class ManagedTensor:
    """What a node of autograd's graph keeps in place of a tensor: a view of a storage that may leave the device."""

    __slots__ = ("__weakref__", "_was_changed", "dtype", "offset", "size", "storage", "stride", "tensor", "version")

    def __init__(self, tensor: Tensor, storage: SavedStorage) -> None:
        self.storage = storage
        # Shares the version but not the graph. Only handles own the memory, so it is freed with the last node.
        self.tensor: Tensor | None = tensor.detach()
        self.version = tensor._version
        self.dtype, self.size, self.stride = tensor.dtype, tensor.size(), tensor.stride()
        self.offset = tensor.storage_offset()
        self._was_changed = False

    @property
    def is_changed(self) -> bool:
        """Whether it was changed in place since it was saved."""
        return self._was_changed or (self.tensor is not None and self.tensor._version != self.version)

    def drop_memory(self) -> None:
        """Drop the device memory, and remember whether the tensor was changed until now."""
        self._was_changed = self.is_changed
        self.tensor = None

    def rebuild(self, storage: UntypedStorage) -> None:
        """Make the tensor again over a storage with the same bytes."""
        if self.tensor is None:
            empty = torch.empty(0, dtype=self.dtype, device=storage.device)
            made = empty.set_(storage, self.offset, self.size, self.stride).data  # of version 0
            # split layers record versions themselves, and expect the same again
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
    """A storage that a micro-batch has saved, in one version, with its one copy in host memory (`buffer`)."""

    __slots__ = ("_tensors", "_weak", "buffer", "coming", "copied_version", "is_counted", "num_bytes", "number")

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number  # among the storages of the micro-batch
        self.num_bytes = num_bytes
        self.buffer: Tensor | None = None
        self.coming: Copy | None = None  # the copy back to the device
        self.is_counted = False  # as held on the device
        self.copied_version: int | None = None
        self._tensors: list[weakref.ref[ManagedTensor]] = []
        # A weak reference keeps the address from being reused while a tensor in flight may still have the storage.
        self._weak: dict[int, StorageWeakRef] = {}

    @property
    def addresses(self) -> Iterator[int]:
        """Addresses of the storage objects that it is or was in."""
        return iter(self._weak)

    def add_memory(self, memory: UntypedStorage) -> int:
        """Record memory that it is in, and return its unique address."""
        address = int(memory._cdata)
        if address not in self._weak:
            self._weak[address] = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
        return address

    def manage(self, tensor: Tensor, is_on_device: bool) -> ManagedTensor:
        """Return the managed form of a tensor in this storage, without memory unless `is_on_device`."""
        made = ManagedTensor(tensor, self)
        if not is_on_device:
            made.drop_memory()
        self._tensors.append(weakref.ref(made))
        return made

    def tensors(self) -> Iterator[ManagedTensor]:
        """Yield the managed tensors that are still in use."""
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None:
                yield tensor

    def memory(self) -> UntypedStorage | None:
        """Return its device memory; None if it has left and no tensor in flight has it."""
        alive = (torch.UntypedStorage._new_with_weak_ptr(weak.cdata) for weak in self._weak.values())
        return next((memory for memory in alive if memory is not None), None)

    def has_changed_since_copy(self, tensor: Tensor) -> bool:
        """Return whether a tensor in it has another version than the copy in host memory."""
        return self.copied_version is not None and tensor._version != self.copied_version

    def record_copied_version(self) -> None:
        """Record which version is copied to host memory."""
        versions = [managed.tensor._version for managed in self.tensors() if managed.tensor is not None]
        self.copied_version = max(versions, default=_NO_VERSION)

    def drop_memory(self) -> None:
        """Drop the device memory of all its tensors."""
        for managed in self.tensors():
            managed.drop_memory()

    def rebuild(self, memory: UntypedStorage) -> None:
        """Make all its tensors again over memory with the same bytes."""
        for managed in self.tensors():
            managed.rebuild(memory)


class SavedTensorTable:
    """The saved storages of a micro-batch in one stage and direction, by the memory that they are in."""

    def __init__(self, segments: Iterable[int], offloaded: Collection[int], given: Iterable[Tensor]) -> None:
        """Begin empty.

        Args:
            segments: those of the stage.
            offloaded: those of them that have an OFFLOAD.
            given: inputs of the stage, which are counted elsewhere.
        """
        self.residency = Residency(offloaded)
        self.open = set(segments)  # whose backward has not ended; `~segment` stands for weight gradients of one
        self.leaving: dict[int, Copy] = {}
        self.coming: dict[int, Copy] = {}
        self.for_weights: set[SavedStorage] = set()  # that weight gradients will read
        self._given = storage_addresses(given)
        self._storages: dict[Key, SavedStorage] = {}
        self._by_address: dict[int, SavedStorage] = {}
        self._outputs: dict[int, set[int]] = {}
        self._num_saved = 0

    @property
    def storages(self) -> list[SavedStorage]:
        """All that is saved and still needed."""
        return list(self._storages.values())

    def select(self, numbers: Iterable[Key]) -> list[SavedStorage]:
        """Return storages by their numbers."""
        return [self._storages[number] for number in numbers]

    def is_given(self, memory: UntypedStorage) -> bool:
        """Return whether memory is that of an input of the stage."""
        return memory.data_ptr() in self._given

    def find(self, memory: UntypedStorage) -> SavedStorage | None:
        """Return the saved storage that is, or was, in some memory."""
        return self._by_address.get(memory._cdata)

    def save(self, tensor: Tensor, segment: int, min_bytes: int) -> tuple[SavedStorage, bool, bool]:
        """Record that a segment saves a tensor.

        Returns:
            The storage, whether it is a new one, and whether its memory is now held and was not before.
        """
        memory = tensor.untyped_storage()
        saved = self.find(memory)
        is_new = saved is None or saved.has_changed_since_copy(tensor)  # a changed one needs a copy of its own
        if saved is None or is_new:
            saved = self._storages[self._num_saved] = SavedStorage(self._num_saved, memory.nbytes())
            self._num_saved += 1
        self.add_memory(saved, memory)
        is_movable = saved.num_bytes >= min_bytes and not tensor.is_conj() and not tensor.is_neg()
        is_held = self.residency.save(saved.number, saved.num_bytes, segment, is_movable)
        return saved, is_new, is_held

    def add_memory(self, saved: SavedStorage, memory: UntypedStorage) -> None:
        """Record the memory that a storage is in."""
        self._by_address[saved.add_memory(memory)] = saved

    def record_outputs(self, segment: int, outputs: Iterable[Tensor]) -> None:
        """Record the outputs of a segment, which stay in use for a while."""
        found = (self.find(tensor.untyped_storage()) for tensor in outputs)
        self._outputs[segment] = {saved.number for saved in found if saved is not None}

    def offload(self, segment: int) -> list[SavedStorage]:
        """Return the storages that the OFFLOAD of a segment copies."""
        return self.select(self.residency.offload(segment, self._outputs.get(segment, set())))

    def end_backward(self, segment: int) -> list[SavedStorage]:
        """Return and forget the storages that nothing needs after the backward of a segment."""
        gone = [self._storages.pop(number) for number in self.residency.done(segment)]
        for saved in gone:
            for address in saved.addresses:
                if self._by_address.get(address) is saved:
                    del self._by_address[address]
        self.open.discard(segment)
        return gone

    def unneeded_on_host(self) -> list[SavedStorage]:
        """Return storages whose host copy is not read again: weight gradients read them on the device."""
        left = [saved for saved in self.for_weights if saved.buffer is not None and saved.number in self._storages]
        return [saved for saved in left if not self.residency.states[saved.number].on_host]


def is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Return whether a tensor is a strided view of bytes on the device and nothing else."""
    is_dense = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_dense and tensor.device == device and tensor.untyped_storage().nbytes() > 0

"""Tensors that autograd has saved for one micro-batch of a stage, by storage and version."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, UntypedStorage
from torch.multiprocessing.reductions import StorageWeakRef

from gems.autograd.storages import check_unchanged, storage_addresses, tensor_over
from gems.autograd.torch_internals import storage_of_weak
from gems.engine.offload.host_copies import Copy
from gems.memory.residency import Key, Residency


class SavedTensor:
    """The stand-in for a tensor that a node of autograd's graph keeps.

    It is a view of a storage that may leave the device. `storage` is None if the store does not
    move its memory, because it belongs to a parameter or an input of the stage.
    """

    __slots__ = ("__weakref__", "_layout", "_was_changed", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor, storage: SavedStorage | None = None) -> None:
        self.storage = storage
        # A detached tensor shares the version but not the graph, which would hold the very node
        # that saves it. Only these tensors own the memory, so it is freed with the last node.
        self.tensor: Tensor | None = tensor.detach()
        self.version = tensor._version
        self._layout: tuple[torch.dtype, int, torch.Size, tuple[int, ...]] | None = None
        self._was_changed = False

    @property
    def is_changed(self) -> bool:
        """Return whether the tensor was changed in place after it was saved."""
        return self._was_changed or (
            self.tensor is not None and self.tensor._version != self.version
        )

    def drop_memory(self) -> None:
        """Drop the device memory, and remember whether the tensor was changed before."""
        if self.tensor is not None:
            self._was_changed = self.is_changed
            tensor = self.tensor
            self.tensor = None
            self._layout = (
                tensor.dtype,
                int(tensor.storage_offset()),
                tensor.size(),
                tensor.stride(),
            )

    def rebuild(self, storage: UntypedStorage) -> None:
        """Recreate the tensor over a storage with the same bytes."""
        if self.tensor is None:
            assert self._layout is not None
            made = tensor_over(storage, *self._layout)
            # split layers record versions themselves, and expect the same version again
            for _ in range(self.version):
                torch.autograd.graph.increment_version(made)
            self.tensor = made

    def read(self) -> Tensor:
        """Return the tensor, which must be on the device.

        Raises:
            RuntimeError: The tensor was changed in place.
        """
        assert self.tensor is not None
        if self._was_changed:
            raise RuntimeError(
                f"forward: a tensor of shape {tuple(self.tensor.shape)} that backward needs was"
                " changed in place before its memory was copied to the host"
            )
        return check_unchanged(self.tensor, self.version, "forward")


class SavedStorage:
    """One version of a storage that a micro-batch has saved, with its host copy in `buffer`."""

    __slots__ = (
        "_tensors",
        "_weak",
        "buffer",
        "coming",
        "copied_version",
        "is_fixed",
        "num_bytes",
        "number",
    )

    def __init__(self, number: int, num_bytes: int) -> None:
        self.number = number  # unique among the storages of the micro-batch
        self.num_bytes = num_bytes
        self.buffer: Tensor | None = None
        self.coming: Copy | None = None  # the copy back to the device
        self.copied_version: int | None = None
        self.is_fixed = False  # True if a tensor in it could not be rebuilt from its bytes
        self._tensors: list[weakref.ref[SavedTensor]] = []
        # A weak reference keeps the address from being reused while a tensor in flight may still
        # have the storage.
        self._weak: dict[int, StorageWeakRef] = {}

    @property
    def addresses(self) -> Iterator[int]:
        """Return the addresses of the storage objects that hold or have held this storage."""
        return iter(self._weak)

    def add_memory(self, memory: UntypedStorage) -> int:
        """Record a storage object that holds this storage, and return its unique address."""
        address = int(memory._cdata)
        if address not in self._weak:
            self._weak[address] = StorageWeakRef(memory)  # type: ignore[no-untyped-call]
        return address

    def save(self, tensor: Tensor, is_on_device: bool) -> SavedTensor:
        """Return the saved form of a tensor, without memory unless `is_on_device`."""
        made = SavedTensor(tensor, self)
        if not is_on_device:
            made.drop_memory()
        self._tensors.append(weakref.ref(made))
        return made

    def tensors(self) -> Iterator[SavedTensor]:
        """Yield the saved tensors that are still in use."""
        for reference in self._tensors:
            tensor = reference()
            if tensor is not None:
                yield tensor

    def memory(self) -> UntypedStorage | None:
        """Return the device memory, or None if it has left and no tensor in flight holds it."""
        alive = (storage_of_weak(weak.cdata) for weak in self._weak.values())
        return next((memory for memory in alive if memory is not None), None)

    def record_copied_version(self) -> None:
        """Record the version that is copied to host memory."""
        versions = [saved.tensor._version for saved in self.tensors() if saved.tensor is not None]
        self.copied_version = max(versions, default=-1)

    def drop_memory(self) -> None:
        """Drop the device memory of all tensors in this storage."""
        for saved in self.tensors():
            saved.drop_memory()

    def rebuild(self, memory: UntypedStorage) -> None:
        """Recreate all tensors of this storage over memory with the same bytes."""
        for saved in self.tensors():
            saved.rebuild(memory)


@dataclass(slots=True)
class Trail:
    """What is counted of a micro-batch on a stage, in the order of its actions.

    The bytes on the device at each count, the segments whose weight gradients read saved storages,
    and which outputs of a segment are saved.
    """

    device_bytes: list[int] = field(default_factory=list)
    saved_bytes: int = 0
    deferred: set[int] = field(default_factory=set)
    outputs: dict[int, list[bool]] = field(default_factory=dict)


class SavedTensorTable:
    """The saved storages of a micro-batch in one stage and direction, indexed by their memory.

    `segments` are the segments of the stage; those in `offloaded` have an OFFLOAD action. `given`
    are the inputs of the stage, which are counted elsewhere. If the table `takes_inputs`, they are
    saved here instead, like what the forward makes. With the `trail` of an equal micro-batch, of
    which nothing was moved, the table `is_measured`: it counts the same and holds nothing.
    """

    def __init__(
        self,
        segments: Iterable[int],
        offloaded: Collection[int],
        given: Sequence[Tensor],
        takes_inputs: bool = False,
        trail: Trail | None = None,
    ) -> None:
        self.is_measured = trail is not None
        self.trail = trail or Trail()
        self._counts = iter(self.trail.device_bytes)
        self.residency = Residency(offloaded)
        self.counted_bytes = 0  # the part of the rank's total that this micro-batch made
        # segments whose backward has not ended; `~segment` stands for its weight gradients
        self.open = self.trail.deferred.union(segments)
        self.leaving: dict[int, Copy] = {}
        self.coming: dict[int, Copy] = {}
        self.for_weights: set[SavedStorage] = set()  # read later by weight gradients
        self.input_bytes = sum(tensor.nbytes for tensor in given) if takes_inputs else None
        self.given = set() if takes_inputs else storage_addresses(given)  # addresses
        self._storages: dict[Key, SavedStorage] = {}
        self._by_address: dict[int, SavedStorage] = {}
        self._outputs: dict[int, set[int]] = {}
        self._num_saved = 0

    @property
    def storages(self) -> list[SavedStorage]:
        """Return all storages that are saved and still needed."""
        return list(self._storages.values())

    def select(self, numbers: Iterable[Key]) -> list[SavedStorage]:
        """Return storages by their numbers."""
        return [self._storages[number] for number in numbers]

    def is_counted(self, memory: UntypedStorage) -> bool:
        """Return whether memory is counted, as saved on the device or as an input of the stage."""
        saved = self.find(memory)
        is_saved = saved is not None and (
            self.is_measured or self.residency.is_on_device(saved.number)
        )
        return is_saved or memory.data_ptr() in self.given

    def count_device_bytes(self) -> None:
        """Take the bytes that are on the device now as counted."""
        if self.is_measured:
            self.counted_bytes = next(self._counts)
        else:
            self.counted_bytes = self.residency.device_bytes
            self.trail.device_bytes.append(self.counted_bytes)

    def find(self, memory: UntypedStorage) -> SavedStorage | None:
        """Return the saved storage that is or was in `memory`, if there is one."""
        return self._by_address.get(memory._cdata)

    def save(
        self, tensor: Tensor, memory: UntypedStorage, segment: int, is_movable: bool
    ) -> tuple[SavedStorage, bool, bool]:
        """Record that a segment saves a tensor, and whether this use lets its memory be moved.

        Returns:
            The storage, whether it is new, and whether its memory is held from now on but was not
                before.
        """
        saved = self.find(memory)
        # a tensor that has changed since its copy needs a copy of its own
        is_new = saved is None or saved.copied_version not in (None, tensor._version)
        if saved is None or is_new:
            saved = self._storages[self._num_saved] = SavedStorage(self._num_saved, memory.nbytes())
            self._num_saved += 1
            self.add_memory(saved, memory)
        saved.is_fixed |= tensor.is_conj() or tensor.is_neg()
        is_held = self.residency.save(
            saved.number, saved.num_bytes, segment, is_movable and not saved.is_fixed
        )
        return saved, is_new, is_held

    def add_memory(self, saved: SavedStorage, memory: UntypedStorage) -> None:
        """Record the memory that a storage is in."""
        self._by_address[saved.add_memory(memory)] = saved

    def record_outputs(self, segment: int, outputs: Iterable[Tensor]) -> None:
        """Record the outputs of a segment, which stay in use for a while."""
        if self.input_bytes is not None:
            return  # inputs that a stage passes on are sent, and counted there
        memories = [tensor.untyped_storage() for tensor in outputs]
        if self.is_measured:
            for memory, is_saved in zip(memories, self.trail.outputs[segment], strict=True):
                if is_saved:
                    self.add_memory(SavedStorage(0, memory.nbytes()), memory)
            return
        found = [self.find(memory) for memory in memories]
        self.trail.outputs[segment] = [saved is not None for saved in found]
        self._outputs[segment] = {saved.number for saved in found if saved is not None}

    def offload(self, segment: int) -> list[SavedStorage]:
        """Return the storages that the OFFLOAD of a segment copies."""
        return self.select(self.residency.offload(segment, self._outputs.get(segment, set())))

    def end_backward(self, segment: int) -> list[SavedStorage]:
        """Forget what nothing needs after the backward of a segment.

        Return the storages whose buffers are free: the forgotten ones, and those on the device that
        only weight gradients will read.
        """
        free = [self._storages.pop(number) for number in self.residency.done(segment)]
        for saved in free:
            for address in saved.addresses:
                if self._by_address.get(address) is saved:
                    del self._by_address[address]
        self.open.discard(segment)
        kept = (saved for saved in self.for_weights if saved.number in self._storages)
        return free + [saved for saved in kept if not self.residency.states[saved.number].on_host]

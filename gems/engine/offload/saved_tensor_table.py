"""Tensors that autograd has saved for one micro-batch of a stage, by storage and version."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor, UntypedStorage

from gems.autograd.storages import check_unchanged, storage_addresses, tensor_over
from gems.autograd.torch_internals import free_weak, storage_of_weak, weak_pointer
from gems.engine.offload.host_copies import Copy, as_bytes
from gems.memory.residency import Key, Residency

Layout = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]  # second: the offset
StayingTensor = tuple[Tensor, int]  # with its version; counted elsewhere, if at all
_LOST = -1  # version of a tensor that was changed before its memory was dropped


class SavedTensor:
    """The stand-in for a tensor that a node of autograd's graph keeps.

    It is a view of a storage that may leave the device. `storage` is None if the store does not
    move its memory, because it belongs to a parameter or an input of the stage.
    """

    __slots__ = ("__weakref__", "layout", "storage", "tensor", "version")

    def __init__(self, tensor: Tensor, storage: SavedStorage | None = None) -> None:
        self.storage = storage
        # A detached tensor shares the version but not the graph, which would hold the very node
        # that saves it. Only these tensors own the memory, so it is freed with the last node.
        self.tensor: Tensor | None = tensor.detach() if tensor.requires_grad else tensor
        self.version = tensor._version
        self.layout: Layout | None = None  # known once the tensor is copied, or has left

    @property
    def is_changed(self) -> bool:
        """Return whether the tensor was changed in place after it was saved."""
        return self.version == _LOST or (
            self.tensor is not None and self.tensor._version != self.version
        )

    def is_same(self, tensor: Tensor) -> bool:
        """Return whether a tensor of the same storage equals this one, which is on the device."""
        return (
            self.tensor is not None
            and self.version == tensor._version
            and _layout_of(self.tensor) == _layout_of(tensor)
        )

    def drop_memory(self) -> None:
        """Drop the device memory, and remember whether the tensor was changed before."""
        tensor = self.tensor
        if tensor is not None:
            if tensor._version != self.version:
                self.version = _LOST
            if self.layout is None:
                self.layout = _layout_of(tensor)
            self.tensor = None

    def rebuild(self, tensor: Tensor) -> None:
        """Take a tensor of version 0 with the same layout and bytes."""
        # split layers record versions themselves, and expect the same version again
        for _ in range(self.version):
            torch.autograd.graph.increment_version(tensor)
        self.tensor = tensor


Saved = SavedTensor | StayingTensor


def unchanged(tensor: Tensor, version: int) -> Tensor:
    """Return a saved tensor.

    Raises:
        RuntimeError: The tensor was changed in place after it was saved.
    """
    if version == _LOST:
        raise RuntimeError(
            f"forward: a tensor of shape {tuple(tensor.shape)} that backward needs was changed in"
            " place before its memory was copied to the host"
        )
    return check_unchanged(tensor, version, "forward")


def staying(tensor: Tensor) -> StayingTensor:
    """Return the saved form of a tensor that stays."""
    return tensor if tensor.is_leaf else tensor.detach(), tensor._version  # a leaf has no graph


def _layout_of(tensor: Tensor) -> Layout:
    return tensor.dtype, tensor.storage_offset(), tensor.size(), tensor.stride()  # type: ignore[return-value]


class SavedStorage:
    """One version of a storage that a micro-batch has saved.

    Its copy on the host is `on_host`. `addresses` are those of the storage objects that hold or
    have held it.
    """

    __slots__ = (
        "_tensors",
        "addresses",
        "coming",
        "copied_layout",
        "copied_version",
        "is_fixed",
        "is_on_device",
        "num_bytes",
        "number",
        "on_host",
    )

    def __init__(self, number: Key, memory: UntypedStorage) -> None:
        self.number = number  # unique among the storages of the micro-batch
        self.num_bytes = memory.nbytes()
        self.on_host: Tensor | None = None
        self.coming: Copy | None = None  # the copy back to the device
        self.copied_version: int | None = None
        self.is_fixed = False  # True if a tensor in it could not be rebuilt from its bytes
        self.is_on_device = True
        self.copied_layout: Layout | None = None  # of the saved tensor that `on_host` is a copy of
        self._tensors: list[weakref.ref[SavedTensor]] = []
        # A weak reference keeps the address from being reused while a tensor in flight may still
        # have the storage.
        self.addresses: list[int] = [weak_pointer(memory)]

    def __del__(self) -> None:
        for address in self.addresses:
            free_weak(address)

    def saved_last(self, tensor: Tensor) -> SavedTensor | None:
        """Return the tensor that was saved last if it equals `tensor`, and is on the device."""
        last = self._tensors[-1]() if self._tensors else None
        return last if last is not None and last.is_same(tensor) else None

    def save(self, tensor: Tensor) -> SavedTensor:
        """Return the saved form of a tensor, without memory if the storage has left."""
        saved = SavedTensor(tensor, self)
        if not self.is_on_device:
            saved.drop_memory()
        self._tensors.append(weakref.ref(saved))
        return saved

    def memory(self) -> UntypedStorage | None:
        """Return the device memory, or None if it has left and no tensor in flight holds it."""
        alive = map(storage_of_weak, self.addresses)
        return next((memory for memory in alive if memory is not None), None)

    def source(self) -> Tensor | None:
        """Return a tensor of all bytes on the device, or None if they are gone, and record it."""
        self.copied_version = -1
        whole = None
        for reference in self._tensors:
            saved = reference()
            if saved is None or saved.tensor is None:
                continue
            tensor = saved.tensor
            if tensor._version > self.copied_version:
                self.copied_version = tensor._version
            if (
                whole is None
                and tensor.nbytes == self.num_bytes
                and (tensor.is_contiguous() or torch.ops.aten.is_non_overlapping_and_dense(tensor))
            ):
                whole = tensor
                self.copied_layout = saved.layout = _layout_of(tensor)
        if whole is None:
            memory = self.memory()
            if memory is not None:
                whole = as_bytes(memory)
                self.copied_layout = _layout_of(whole)
        return whole

    def drop_memory(self) -> None:
        """Drop the device memory of all tensors in this storage."""
        self.is_on_device = False
        for reference in self._tensors:
            saved = reference()
            if saved is not None:
                saved.drop_memory()

    def rebuild(self, memory: UntypedStorage, copied: Tensor | None = None) -> None:
        """Recreate all tensors over memory with the same bytes, which `copied` has too."""
        self.is_on_device = True
        for reference in self._tensors:
            saved = reference()
            if saved is not None and saved.tensor is None:
                if copied is None or saved.layout is not self.copied_layout:
                    assert saved.layout is not None
                    saved.rebuild(tensor_over(memory, *saved.layout))
                else:
                    saved.rebuild(copied)


class Place(NamedTuple):
    """The storage in which a tensor was saved; `is_back` if it had left until then."""

    number: Key
    num_bytes: int
    is_back: bool


@dataclass(slots=True)
class Trail:
    """What a micro-batch on a stage saves, moves and counts, in the order of its actions.

    Attributes:
        device_bytes: The bytes on the device at each count.
        deferred: The segments whose weight gradients read saved storages.
        outputs: The storages of the outputs of a segment, if they are saved.
        moved: The storages that leave.
        saves: The places of the tensors that are saved together; None for those that stay.
        moves: The storages that each action copies, frees or forgets.
        is_complete: Whether all that was done is here.
    """

    device_bytes: list[int] = field(default_factory=list)
    saved_bytes: int = 0
    deferred: set[int] = field(default_factory=set)
    outputs: dict[int, list[Key | None]] = field(default_factory=dict)
    moved: set[Key] = field(default_factory=set)
    saves: list[list[Place | None]] = field(default_factory=list)
    moves: list[list[Key]] = field(default_factory=list)
    is_complete: bool = True

    def forget_unmoved(self) -> None:
        """Forget storages that stay; no place is left of tensors that all stay."""
        self.moves = [[key for key in keys if key in self.moved] for keys in self.moves]
        for number, places in enumerate(self.saves):
            moved = [place if place and place.number in self.moved else None for place in places]
            self.saves[number] = moved if any(moved) else []


class SavedTensorTable:
    """The saved storages of a micro-batch in one stage and direction, indexed by their memory.

    `segments` are the segments of the stage; those in `offloaded` have an OFFLOAD action. `given`
    are the inputs of the stage, which are counted elsewhere. If the table `takes_inputs`, they are
    saved here instead, like what the forward makes. With the `trail` of an equal micro-batch the
    table `is_measured`: it counts and moves the same, and holds only storages that leave.
    """

    def __init__(
        self,
        segments: Iterable[int],
        offloaded: Collection[int],
        inputs: Sequence[Tensor],
        takes_inputs: bool = False,
        trail: Trail | None = None,
    ) -> None:
        self.is_measured = trail is not None
        self.is_changed = False  # whether a tensor was saved that is not in the trail
        self.trail = trail or Trail()
        self._counts = iter(self.trail.device_bytes)
        self._saves = iter(self.trail.saves)
        self._moves = iter(self.trail.moves)
        self._places: Iterator[Place | None] = iter(())
        self.residency = Residency(offloaded)
        self.counted_bytes = 0  # the part of the rank's total that this micro-batch made
        # segments whose backward has not ended; `~segment` stands for its weight gradients
        self.open = self.trail.deferred.union(segments)
        self.leaving: dict[int, Copy] = {}
        self.coming: dict[int, Copy] = {}
        self.for_weights: set[SavedStorage] = set()  # read later by weight gradients
        self.input_bytes = sum(tensor.nbytes for tensor in inputs) if takes_inputs else None
        self.given = set() if takes_inputs else storage_addresses(inputs)  # addresses
        self._storages: dict[Key, SavedStorage] = {}
        self._by_address: dict[int, SavedStorage] = {}
        self._outputs: dict[int, set[Key]] = {}
        self._num_saved = 0

    @property
    def storages(self) -> list[SavedStorage]:
        """Return all storages that are saved and still needed."""
        return list(self._storages.values())

    def is_counted(self, memory: UntypedStorage) -> bool:
        """Return whether memory is counted, as saved on the device or as an input of the stage."""
        saved = self.find(memory)
        if saved is not None and saved.is_on_device:
            return True
        return memory.data_ptr() in self.given

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

    def begin_saves(self) -> bool:
        """Begin to save tensors; return whether any of them may leave."""
        if not self.is_measured:
            self.trail.saves.append([])
            return True
        places = next(self._saves)
        self._places = iter(places)
        return bool(places)

    def end_saves(self) -> None:
        """End what `begin_saves` began."""
        self.is_changed |= next(self._places, None) is not None

    def save(self, tensor: Tensor, segment: int, is_movable: bool) -> SavedTensor:
        """Save a tensor for a segment; say whether this use lets its memory be moved."""
        memory = tensor.untyped_storage()
        saved = self.find(memory)
        # a tensor that has changed since its copy needs a copy of its own
        is_new = saved is None or saved.copied_version not in (None, tensor._version)
        if saved is None or is_new:
            saved = self._add_storage(self._num_saved, memory)
            self._num_saved += 1
            self.trail.saved_bytes += saved.num_bytes
        saved.is_fixed |= tensor.is_conj() or tensor.is_neg()
        is_held = self.residency.save(
            saved.number, saved.num_bytes, segment, is_movable and not saved.is_fixed
        )
        is_back = is_held and not is_new
        if is_back:
            saved.rebuild(memory)
        self.trail.saves[-1].append(Place(saved.number, saved.num_bytes, is_back))
        last = None if saved.is_fixed else saved.saved_last(tensor)
        return last or saved.save(tensor)

    def save_unmanaged(self, tensor: Tensor) -> StayingTensor:
        """Save a tensor that is counted elsewhere, and stays."""
        self.trail.saves[-1].append(None)
        return staying(tensor)

    def save_again(self, tensor: Tensor, may_leave: bool | None = None) -> Saved:
        """Save a tensor as in the trail, which knows what may leave; one that is not there stays."""
        place = next(self._places, None)
        if place is None:
            return tensor if tensor.is_leaf else tensor.detach(), tensor._version
        if not (tensor.is_conj() or tensor.is_neg()):
            number, num_bytes, is_back = place
            saved = self._storages.get(number)
            memory = tensor.untyped_storage()
            if saved is None:
                if memory.nbytes() == num_bytes:
                    return self._add_storage(number, memory).save(tensor)
            elif saved.copied_version in (None, tensor._version) and self.find(memory) is saved:
                if is_back:
                    saved.rebuild(memory)
                return saved.saved_last(tensor) or saved.save(tensor)
        self.is_changed = True
        return staying(tensor)

    def _add_storage(self, number: Key, memory: UntypedStorage) -> SavedStorage:
        saved = self._storages[number] = SavedStorage(number, memory)
        self._by_address[saved.addresses[0]] = saved
        return saved

    def add_memory(self, saved: SavedStorage, memory: UntypedStorage) -> None:
        """Record the memory that a storage is in."""
        address = memory._cdata
        if address not in saved.addresses:
            saved.addresses.append(weak_pointer(memory))
        self._by_address[address] = saved

    def record_outputs(self, segment: int, outputs: Iterable[Tensor]) -> None:
        """Record the outputs of a segment, which stay in use for a while."""
        if self.input_bytes is not None:
            return  # inputs that a stage passes on are sent, and counted there
        memories = [tensor.untyped_storage() for tensor in outputs]
        if self.is_measured:
            for memory, number in zip(memories, self.trail.outputs[segment], strict=True):
                if number is not None and number not in self.trail.moved:
                    self.add_memory(SavedStorage(number, memory), memory)
            return
        storages = [self.find(memory) for memory in memories]
        numbers = self.trail.outputs[segment] = [storage and storage.number for storage in storages]
        self._outputs[segment] = {number for number in numbers if number is not None}

    def offload(self, segment: int) -> list[SavedStorage]:
        """Return the storages that the OFFLOAD of a segment copies."""
        outputs = self._outputs.get(segment, set())
        storages = self._moved_by(lambda: self.residency.offload(segment, outputs))
        self.trail.moved.update(saved.number for saved in storages)
        return storages

    def free(self, segment: int) -> list[SavedStorage]:
        """Return the storages whose device memory is free after the copy of a segment."""
        return self._moved_by(lambda: self.residency.free(segment))

    def prefetch(self, segment: int) -> list[SavedStorage]:
        """Return the storages that are copied back for the backward of a segment."""
        return self._moved_by(lambda: self.residency.prefetch(segment))

    def fetch(self, saved: SavedStorage) -> None:
        """Record that a storage is copied back before its PREFETCH."""
        self.trail.is_complete = False
        self.residency.fetch(saved.number)

    def end_backward(self, segment: int) -> list[SavedStorage]:
        """Forget what nothing needs after the backward of a segment.

        Return the storages whose buffers are free: the forgotten ones, and those on the device that
        only weight gradients will read.
        """
        free = self._moved_by(lambda: self.residency.done(segment))
        for saved in free:
            del self._storages[saved.number]
            for address in saved.addresses:
                if self._by_address.get(address) is saved:
                    del self._by_address[address]
        self.open.discard(segment)
        states = self.residency.states
        return free + self._moved_by(
            lambda: [
                saved.number
                for saved in self.for_weights
                if saved.number in states and not states[saved.number].on_host
            ]
        )

    def _moved_by(self, rule: Callable[[], list[Key]]) -> list[SavedStorage]:
        """Return the storages that a rule names, or named in the trail."""
        if self.is_measured:
            numbers = next(self._moves)
        else:
            numbers = rule()
            self.trail.moves.append(numbers)
        return [self._storages[number] for number in numbers if number in self._storages]

"""A shelf: what one micro-batch of a stage has saved, by storage and version."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import torch
from torch import Tensor, UntypedStorage

from gems.autograd.memory_counter import storages_of
from gems.engine.activation_store.copies import Copy
from gems.engine.activation_store.saved_storage import SavedStorage
from gems.memory.residency import Key, Residency


class Shelf:
    """The storages of a micro-batch in one stage and direction, found by the memory that they lie in.

    `open` are the segments whose backward has still to end; `~segment` stands for the weight gradients of one. `leaving`
    and `coming` are the copies of a segment, `for_weights` the storages that weight gradients will read.
    """

    def __init__(self, segments: Iterable[int], offloaded: Collection[int], given: Iterable[Tensor]) -> None:
        """Begin empty.

        Args:
            segments: those of the stage.
            offloaded: those of them whose storages leave the device.
            given: what the stage is given, which whoever gave it counts.
        """
        self.holdings = Residency(offloaded)
        self.open = set(segments)
        self.leaving: dict[int, Copy] = {}
        self.coming: dict[int, Copy] = {}
        self.for_weights: set[SavedStorage] = set()
        self._given = storages_of(given)
        self._storages: dict[Key, SavedStorage] = {}
        self._at: dict[int, SavedStorage] = {}
        self._outputs: dict[int, set[int]] = {}
        self._num_saved = 0

    @property
    def storages(self) -> list[SavedStorage]:
        """All that is saved and still needed."""
        return list(self._storages.values())

    def of(self, numbers: Iterable[Key]) -> list[SavedStorage]:
        """Return storages by their numbers."""
        return [self._storages[number] for number in numbers]

    def is_given(self, memory: UntypedStorage) -> bool:
        """Whether memory is what the stage was given."""
        return memory.data_ptr() in self._given

    def find(self, memory: UntypedStorage) -> SavedStorage | None:
        """Return the storage that lies, or lay, in a memory."""
        return self._at.get(memory._cdata)

    def note(self, tensor: Tensor, segment: int, least_bytes: int) -> tuple[SavedStorage, bool, bool]:
        """Record that a segment saves a tensor.

        One that was changed since its copy left is another storage, for that copy is not its own.

        Returns:
            The storage, whether it is a new one, and whether its memory is now held where it was not before.
        """
        memory = tensor.untyped_storage()
        saved = self.find(memory)
        is_new = saved is None or saved.has_changed_since_copy(tensor)
        if saved is None or is_new:
            saved = self._storages[self._num_saved] = SavedStorage(self._num_saved, memory.nbytes())
            self._num_saved += 1
        self.name(saved, memory)
        is_movable = saved.num_bytes >= least_bytes and not tensor.is_conj() and not tensor.is_neg()
        is_held = self.holdings.save(saved.number, saved.num_bytes, segment, is_movable)
        return saved, is_new, is_held

    def name(self, saved: SavedStorage, memory: UntypedStorage) -> None:
        """Record the memory that a storage lies in."""
        self._at[saved.name(memory)] = saved

    def note_outputs(self, segment: int, outputs: Iterable[Tensor]) -> None:
        """Record what a segment hands on."""
        found = (self.find(tensor.untyped_storage()) for tensor in outputs)
        self._outputs[segment] = {saved.number for saved in found if saved is not None}

    def offload(self, segment: int) -> list[SavedStorage]:
        """Return what the copy of a segment takes."""
        return self.of(self.holdings.offload(segment, self._outputs.get(segment, set())))

    def done(self, segment: int) -> list[SavedStorage]:
        """Return what nobody needs any more behind the backward of a segment, and forgets it."""
        gone = [self._storages.pop(number) for number in self.holdings.done(segment)]
        for saved in gone:
            for address in saved.addresses:
                if self._at.get(address) is saved:
                    del self._at[address]
        self.open.discard(segment)
        return gone

    def no_longer_on_host(self) -> list[SavedStorage]:
        """Return what has a copy in host memory that will not be read again: weight gradients read from the device."""
        left = [saved for saved in self.for_weights if saved.buffer is not None and saved.number in self._storages]
        return [saved for saved in left if not self.holdings[saved.number].on_host]


def is_plain(tensor: Tensor, device: torch.device) -> bool:
    """Whether a tensor is nothing but a view of bytes on the device."""
    is_dense = type(tensor) is Tensor and tensor.layout is torch.strided
    return is_dense and tensor.device == device and tensor.untyped_storage().nbytes() > 0


def pairs_of(storages: Sequence[SavedStorage]) -> list[tuple[Tensor, int]]:
    """Return the buffers in host memory of those that have one, with the bytes in them."""
    return [(saved.buffer, saved.num_bytes) for saved in storages if saved.buffer is not None]

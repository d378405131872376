"""The activation store: what autograd saves between forward and backward, on the device or in host memory."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor

from gems.autograd.memory_counter import Share, storages_of
from gems.engine.activation_store.copies import Copies, Copy
from gems.engine.activation_store.host_pool import HostPool
from gems.engine.activation_store.saved_storage import Handle, Passed, SavedStorage
from gems.engine.activation_store.saved_tensor_table import Shelf, is_plain, pairs_of
from gems.engine.supervision.recorder import COPY_IN, COPY_OUT, Recorder
from gems.schedule.action import Action, Kind
from gems.schedule.schedule import Schedule

Place = tuple[int, int, int]  # direction, stage, micro-batch
Kept = Handle | Passed


@dataclass(slots=True)
class Counters:
    """What has been saved and moved so far, in bytes: `saved_bytes` counts each storage once.

    `num_misses` counts storages that were read before their copy back was posted, and so were waited for at once.
    """

    saved_bytes: int = 0
    offloaded_bytes: int = 0
    prefetched_bytes: int = 0
    num_misses: int = 0


class ActivationStore:
    """Keeps what the forwards of segments save, by direction, stage and micro-batch, and moves it as the list says.

    `Residency` has the rules: each storage is counted once and moved once each way, however many tensors name it.
    Parameters, buffers and what a stage was given stay what they are. On a processor host memory is a second arena,
    and all else is the same. Backward hooks run on autograd's threads, so whatever changes something takes the lock.
    """

    def __init__(
        self,
        schedule: Schedule,
        copies: Copies,
        pool: HostPool,
        recorder: Recorder,
        device: torch.device,
        parameters: Iterable[Tensor] = (),
        least_bytes: int = 0,
    ) -> None:
        """Begin empty.

        Args:
            schedule: the lowered list; it says what leaves.
            copies: moves memory.
            pool: gives host memory.
            recorder: gets bytes and the spans of copies.
            device: tensors that lie elsewhere are left alone.
            parameters: of all stages on the rank, and their buffers.
            least_bytes: smaller storages stay on the device.
        """
        self.activations = Share(recorder.hold)
        self.on_host = Share(recorder.hold_on_host)
        self.counters = Counters()
        self._schedule = schedule
        self._copies, self._pool, self._recorder, self._device = copies, pool, recorder, device
        self._parameters = storages_of(parameters)
        self._least_bytes = least_bytes
        self._shelves: dict[Place, Shelf] = {}
        self._held_bytes = 0
        self._lock = threading.RLock()

    @property
    def num_in_flight(self) -> int:
        """Micro-batches of stages of which something is kept."""
        return len(self._shelves)

    def open(self, place: Place, given: Sequence[Tensor]) -> None:
        """Begin a micro-batch, with the tensors that its stage is given."""
        direction, stage, micro_batch = place
        segments = self._schedule.segments_of(stage)
        offloaded = [s for s in segments if self._schedule.has(Kind.OFFLOAD, stage, micro_batch, direction, s)]
        shelf = Shelf((s or 0 for s in segments), {s or 0 for s in offloaded}, given)
        with self._lock:
            self._shelves[place] = shelf

    def saving(self, place: Place, segment: int) -> AbstractContextManager[None]:
        """Keep here what autograd saves inside the block, for the backward of a segment."""
        shelf = self._shelves[place]
        return torch.autograd.graph.saved_tensors_hooks(lambda tensor: self._save(shelf, segment, tensor), self.read)

    def keep(self, place: Place, segment: int, tensor: Tensor) -> Kept:
        """Keep a tensor for the second run of a segment, as if autograd had saved it."""
        return self._save(self._shelves[place], segment, tensor)

    def read(self, kept: Kept) -> Tensor:
        """Return a kept tensor, on the device; may be called more than once.

        Raises:
            RuntimeError: it was changed in place meanwhile.
        """
        if isinstance(kept, Passed):
            return kept.read()
        with self._lock:
            if kept.tensor is None:
                self._fetch(kept.storage)
            self._wait_back(kept.storage)
            return kept.read()

    def is_unchanged(self, kept: Kept) -> bool:
        """Whether a kept tensor is what it was when it was kept."""
        return not kept.is_changed

    def note_outputs(self, place: Place, segment: int, outputs: Iterable[Tensor]) -> None:
        """Record what a segment hands on, which lives for a while whatever becomes of what is saved."""
        self._shelves[place].note_outputs(segment, outputs)

    def counts(self, place: Place, tensor: Tensor) -> bool:
        """Whether a tensor's memory is counted: as saved, or by who gave it to the stage."""
        shelf, memory = self._shelves.get(place), tensor.untyped_storage()
        saved = None if shelf is None else shelf.find(memory)
        return (saved is not None and saved.is_counted) or (shelf is not None and shelf.is_given(memory))

    def offload(self, action: Action) -> None:
        """Post the copy out of what leaves with a segment.

        Raises:
            DoesNotFitError: host memory has no room for it.
        """
        with self._lock:
            shelf, segment = self._of(action)
            pairs = []
            for saved in shelf.offload(segment):
                memory = saved.memory()
                if memory is not None:
                    saved.buffer = self._pool.take(saved.num_bytes)
                    self.on_host.hold(saved.num_bytes)
                    saved.note_copied()
                    pairs.append((memory, saved.buffer))
            copy = shelf.leaving[segment] = self._copies.out(pairs)
            self.counters.offloaded_bytes += copy.num_bytes
            self._recorder.stamped(action, COPY_OUT, copy.start, copy.end, copy.num_bytes)

    def free(self, action: Action) -> None:
        """Let compute wait until the copy of a segment has left; behind that its memory on the device is free."""
        with self._lock:
            self._free(*self._of(action))
            self._tell()

    def prefetch(self, action: Action) -> None:
        """Allocate what the backward of a segment reads and is not on the device, and posts its copy back."""
        with self._lock:
            shelf, segment = self._of(action)
            self._free(shelf, segment)
            copy = shelf.coming[segment] = self._bring(shelf, shelf.of(shelf.holdings.prefetch(segment)))
            self._tell()
            self._recorder.stamped(action, COPY_IN, copy.start, copy.end, copy.num_bytes)

    def await_copy(self, action: Action) -> None:
        """Let compute wait until the copy back of a segment has come."""
        with self._lock:
            shelf, segment = self._of(action)
            self._copies.wait(shelf.coming[segment])

    def free_copied(self) -> None:
        """Free the device memory of copies that have left, and for which there is no FREE in the list."""
        with self._lock:
            for (direction, stage, micro_batch), shelf in self._shelves.items():
                is_whole = self._schedule.num_segments[stage] is None
                for segment, copy in list(shelf.leaving.items()):
                    place = (stage, micro_batch, direction, None if is_whole else segment)
                    if not self._schedule.has(Kind.FREE, *place) and self._copies.is_over(copy):
                        self._free(shelf, segment)
            self._tell()

    def done(self, place: Place, segment: int, later: Iterable[Tensor] = ()) -> None:
        """End the backward of a segment; its weight gradients have still to read `later`."""
        with self._lock:
            shelf = self._shelves[place]
            for tensor in later:
                if self._is_ours(shelf, tensor):
                    shelf.for_weights.add(self._note(shelf, ~segment, tensor))
                    shelf.open.add(~segment)
            self._end(place, segment)
            self._tell()

    def done_weights(self, place: Place, segment: int) -> None:
        """End the weight gradients of a segment."""
        with self._lock:
            if place in self._shelves and ~segment in self._shelves[place].open:
                self._end(place, ~segment)
                self._tell()

    def forget(self) -> None:
        """Drop all that is kept, after a step that was broken off: host memory goes back to the pool."""
        with self._lock:
            self._copies.settle()
            for shelf in self._shelves.values():
                for saved in shelf.storages:
                    self._drop(saved)
                    saved.let_go()
            self._shelves.clear()
            self._tell()

    def _of(self, action: Action) -> tuple[Shelf, int]:
        assert action.micro_batch is not None
        return self._shelves[action.direction, action.stage, action.micro_batch], action.segment or 0

    def _is_ours(self, shelf: Shelf, tensor: Tensor) -> bool:
        if not is_plain(tensor, self._device):
            return False
        memory = tensor.untyped_storage()
        return memory.data_ptr() not in self._parameters and not shelf.is_given(memory)

    def _save(self, shelf: Shelf, segment: int, tensor: Tensor) -> Kept:
        with self._lock:
            if not self._is_ours(shelf, tensor):
                return Passed(tensor)
            saved = self._note(shelf, segment, tensor)
            self._tell()
            return saved.handle(tensor, saved.is_counted)

    def _note(self, shelf: Shelf, segment: int, tensor: Tensor) -> SavedStorage:
        saved, is_new, is_held = shelf.note(tensor, segment, self._least_bytes)
        if is_new:
            self.counters.saved_bytes += saved.num_bytes
        if is_held:
            self._count(saved, True)
            saved.rebuild(tensor.untyped_storage())
        return saved

    def _count(self, saved: SavedStorage, is_held: bool) -> None:
        if saved.is_counted != is_held:
            saved.is_counted = is_held
            self._held_bytes += saved.num_bytes if is_held else -saved.num_bytes

    def _tell(self) -> None:
        """Count the bytes held, at the end of whatever changes them."""
        self.activations.hold(self._held_bytes - self.activations.held_bytes)

    def _free(self, shelf: Shelf, segment: int) -> None:
        copy = shelf.leaving.pop(segment, None)
        if copy is not None:
            self._copies.wait(copy)
            for saved in shelf.of(shelf.holdings.free(segment)):
                saved.let_go()
                self._count(saved, False)

    def _bring(self, shelf: Shelf, back: Sequence[SavedStorage]) -> Copy:
        """Post the copy back of storages, and puts their new memory under their tensors."""
        copy, made = self._copies.back(pairs_of(back))
        memories = iter(made)
        for saved in back:
            self._count(saved, True)
            if saved.buffer is not None:
                saved.coming, memory = copy, next(memories)
                saved.rebuild(memory)
                shelf.name(saved, memory)
        self.counters.prefetched_bytes += copy.num_bytes
        return copy

    def _fetch(self, saved: SavedStorage) -> None:
        """Bring one storage back because it is read before its PREFETCH."""
        shelf = next((shelf for shelf in self._shelves.values() if saved in shelf.storages), None)
        if shelf is None:
            raise RuntimeError("a backward reads what was saved in a step that has ended")
        shelf.holdings.fetch(saved.number)
        self._bring(shelf, [saved])
        self._tell()
        self.counters.num_misses += 1

    def _wait_back(self, saved: SavedStorage) -> None:
        if saved.coming is not None and not saved.coming.is_waited_for:
            self._copies.wait(saved.coming)

    def _end(self, place: Place, segment: int) -> None:
        shelf = self._shelves[place]
        self._free(shelf, segment)
        for saved in shelf.done(segment):
            self._drop(saved)
        if shelf.for_weights:
            for saved in shelf.no_longer_on_host():
                self._drop_copy(saved)
        if not shelf.open:
            del self._shelves[place]

    def _drop(self, saved: SavedStorage) -> None:
        """Return back what a storage takes that nobody needs any more; its memory goes with its last tensor."""
        self._count(saved, False)
        self._drop_copy(saved)

    def _drop_copy(self, saved: SavedStorage) -> None:
        self._wait_back(saved)
        if saved.buffer is not None:
            self._pool.give(saved.buffer)
            self.on_host.hold(-saved.num_bytes)
            saved.buffer = None

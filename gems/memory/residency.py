"""Residency: where the storages are that one micro-batch of a stage has saved, and which of them a copy takes.

The rules of the activation store, without tensors: the engine follows them with memory, the predictions with figures.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

Key = Hashable


@dataclass(slots=True)
class StorageState:
    """A saved storage. `savers` are the segments whose backward has still to read it; `~segment` stands for W of one.

    `taken_by` is the segment with whose copy it left, `is_kept` whether it must stay on the device after all, because a
    segment that is not offloaded has saved it too.
    """

    num_bytes: int
    savers: set[int] = field(default_factory=set)
    is_movable: bool = True
    is_kept: bool = False
    taken_by: int | None = None
    on_device: bool = True
    on_host: bool = False


class Residency:
    """The saved storages of one micro-batch, in one stage and direction.

    A storage belongs to the last segment that saves it (vDNN's reference count: a tensor leaves with its last reader,
    Rhu et al. 2016, section III): it leaves with that segment's copy and is back for that segment's backward, and stays
    until the first segment that saved it has run its own. So no storage is copied twice in one way.
    """

    def __init__(self, offloaded: Collection[int] = ()) -> None:
        self._offloaded = frozenset(offloaded)
        self._held: dict[Key, StorageState] = {}
        self._saved_by: dict[int, dict[Key, None]] = {}
        self._taken_with: dict[int, list[Key]] = {}
        self._untaken: dict[Key, None] = {}
        self._device_bytes = 0
        self._host_bytes = 0

    def __getitem__(self, key: Key) -> StorageState:
        return self._held[key]

    def __contains__(self, key: Key) -> bool:
        return key in self._held

    @property
    def device_bytes(self) -> int:
        """Bytes of saved storages on the device."""
        return self._device_bytes

    @property
    def host_bytes(self) -> int:
        """Bytes of copies in host memory."""
        return self._host_bytes

    def is_on_device(self, key: Key) -> bool:
        """Whether a storage is among those held on the device."""
        held = self._held.get(key)
        return held is not None and held.on_device

    def save(self, key: Key, num_bytes: int, segment: int, is_movable: bool = True) -> bool:
        """Record that a segment saves a storage, which is on the device; says whether it was not there before.

        One that has left the device, and is saved again while a value is still in use, stays where it is, unless a
        segment saves it that is not offloaded.
        """
        held = self._held.get(key)
        is_new = held is None
        if held is None:
            held = self._held[key] = StorageState(num_bytes, is_movable=is_movable)
            self._device_bytes += num_bytes
        held.savers.add(segment)
        self._saved_by.setdefault(segment, {})[key] = None
        stays = segment not in self._offloaded
        if held.taken_by is None:
            if held.is_movable and not stays:
                self._untaken[key] = None
            return is_new
        if stays and not held.on_device:
            self._bring(held)
            is_new = True
        if held.is_kept and not stays:
            # its copy is made, and the memory is free behind that of the segment that is now its last
            held.taken_by = segment
            self._taken_with.setdefault(segment, []).append(key)
        held.is_kept = stays
        return is_new

    def offload(self, segment: int, outputs: Collection[Key] = ()) -> list[Key]:
        """Return what the copy of a segment takes: what it and segments before it saved, each storage once.

        Its `outputs` are left to the next segment, unless that one is offloaded too and so may share the copy.
        """
        stays = () if segment + 1 in self._offloaded else set(outputs)
        taken = []
        for key in list(self._untaken):
            if max(self._held[key].savers) not in self._offloaded:
                del self._untaken[key]
            elif key not in stays:
                taken.append(key)
        for key in taken:
            held = self._held[key]
            held.taken_by, held.on_host = segment, True
            self._host_bytes += held.num_bytes
            del self._untaken[key]
        self._taken_with.setdefault(segment, []).extend(taken)
        return taken

    def free(self, segment: int) -> list[Key]:
        """Return what leaves the device when the copy of a segment has ended."""
        gone = []
        for key in self._taken_with.pop(segment, ()):
            held = self._held.get(key)
            if held is not None and held.taken_by == segment and held.on_device and not held.is_kept:
                gone.append(key)
                held.on_device = False
                self._device_bytes -= held.num_bytes
        return gone

    def prefetch(self, segment: int) -> list[Key]:
        """Return what comes back for the backward of a segment: all that it saved and that is not on the device.

        What has not left yet, because the copy that it shares is still out, stays.
        """
        back = []
        for key in self._saved_by.get(segment, ()):
            held = self._held[key]
            if held.on_device:
                held.is_kept = True
            else:
                back.append(key)
                self._bring(held)
        return back

    def fetch(self, key: Key) -> None:
        """Record that one storage was brought back because it was read before its copy back was posted."""
        if not self._held[key].on_device:
            self._bring(self._held[key])

    def done(self, segment: int) -> list[Key]:
        """Return what nobody needs any more once the backward of a segment has run.

        What only weight gradients have still to read is on the device, and its copy is let go.
        """
        gone = []
        for key in self._saved_by.pop(segment, ()):
            held = self._held[key]
            held.savers.discard(segment)
            if not held.savers:
                gone.append(key)
                del self._held[key]
                self._untaken.pop(key, None)
                self._device_bytes -= held.num_bytes if held.on_device else 0
            if held.on_host and max(held.savers, default=-1) < 0:
                # the weight gradients that may still read it do so on the device
                held.on_host = False
                self._host_bytes -= held.num_bytes
        return gone

    def _bring(self, held: StorageState) -> None:
        held.on_device = True
        self._device_bytes += held.num_bytes

"""The location of a micro-batch's saved storages on a stage: device, host memory, or both.

These are the rules of the activation store, without tensors, for engine and predictions alike.
"""

from __future__ import annotations

from collections.abc import Collection, Hashable
from dataclasses import dataclass, field

from gems.schedule.action import Kind

Key = Hashable
# the actions of one micro-batch on a stage, in order: kind and segment
Script = tuple[tuple[Kind, int], ...]


@dataclass(frozen=True, slots=True)
class State:
    """The bytes that a micro-batch holds during one of its actions, and after it."""

    during_bytes: int = 0
    device_bytes: int = 0
    activation_bytes: int = 0
    host_bytes: int = 0
    moved_bytes: int = 0


def inputs_leave(script: Script) -> bool:
    """Return whether a stage's inputs are offloaded; see `Schedule.inputs_leave`."""
    return (Kind.R, 0) in script and (Kind.OFFLOAD, 0) in script


@dataclass(slots=True)
class StorageState:
    """A saved storage."""

    num_bytes: int
    # segments whose backward has yet to read it; `~segment` stands for a segment's W
    savers: set[int] = field(default_factory=set)
    is_movable: bool = True  # one of the segments that saved it may copy it
    is_pinned: bool = False  # a segment that is not offloaded has saved it, too
    moved_with: int | None = None  # the segment whose copy moved it
    on_device: bool = True
    on_host: bool = False


class Residency:
    """The saved storages of one micro-batch, in one stage and direction.

    A storage belongs to the last segment that saves it (vDNN's reference count, Rhu et al. 2016,
    section III): it leaves with that segment's copy, returns for that segment's backward, and stays
    until the backward of the first segment that saved it. So no storage is copied twice in one
    direction. `device_bytes` counts saved storages on the device, `host_bytes` copies in host
    memory; `states` has the storages that a backward has yet to read.
    """

    def __init__(self, offloaded: Collection[int] = ()) -> None:
        self._offloaded = set(offloaded)
        self.states: dict[Key, StorageState] = {}
        self._saved_by: dict[int, dict[Key, None]] = {}
        self._moved: dict[int, list[Key]] = {}
        self._unmoved: dict[Key, None] = {}
        self.device_bytes = 0
        self.host_bytes = 0

    def is_on_device(self, key: Key) -> bool:
        """Return whether a storage is on the device."""
        state = self.states.get(key)
        return state is not None and state.on_device

    def save(self, key: Key, num_bytes: int, segment: int, is_movable: bool = True) -> bool:
        """Record that a segment saves a storage, and return whether it is new on the device.

        A storage that has left the device stays in host memory if it is saved again, except by a
        segment that is not offloaded.
        """
        state = self.states.get(key)
        is_new = state is None
        if state is None:
            state = self.states[key] = StorageState(num_bytes, is_movable=is_movable)
            self.device_bytes += num_bytes
        state.is_movable = state.is_movable or is_movable
        state.savers.add(segment)
        self._saved_by.setdefault(segment, {})[key] = None
        stays = segment not in self._offloaded
        if state.moved_with is None:
            if state.is_movable and not stays:
                self._unmoved[key] = None
            return is_new
        if stays and not state.on_device:
            self._bring_back(state)
            is_new = True
        if state.is_pinned and not stays:
            # it is already copied: the copy of its new last segment frees the device memory
            state.moved_with = segment
            self._moved.setdefault(segment, []).append(key)
        state.is_pinned = stays
        return is_new

    def offload(self, segment: int, outputs: Collection[Key] = ()) -> list[Key]:
        """Return the storages that the copy of a segment moves.

        These are the storages saved so far that have not left. The segment's `outputs` stay for the
        next segment, unless that is offloaded as well and can share the copy.
        """
        stays = () if segment + 1 in self._offloaded else set(outputs)
        taken = []
        for key in list(self._unmoved):
            if max(self.states[key].savers) not in self._offloaded:
                del self._unmoved[key]
            elif key not in stays:
                taken.append(key)
        for key in taken:
            state = self.states[key]
            state.moved_with = segment
            state.on_host = True
            self.host_bytes += state.num_bytes
            del self._unmoved[key]
        self._moved.setdefault(segment, []).extend(taken)
        return taken

    def free(self, segment: int) -> list[Key]:
        """Return the storages that are freed on the device when the copy of a segment has ended."""
        gone = []
        for key in self._moved.pop(segment, ()):
            state = self.states.get(key)
            if (
                state is not None
                and state.moved_with == segment
                and state.on_device
                and not state.is_pinned
            ):
                gone.append(key)
                state.on_device = False
                self.device_bytes -= state.num_bytes
        return gone

    def prefetch(self, segment: int) -> list[Key]:
        """Return the storages to copy back for the backward of a segment.

        Storages that have not left yet, because a shared copy is still running, stay on the device.
        So do those that the segment saves from now on, in a recompute.
        """
        back = []
        self._offloaded.discard(segment)
        for key in self._saved_by.get(segment, ()):
            state = self.states[key]
            if state.on_device:
                state.is_pinned = True
            else:
                back.append(key)
                self._bring_back(state)
        return back

    def fetch(self, key: Key) -> None:
        """Record that a storage was copied back on demand, before its prefetch was posted."""
        if not self.states[key].on_device:
            self._bring_back(self.states[key])

    def done(self, segment: int) -> list[Key]:
        """Return the storages that are no longer needed after the backward of a segment.

        Storages that only weight gradients have yet to read are on the device, so their copies in
        host memory are freed.
        """
        gone = []
        for key in self._saved_by.pop(segment, ()):
            state = self.states[key]
            state.savers.discard(segment)
            if not state.savers:
                gone.append(key)
                del self.states[key]
                self._unmoved.pop(key, None)
                self.device_bytes -= state.num_bytes if state.on_device else 0
            if state.on_host and max(state.savers, default=-1) < 0:
                state.on_host = False
                self.host_bytes -= state.num_bytes
        return gone

    def _bring_back(self, state: StorageState) -> None:
        state.on_device = True
        self.device_bytes += state.num_bytes

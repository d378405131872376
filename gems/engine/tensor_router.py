"""Handing: what the actions of a rank give each other, and what they were lent by its links."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from gems.autograd.memory_counter import Share
from gems.engine.activation_store.store import Place
from gems.engine.supervision.recorder import Recorder
from gems.engine.transport.p2p_channels import Links
from gems.schedule.action import RECV_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies, transfer_after
from gems.schedule.schedule import Schedule


class Handing:
    """Keeps tensors from the action that makes them to the one that takes them.

    That is a send, a stage that is a neighbour on this rank, or the segment beside it in its stage. `handed_over` counts
    what neighbours on this rank give each other, until the taker's backward; `in_flight` what segments hand on inside of
    their stages and nobody has saved. Inside of a stage a gradient may be None, where an output was not used.
    """

    def __init__(self, schedule: Schedule, row: Iterable[Action], links: Links, recorder: Recorder) -> None:
        self.handed_over = Share(recorder.hold)
        self.in_flight = Share(recorder.hold)
        self._schedule = schedule
        self._links = links
        self._sources = {action: self._source_of(action) for action in row}
        self._takers = {action: self._taker_of(action) for action in self._sources}
        self._stays = {
            source
            for action, source in self._sources.items()
            if source is not None and source.stage == action.stage and source.kind not in RECV_KINDS
        }
        self._out: dict[Action, tuple[Tensor, ...]] = {}
        self._lent: dict[Place, list[tuple[list[Tensor], Action]]] = {}

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on its way, or lent."""
        return not self._out and not self._lent

    def stays(self, action: Action) -> bool:
        """Whether what an action makes goes to another segment of its stage."""
        return action in self._stays

    def take(self, action: Action) -> tuple[Tensor, ...] | None:
        """Return what an action takes from others, once it has come; None where it takes nothing.

        Raises:
            StalledError: nothing came within the stall limit.
        """
        source = self._sources[action]
        if source is None:
            return None
        return self._links.wait(source) if source.kind in RECV_KINDS else self._out.pop(source)

    def take_out(self, send: Action) -> tuple[Tensor, ...]:
        """Return what a send is to carry."""
        return self._out.pop(send)

    def hand_on(self, action: Action, tensors: tuple[Tensor, ...]) -> None:
        """Keep what an action made until its send posts it, its neighbour on this rank or the next segment takes it."""
        taker = self._takers[action]
        self._out[taker] = tensors
        if taker is action and action not in self._stays:
            self.handed_over.hold(num_bytes(tensors))

    def release(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Return back what came for `action`: receive buffers, or tensors of a neighbour on this rank."""
        source = self._sources[action]
        if source is None or not tensors or source in self._stays:
            return
        if source.kind in RECV_KINDS:
            self._links.release(tensors)
        else:
            self.handed_over.hold(-num_bytes(tensors))

    def lend(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Record what came for `action` and the weight gradients of its stage may still read."""
        if tensors and self._sources[action] not in self._stays:
            self._lent.setdefault(place_of(action), []).append((list(tensors), action))

    def give_back_lent(self, action: Action, read: set[int]) -> None:
        """Return back what was lent to a stage and micro-batch, but for the storages at the addresses `read`.

        A buffer that is still read must not be filled again.
        """
        left = []
        for tensors, taken_by in self._lent.pop(place_of(action), []):
            self.release([tensor for tensor in tensors if _address(tensor) not in read], taken_by)
            left.append(([tensor for tensor in tensors if _address(tensor) in read], taken_by))
        if any(tensors for tensors, _ in left):
            self._lent[place_of(action)] = left

    def count_in_flight(self, is_counted: Callable[[Place, Tensor], bool]) -> None:
        """Count what is handed on inside of stages, but for memory that is counted elsewhere."""
        found: dict[int, int] = {}
        for action in self._out.keys() & self._stays:
            for tensor in self._out[action]:
                if tensor is not None and not is_counted(place_of(action), tensor):
                    found[_address(tensor)] = tensor.untyped_storage().nbytes()
        self.in_flight.hold(sum(found.values()) - self.in_flight.held_bytes)

    def forget(self) -> None:
        """Let all go, after a step that was broken off."""
        self._out.clear()
        self._lent.clear()
        for share in (self.handed_over, self.in_flight):
            share.hold(-share.held_bytes)

    def _source_of(self, action: Action) -> Action | None:
        """Return the action whose data it takes: a receive, a neighbour on this rank, or the segment beside it."""
        if action.kind not in (Kind.F, Kind.B, Kind.I):
            return None
        own = (action.stage, action.segment)
        return next(
            (
                need
                for need in dependencies(action, self._schedule)
                if (need.stage, need.segment) != own or need.kind in RECV_KINDS
            ),
            None,
        )

    def _taker_of(self, action: Action) -> Action:
        """Return the send that takes what a compute action makes; itself where it stays on this rank."""
        transfer = transfer_after(action, self._schedule)
        return action if transfer is None else transfer[0]


def place_of(action: Action) -> Place:
    """Return direction, stage and micro-batch of an action."""
    assert action.micro_batch is not None
    return action.direction, action.stage, action.micro_batch


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, each counted for itself."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def unshared(made: tuple[Tensor, ...], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Copy what lies in the memory of a receive buffer, which is about to be filled again.

    A layer may hand a view of its input on (flatten, identity), and autograd a view of the gradient.
    """
    taken = {_address(tensor) for tensor in received if tensor is not None}
    return tuple(tensor.clone() if tensor is not None and _address(tensor) in taken else tensor for tensor in made)

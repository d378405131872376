"""Handing between the stages of a graph: an output has several readers, and its gradients are added up."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from gems.autograd.memory_counter import Share
from gems.engine.activation_store.store import Place
from gems.engine.supervision.recorder import Recorder
from gems.engine.tensor_router import Handing, num_bytes
from gems.engine.transport.p2p_channels import Links
from gems.schedule.action import RECV_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies, readers_by_rank
from gems.schedule.schedule import Schedule

Tensors = tuple[Tensor, ...]


class GraphHanding(Handing):
    """Keeps outputs until their last reader on this rank is done with them, and gradients until all have come.

    What comes from another rank comes once, whoever reads it here. The gradients of an output are added from its last reader to its
    first, as autograd adds them up in one process.
    """

    def __init__(self, schedule: Schedule, row: Iterable[Action], links: Links, recorder: Recorder) -> None:
        self.handed_over = Share(recorder.hold)
        self.in_flight = Share(recorder.hold)
        self._schedule, self._links = schedule, links
        self._needs = {action: self._data_of(action) for action in row}
        self._readers: dict[Action, int] = {}
        for needs in self._needs.values():
            for need in needs:
                self._readers[need] = self._readers.get(need, 0) + 1
        self._out: dict[Action, Tensors] = {}
        self._left: dict[Action, int] = {}
        self._whole: set[Action] = set()

    @property
    def is_empty(self) -> bool:
        """Whether nothing is on its way."""
        return not self._out

    def stays(self, action: Action) -> bool:
        """Whether what an action makes goes to another segment of its stage: stages of a graph have none."""
        return False

    def take(self, action: Action) -> Tensors | None:
        """Return an F the outputs of all that its stage reads, in their order, and a B the sum of its readers' gradients.

        Raises:
            StalledError: something did not come within the stall limit.
        """
        needs = self._needs[action]
        if not needs:
            return None
        if action.kind is Kind.F:
            return tuple(tensor for need in needs for tensor in self._brought(need))
        parts = [self._gradient(need, action.stage) for need in needs]
        if len(parts) == 1:
            self._whole.add(action)
            return parts[0]
        total = _sum(parts[::-1])
        for need, part in zip(needs, parts, strict=True):
            self._give_up(need, part)
        return total

    def take_out(self, send: Action) -> Tensors:
        """Return what a send is to carry."""
        needs = self._needs[send]
        if send.kind is Kind.SEND_F:
            found = self._out[needs[0]]
            self._drop(needs[0])
            return found
        part = self._gradient(needs[0], send.segment)
        self._give_up(needs[0], part)
        return part

    def hand_on(self, action: Action, tensors: Tensors) -> None:
        """Keep an output for its readers, and the gradients of a stage's inputs for the stages that made them."""
        if action.kind is Kind.F:
            self._out[action] = tensors
            self._left[action] = self._readers.get(action, 0)
            if self._is_read_here(action):
                self.handed_over.hold(num_bytes(tensors))
            return
        at = 0
        for feeder in self._schedule.placement.feeders_of(action.stage):
            count = self._links.num_gradients(feeder)
            part = tensors[at : at + count]
            at += count
            self._out[action._replace(segment=feeder)] = part
            self.handed_over.hold(num_bytes(part))

    def release(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Return back what came for `action`, once nobody else on this rank reads it."""
        if not tensors:
            return
        if action.kind is not Kind.F:
            if action in self._whole:
                self._whole.discard(action)
                self._give_up(self._needs[action][0], tuple(tensors))
            return
        for need in self._needs[action]:
            self._drop(need)

    def lend(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Never asked for: backward is whole."""
        raise NotImplementedError("stages of a graph have no split backward")

    def give_back_lent(self, action: Action, read: set[int]) -> None:
        """Never asked for: backward is whole."""
        raise NotImplementedError("stages of a graph have no split backward")

    def count_in_flight(self, is_counted: Callable[[Place, Tensor], bool]) -> None:
        """Count nothing: stages of a graph have no segments."""

    def forget(self) -> None:
        """Let all go, after a step that was broken off."""
        self._out.clear()
        self._left.clear()
        self._whole.clear()
        self.handed_over.hold(-self.handed_over.held_bytes)

    def _data_of(self, action: Action) -> tuple[Action, ...]:
        """Return the actions whose data an F, B or send takes."""
        if action.kind in RECV_KINDS or action.micro_batch is None:
            return ()
        needs = dependencies(action, self._schedule)
        if action.kind is not Kind.B:
            return needs
        own = action._replace(kind=Kind.F)
        return tuple(need for need in needs if need != own)

    def _brought(self, need: Action) -> Tensors:
        """Return an output that was made here, or waits for it."""
        if need.kind in RECV_KINDS and need not in self._out:
            self._out[need] = self._links.wait(need)
            self._left[need] = self._readers[need]
        return self._out[need]

    def _gradient(self, need: Action, stage: int | None) -> Tensors:
        """Return the gradient of a stage's output that one reader made here, or waits for that of another rank."""
        return self._links.wait(need) if need.kind in RECV_KINDS else self._out.pop(need._replace(segment=stage))

    def _give_up(self, need: Action, tensors: Tensors) -> None:
        """Count gradients as gone."""
        if need.kind in RECV_KINDS:
            self._links.release(tensors)
        else:
            self.handed_over.hold(-num_bytes(tensors))

    def _drop(self, need: Action) -> None:
        """Count one reader of an output as done, and gives it up with the last one."""
        self._left[need] -= 1
        if self._left[need]:
            return
        tensors = self._out.pop(need)
        del self._left[need]
        if need.kind in RECV_KINDS:
            self._links.release(tensors)
        elif self._is_read_here(need):
            self.handed_over.hold(-num_bytes(tensors))

    def _is_read_here(self, made: Action) -> bool:
        placement = self._schedule.placement
        here = placement.rank_of(made.direction, made.stage)
        return here in readers_by_rank(placement, made.direction, made.stage)


def _sum(parts: Sequence[Tensors]) -> Tensors:
    """Add gradients up, tensor by tensor, into memory of its own where there are several."""
    total = parts[0]
    for more in parts[1:]:
        total = tuple(one + other for one, other in zip(total, more, strict=True))
    return total

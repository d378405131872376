"""Tensors on their way between the actions of one rank, from producer to consumer."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from torch import Tensor, UntypedStorage

from gems.engine.offload.activation_store import MicroBatchKey
from gems.engine.supervision.recorder import MemoryCounter, Recorder
from gems.engine.transport.p2p_channels import P2PChannels
from gems.schedule.action import RECV_KINDS, SEND_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies, other_stage
from gems.schedule.schedule import Schedule

Tensors = tuple[Tensor, ...]
# of a tensor: the action that makes or receives it, and its index among that action's tensors
Place = tuple[Action, int]
_ROWS = -1


class TensorRouter:
    """Routes tensors from the stages, and the segments of stages, that make them to their readers.

    An output may have several readers: stages on this rank, and a send for each other rank. Data
    from another rank is received once. The gradients of an output are added from its last reader to
    its first, in autograd's order. Within a stage a gradient may be None, for an output that was
    not used.

    Attributes:
        between_stages: Bytes passed between stages on this rank, until the last reader's backward.
        between_segments: Bytes passed between segments that are not saved.
        input_rows: Bytes of the image rows that the first stage received by strip and still reads.
    """

    def __init__(
        self, schedule: Schedule, rank: int, channels: P2PChannels, recorder: Recorder
    ) -> None:
        self.between_stages = MemoryCounter(recorder.count_bytes)
        self.between_segments = MemoryCounter(recorder.count_bytes)
        self.input_rows = MemoryCounter(recorder.count_bytes)
        self._schedule = schedule
        self._channels = channels
        actions = schedule.rank_schedules[rank]
        self._needs = {action: self._data_needs(action) for action in actions}
        self._takers: dict[Action, list[Action]] = {}
        for action, needs in self._needs.items():
            for need in needs:
                self._takers.setdefault(need, []).append(action)
        self._inbox: dict[tuple[Action, Action], Tensors] = {}  # by taker and source
        self._inside: dict[tuple[Action, Action], Tensors] = {}  # likewise, between segments
        self._places: dict[Action, list[Place]] = {}  # of the inputs of an action, in order
        self._more_readers: dict[Place, int] = {}  # after the next one, of tensors with several
        self._borrowed: dict[MicroBatchKey, list[tuple[Place, Tensor]]] = {}

    @property
    def is_empty(self) -> bool:
        """Return whether no tensor is on its way or borrowed."""
        return not (self._inbox or self._inside or self._borrowed)

    def take(self, action: Action) -> Tensors | None:
        """Wait for and return an action's inputs; return None if it takes nothing from others.

        For an F these are the outputs that its stage reads, in order; for a backward, the sum of
        the gradients of its readers.
        """
        needs = self._needs[action]
        if not needs:
            return None
        if len(needs) == 1 and _is_inside(action, needs[0]):
            # pop, so that within a stage the caller holds the only reference to the inputs
            return self._inside.pop((action, needs[0]))
        parcels = [self._fetch(action, need) for need in needs]
        places = [
            (need, index)
            for need, parcel in zip(needs, parcels, strict=True)
            if not _is_inside(action, need)
            for index in range(len(parcel))
        ]
        if action.kind is Kind.F or len(parcels) == 1:
            self._places[action] = places
            return tuple(itertools.chain(*parcels))
        total = parcels[-1]
        for more in parcels[-2::-1]:
            total = tuple(one + other for one, other in zip(total, more, strict=True))
        for place, gradient in zip(places, itertools.chain(*parcels), strict=True):
            self._release(place, gradient)
        return total

    def take_for_send(self, send: Action) -> Tensors:
        """Return the tensors of a send."""
        return self._inbox.pop((send, self._needs[send][0]))

    def put(self, action: Action, tensors: Tensors) -> None:
        """Keep the outputs of an action, or its input gradients, until their readers take them."""
        parts = {} if action.kind is Kind.F else self._by_predecessor(action.stage, tensors)
        parcels = []
        for taker in self._takers.get(action, ()):
            is_send = taker.kind in SEND_KINDS
            stage = other_stage(taker) if is_send else taker.stage
            parcel = parts.get(stage, tensors)
            if not is_send and _is_inside(taker, action):
                self._inside[taker, action] = parcel
                continue
            self._inbox[taker, action] = parcel
            if not is_send:
                parcels.append(parcel)
        if action.kind is Kind.F:
            self._share(action, tensors, len(parcels))
            parcels = parcels[:1]
        if parcels:
            # shared memory counts once per tensor
            size = sum(tensor.nbytes for tensor in itertools.chain(*parcels))
            self.between_stages.count_bytes(size)

    def release(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Release inputs of an action that it does not read any more.

        They come from a receive, from another stage, or from an image.
        """
        for place, tensor in zip(self._places.get(action, ()), tensors, strict=False):
            self._release(place, tensor)

    def hold_rows(self, rows: Tensor, action: Action) -> None:
        """Count the rows of a strip, which the first stage takes, until they are released."""
        self._places[action] = [(action, _ROWS)]
        self.input_rows.count_bytes(rows.nbytes)

    def borrow(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Keep inputs of an action that the weight gradients of its stage may still read."""
        pairs = list(zip(self._places.get(action, ()), tensors, strict=False))
        if pairs:
            self._borrowed.setdefault(micro_batch_key(action), []).extend(pairs)

    def release_borrowed(self, action: Action, still_read: set[int]) -> None:
        """Release what an action's stage and micro-batch borrowed, except what is `still_read`.

        `still_read` holds the addresses of storages.
        """
        still_borrowed = []
        for place, tensor in self._borrowed.pop(micro_batch_key(action), []):
            if _address(tensor) in still_read:
                still_borrowed.append((place, tensor))
            else:
                self._release(place, tensor)
        if still_borrowed:
            self._borrowed[micro_batch_key(action)] = still_borrowed

    def count_between_segments(
        self, is_counted: Callable[[MicroBatchKey, UntypedStorage], bool]
    ) -> None:
        """Count tensors on their way within stages, without memory that is counted elsewhere."""
        sizes: dict[int, int] = {}
        for (_, source), tensors in self._inside.items():
            key = micro_batch_key(source)
            for tensor in tensors:
                if tensor is not None:
                    memory = tensor.untyped_storage()
                    if not is_counted(key, memory):
                        sizes[memory.data_ptr()] = memory.nbytes()
        self.between_segments.set_bytes(sum(sizes.values()))

    def reset(self) -> None:
        """Drop all tensors after a failed step."""
        self._inbox.clear()
        self._inside.clear()
        self._borrowed.clear()
        self.between_stages.set_bytes(0)
        self.between_segments.set_bytes(0)
        self.input_rows.set_bytes(0)

    def _fetch(self, action: Action, need: Action) -> Tensors:
        if need.kind in RECV_KINDS and (action, need) not in self._inbox:
            tensors = self._channels.wait(need)
            takers = self._takers[need]
            self._inbox.update({(taker, need): tensors for taker in takers})
            self._share(need, tensors, len(takers))
        # pop, so that within a stage the caller holds the only reference to the inputs
        return (self._inside if _is_inside(action, need) else self._inbox).pop((action, need))

    def _share(self, source: Action, tensors: Tensors, num_readers: int) -> None:
        if num_readers > 1:
            for index in range(len(tensors)):
                self._more_readers[source, index] = num_readers - 1

    def _release(self, place: Place, tensor: Tensor) -> None:
        """Release a tensor after its last reader on this rank."""
        more = self._more_readers.get(place, 0)
        if more:
            self._more_readers[place] = more - 1
            return
        source, index = place
        if source.kind in RECV_KINDS:
            self._channels.release([tensor])
        else:
            counter = self.input_rows if index == _ROWS else self.between_stages
            counter.count_bytes(-tensor.nbytes)

    def _by_predecessor(self, stage: int, gradients: Tensors) -> dict[int, Tensors]:
        """Return the input gradients of a stage, by the stage whose output they belong to."""
        stages = self._schedule.placement.predecessors[stage]
        if len(stages) < 2:
            return {}
        remaining = iter(gradients)
        return {
            other: tuple(itertools.islice(remaining, self._channels.num_gradients(other)))
            for other in stages
        }

    def _data_needs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions whose data an action takes: receives, and actions of this rank."""
        if action.kind not in (Kind.F, Kind.B, Kind.I, *SEND_KINDS):
            return ()
        needs = dependencies(action, self._schedule)
        if action.kind in SEND_KINDS:
            return needs
        own = (action.stage, action.segment)
        return tuple(
            need for need in needs if (need.stage, need.segment) != own or need.kind in RECV_KINDS
        )


def _is_inside(action: Action, need: Action) -> bool:
    return need.stage == action.stage and need.kind not in RECV_KINDS


def micro_batch_key(action: Action) -> MicroBatchKey:
    """Return the direction, stage and micro-batch of an action."""
    assert action.micro_batch is not None
    return action.direction, action.stage, action.micro_batch


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def copy_shared(tensors: Tensors, received: Sequence[Tensor]) -> Tensors:
    """Copy tensors that share memory with receive buffers, which will be filled again soon.

    A layer may return a view of its input (flatten, identity), and autograd a view of the gradient.
    """
    taken = {_address(tensor) for tensor in received if tensor is not None}
    return tuple(
        tensor.clone() if tensor is not None and _address(tensor) in taken else tensor
        for tensor in tensors
    )

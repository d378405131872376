"""Tensors on their way between the actions of one rank, from producer to consumer."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from torch import Tensor

from gems.engine.activation_store.store import MicroBatchKey
from gems.engine.supervision.recorder import MemoryCounter, Recorder
from gems.engine.transport.p2p_channels import P2PChannels
from gems.schedule.action import RECV_KINDS, Action, Kind
from gems.schedule.dependencies import dependencies, readers_by_rank, transfer_after
from gems.schedule.schedule import Schedule

Tensors = tuple[Tensor, ...]


class TensorRouter:
    """Routes tensors between the stages of a chain, where each output has one consumer.

    The consumer is a send, the next stage if it is on this rank too, or the next segment of the
    stage. Within a stage a gradient may be None, for an output that was not used.

    Attributes:
        between_stages: Bytes passed between stages on this rank, until the consumer's backward.
        between_segments: Bytes passed between segments that are not saved.
        input_rows: Bytes of the image rows that the first stage received by strip and still reads.
    """

    def __init__(
        self,
        schedule: Schedule,
        actions: Iterable[Action],
        channels: P2PChannels,
        recorder: Recorder,
    ) -> None:
        self.between_stages = MemoryCounter(recorder.count_bytes)
        self.between_segments = MemoryCounter(recorder.count_bytes)
        self.input_rows = MemoryCounter(recorder.count_bytes)
        self._rows: set[int] = set()  # addresses of the input rows
        self._schedule = schedule
        self._channels = channels
        self._out: dict[Action, Tensors] = {}
        self._borrowed: dict[MicroBatchKey, list[tuple[list[Tensor], Action]]] = {}
        self._stays: set[Action] = set()
        self._prepare(list(actions))

    def _prepare(self, actions: Sequence[Action]) -> None:
        """Look up the source and the consumer of each action's data, once for all steps."""
        self._sources = {action: self._source(action) for action in actions}
        # the send that takes the output of a compute action, or the action itself if the output
        # stays on this rank
        transfers = {action: transfer_after(action, self._schedule) for action in actions}
        self._takers = {
            action: action if found is None else found[0] for action, found in transfers.items()
        }
        self._stays = {
            source
            for action, source in self._sources.items()
            if source is not None and source.stage == action.stage and source.kind not in RECV_KINDS
        }

    @property
    def is_empty(self) -> bool:
        """Return whether no tensor is on its way or borrowed."""
        return not self._out and not self._borrowed

    def stays_in_stage(self, action: Action) -> bool:
        """Return whether the output of an action goes to another segment of its stage."""
        return action in self._stays

    def take(self, action: Action) -> Tensors | None:
        """Wait for and return an action's inputs; return None if it takes nothing from others."""
        source = self._sources[action]
        if source is None:
            return None
        return self._channels.wait(source) if source.kind in RECV_KINDS else self._out.pop(source)

    def take_for_send(self, send: Action) -> Tensors:
        """Return the tensors of a send."""
        return self._out.pop(send)

    def put(self, action: Action, tensors: Tensors) -> None:
        """Keep the output of an action until its consumer takes it."""
        taker = self._takers[action]
        self._out[taker] = tensors
        if taker is action and action not in self._stays:
            self.between_stages.count_bytes(total_bytes(tensors))

    def release(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Release inputs of an action that nothing reads any more.

        They come from a receive, from another stage, or from an image.
        """
        source = self._sources[action]
        if source is None:
            for tensor in tensors:
                if _address(tensor) in self._rows:
                    self._rows.discard(_address(tensor))
                    self.input_rows.count_bytes(-tensor.nbytes)
        elif tensors and source not in self._stays:
            self._release_tensors(source, tensors)

    def hold_rows(self, rows: Tensor) -> None:
        """Count the rows of a strip, which the first stage takes, until they are released."""
        self._rows.add(_address(rows))
        self.input_rows.count_bytes(rows.nbytes)

    def hand_over(self, tensors: Sequence[Tensor]) -> None:
        """Stop counting received tensors, whose memory belongs to another owner from now on."""
        self._channels.hand_over(tensors)

    def borrow(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Keep inputs of an action that the weight gradients of its stage may still read."""
        if tensors and self._sources[action] not in self._stays:
            self._borrowed.setdefault(micro_batch_key(action), []).append((list(tensors), action))

    def release_borrowed(self, action: Action, still_read: set[int]) -> None:
        """Release what an action's stage and micro-batch borrowed, except what is `still_read`.

        `still_read` holds the addresses of storages.
        """
        left = []
        for tensors, taken_by in self._borrowed.pop(micro_batch_key(action), []):
            self.release(
                [tensor for tensor in tensors if _address(tensor) not in still_read], taken_by
            )
            left.append(
                ([tensor for tensor in tensors if _address(tensor) in still_read], taken_by)
            )
        if any(tensors for tensors, _ in left):
            self._borrowed[micro_batch_key(action)] = left

    def count_between_segments(self, is_counted: Callable[[MicroBatchKey, Tensor], bool]) -> None:
        """Count tensors on their way within stages, without memory that is counted elsewhere."""
        found: dict[int, int] = {}
        for action in self._out.keys() & self._stays:
            for tensor in self._out[action]:
                if tensor is not None and not is_counted(micro_batch_key(action), tensor):
                    found[_address(tensor)] = tensor.untyped_storage().nbytes()
        self.between_segments.set_bytes(sum(found.values()))

    def reset(self) -> None:
        """Drop all tensors after a failed step."""
        self._out.clear()
        self._borrowed.clear()
        self.between_stages.set_bytes(0)
        self.between_segments.set_bytes(0)
        self.input_rows.set_bytes(0)
        self._rows.clear()

    def _release_tensors(self, source: Action, tensors: Sequence[Tensor]) -> None:
        if source.kind in RECV_KINDS:
            self._channels.release(tensors)
        else:
            self.between_stages.count_bytes(-total_bytes(tensors))

    def _source(self, action: Action) -> Action | None:
        """Return the action whose data an action takes.

        It is a receive, or an action of another stage on this rank or of another segment of its
        stage.
        """
        if action.kind not in (Kind.F, Kind.B, Kind.I):
            return None
        own = (action.stage, action.segment)
        needs = dependencies(action, self._schedule)
        return next(
            (
                need
                for need in needs
                if (need.stage, need.segment) != own or need.kind in RECV_KINDS
            ),
            None,
        )


class GraphTensorRouter(TensorRouter):
    """Routes tensors between the stages of a graph, without segments or a split backward.

    An output has several readers and is kept until the last one on this rank is done. Data from
    another rank is received once. The gradients of an output are added from its last reader to its
    first, in autograd's order.
    """

    def _prepare(self, actions: Sequence[Action]) -> None:
        self._needs = {action: self._data_needs(action) for action in actions}
        self._num_readers = Counter(need for needs in self._needs.values() for need in needs)
        self._num_left: dict[Action, int] = {}
        # backwards whose gradient comes unsummed from their only reader
        self._unsummed: set[Action] = set()

    def take(self, action: Action) -> Tensors | None:
        """Return the inputs of an action.

        For an F these are the outputs that its stage reads, in order; for a B, the sum of the
        gradients of its readers.
        """
        needs = self._needs[action]
        if not needs:
            return None
        if action.kind is Kind.F:
            for need in needs:
                if need.kind in RECV_KINDS and need not in self._out:
                    self._out[need] = self._channels.wait(need)
                    self._num_left[need] = self._num_readers[need]
            return tuple(tensor for need in needs for tensor in self._out[need])
        gradients = [self._gradient(need, action.stage) for need in needs]
        if len(gradients) == 1:
            self._unsummed.add(action)
            return gradients[0]
        total = gradients[-1]
        for more in gradients[-2::-1]:
            total = tuple(one + other for one, other in zip(total, more, strict=True))
        for need, gradient in zip(needs, gradients, strict=True):
            self._release_tensors(need, gradient)
        return total

    def take_for_send(self, send: Action) -> Tensors:
        """Return the tensors of a send."""
        need = self._needs[send][0]
        if send.kind is Kind.SEND_F:
            found = self._out[need]
            self._drop_reader(need)
            return found
        gradient = self._gradient(need, send.segment)
        self._release_tensors(need, gradient)
        return gradient

    def put(self, action: Action, tensors: Tensors) -> None:
        """Keep an output for its readers, or input gradients for the stages before."""
        if action.kind is Kind.F:
            self._out[action] = tensors
            self._num_left[action] = self._num_readers[action]
            if self._is_read_here(action):
                self.between_stages.count_bytes(total_bytes(tensors))
            return
        first = 0
        for feeder in self._schedule.placement.feeders_of(action.stage):
            end = first + self._channels.num_gradients(feeder)
            gradients = self._out[action._replace(segment=feeder)] = tensors[first:end]
            self.between_stages.count_bytes(total_bytes(gradients))
            first = end

    def release(self, tensors: Sequence[Tensor], action: Action) -> None:
        """Release inputs of an action once nothing else on this rank reads them."""
        if not tensors:
            return
        if action.kind is Kind.F:
            for need in self._needs[action]:
                self._drop_reader(need)
        elif action in self._unsummed:
            self._unsummed.discard(action)
            self._release_tensors(self._needs[action][0], tuple(tensors))

    def reset(self) -> None:
        """Drop all tensors after a failed step."""
        super().reset()
        self._num_left.clear()
        self._unsummed.clear()

    def _data_needs(self, action: Action) -> tuple[Action, ...]:
        """Return the actions whose data an F, B or send takes."""
        if action.kind in RECV_KINDS or action.micro_batch is None:
            return ()
        own = action._replace(kind=Kind.F) if action.kind is Kind.B else None
        return tuple(need for need in dependencies(action, self._schedule) if need != own)

    def _gradient(self, need: Action, stage: int | None) -> Tensors:
        """Return the gradient of a stage's output from one reader, here or on another rank."""
        return (
            self._channels.wait(need)
            if need.kind in RECV_KINDS
            else self._out.pop(need._replace(segment=stage))
        )

    def _drop_reader(self, need: Action) -> None:
        """Mark one reader of an output as done, and release the output after the last one."""
        self._num_left[need] -= 1
        if self._num_left[need]:
            return
        del self._num_left[need]
        tensors = self._out.pop(need)
        if need.kind in RECV_KINDS or self._is_read_here(need):
            self._release_tensors(need, tensors)

    def _is_read_here(self, action: Action) -> bool:
        placement, (direction, stage) = self._schedule.placement, (action.direction, action.stage)
        return placement.rank_of(direction, stage) in readers_by_rank(placement, direction, stage)


def open_router(
    schedule: Schedule, rank: int, channels: P2PChannels, recorder: Recorder
) -> TensorRouter:
    """Return the router of a rank, for stages in a chain or in a graph."""
    router = TensorRouter if schedule.placement.feeders is None else GraphTensorRouter
    return router(schedule, schedule.rows[rank], channels, recorder)


def micro_batch_key(action: Action) -> MicroBatchKey:
    """Return the direction, stage and micro-batch of an action."""
    assert action.micro_batch is not None
    return action.direction, action.stage, action.micro_batch


def _address(tensor: Tensor) -> int:
    return tensor.untyped_storage().data_ptr()


def total_bytes(tensors: Iterable[Tensor]) -> int:
    """Return the total bytes of tensors; shared memory counts once per tensor."""
    return sum(tensor.nbytes for tensor in tensors)


def copy_shared(made: Tensors, received: Sequence[Tensor]) -> Tensors:
    """Copy tensors that share memory with receive buffers, which will be filled again soon.

    A layer may return a view of its input (flatten, identity), and autograd a view of the gradient.
    """
    taken = {_address(tensor) for tensor in received if tensor is not None}
    return tuple(
        tensor.clone() if tensor is not None and _address(tensor) in taken else tensor
        for tensor in made
    )

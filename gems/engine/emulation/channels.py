"""Messages of an emulated rank: real ones, of the true sizes, whose content nobody reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gems.engine.supervision.recorder import LINK, Recorder
from gems.engine.transport.message_tags import MessageTags
from gems.engine.transport.mpi import PersistentRequest, Transport
from gems.schedule.action import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action
from gems.schedule.dependencies import boundary_of, dependencies
from gems.schedule.schedule import Schedule


@dataclass(slots=True)
class _Transfer:
    """A transfer of the schedule and its persistent request."""

    action: Action
    request: PersistentRequest
    num_bytes: int
    is_send: bool
    posted_ns: int = 0
    arrived_ns: int | None = None


class EmulatedChannels:
    """Posts the transfers of one rank by persistent requests, made once for all steps.

    Attributes:
        receives_of: the receives that each compute action waits for.
        done_with: those of them that no later action reads.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        boundary_bytes: Sequence[float],
        transports: Sequence[Transport],
        recorder: Recorder,
    ) -> None:
        """Make the requests.

        Raises:
            ConfigError: this MPI has too few tags for the messages of a step.
        """
        tags = MessageTags(schedule, 1, transports[0].max_tag)
        self._recorder = recorder
        self._under_way: list[_Transfer] = []
        self._transfers: dict[Action, _Transfer] = {}
        self.receives_of: dict[Action, tuple[Action, ...]] = {}
        self.done_with: dict[Action, tuple[Action, ...]] = {}
        last_reader = {need: action for action in schedule.rows[rank] for need in dependencies(action, schedule)}
        sizes = [round(size) for size in boundary_bytes]
        content = np.ones(max(sizes, default=0), np.uint8)  # which all sends read
        # A request keeps its buffer, so buffers are shared here by receives that are never in use together.
        free: dict[int, list[np.ndarray]] = {}
        taken: dict[Action, np.ndarray] = {}
        for action in schedule.rows[rank]:
            if action.kind in SEND_KINDS | RECV_KINDS:
                size = sizes[boundary_of(action)]
                transport, is_send = transports[action.direction], action.kind in SEND_KINDS
                (tag,) = tags.tags(action, 1)
                if is_send:
                    request = transport.persistent_send(content[:size], tags.peer(action), tag)
                else:
                    spare = free.setdefault(size, [])
                    taken[action] = spare.pop() if spare else np.empty(size, np.uint8)
                    request = transport.persistent_receive(taken[action], tags.peer(action), tag)
                self._transfers[action] = _Transfer(action, request, size, is_send)
            elif action.kind in COMPUTE_KINDS:
                needs = tuple(need for need in dependencies(action, schedule) if need.kind in RECV_KINDS)
                self.receives_of[action] = needs
                self.done_with[action] = tuple(need for need in needs if last_reader[need] is action)
                for need in self.done_with[action]:
                    buffer = taken.pop(need)
                    free[len(buffer)].append(buffer)

    def post(self, action: Action) -> None:
        """Post a send or a receive."""
        transfer = self._transfers[action]
        transfer.arrived_ns = None
        transfer.posted_ns = time.perf_counter_ns()
        transfer.request.Start()
        self._recorder.count_bytes(transfer.num_bytes)
        self._under_way.append(transfer)

    def poll(self) -> None:
        """Let messages move, and record which have left or arrived."""
        done = [transfer for transfer in self._under_way if transfer.request.Test()]
        if not done:
            return
        now_ns = time.perf_counter_ns()
        self._under_way = [transfer for transfer in self._under_way if transfer not in done]
        for transfer in done:
            transfer.arrived_ns = now_ns
            if transfer.is_send:
                self._recorder.count_bytes(-transfer.num_bytes)
            self._recorder.span(transfer.action, LINK, transfer.posted_ns, now_ns, transfer.num_bytes)

    def arrived_ns(self, receive: Action) -> int | None:
        """Return when a message was seen to have arrived; None if it has not."""
        return self._transfers[receive].arrived_ns

    def release(self, receive: Action) -> None:
        """Count a receive's buffer as free again."""
        self._recorder.count_bytes(-self._transfers[receive].num_bytes)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    def close(self) -> None:
        """Free the requests; nothing may be under way."""
        for transfer in self._transfers.values():
            transfer.request.Free()
        self._transfers.clear()

"""Messages of an emulated rank: real ones, of the true sizes, whose content nobody reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from gems.engine.supervision.recorder import LINK, Recorder
from gems.engine.transport.message_tags import check_tags, first_index, most_tensors, peer_of, tag_of
from gems.engine.transport.mpi import Channel, Transport
from gems.schedule.action import COMPUTE_KINDS, RECV_KINDS, SEND_KINDS, Action
from gems.schedule.dependencies import boundary_of, dependencies
from gems.schedule.schedule import Schedule


@dataclass(slots=True)
class _Way:
    """One transfer of the row with its persistent request."""

    action: Action
    channel: Channel
    num_bytes: int
    is_send: bool
    posted_ns: int = 0
    arrived_ns: int | None = None


class EmulatedLinks:
    """Posts the transfers of one row through persistent requests, made once for all steps.

    All sends read one buffer. A receive holds its buffer until the compute that needs it has ended, which the row
    tells in advance: buffers are assigned before the first step and the request keeps its own.
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
            ConfigError: this MPI has too few tags for the step's messages.
        """
        max_tensors = most_tensors(schedule, 1)
        check_tags(schedule, max_tensors, transports[0].max_tag)
        self._recorder = recorder
        self._under_way: list[_Way] = []
        self._ways: dict[Action, _Way] = {}
        self.receives_of: dict[Action, tuple[Action, ...]] = {}
        self.done_with: dict[Action, tuple[Action, ...]] = {}
        last_reader = {need: action for action in schedule.rows[rank] for need in dependencies(action, schedule)}
        sizes = [round(size) for size in boundary_bytes]
        content = np.ones(max(sizes, default=0), np.uint8)
        free: dict[int, list[np.ndarray]] = {}
        taken: dict[Action, np.ndarray] = {}
        for action in schedule.rows[rank]:
            if action.kind in SEND_KINDS | RECV_KINDS:
                size = sizes[boundary_of(action)]
                transport, is_send = transports[action.direction], action.kind in SEND_KINDS
                index = first_index(action, schedule, 1)
                place = peer_of(action, schedule), tag_of(action, index, schedule.num_stages, max_tensors)
                if is_send:
                    channel = transport.send_channel(content[:size], *place)
                else:
                    spare = free.setdefault(size, [])
                    taken[action] = spare.pop() if spare else np.empty(size, np.uint8)
                    channel = transport.receive_channel(taken[action], *place)
                self._ways[action] = _Way(action, channel, size, is_send)
            elif action.kind in COMPUTE_KINDS:
                needs = tuple(need for need in dependencies(action, schedule) if need.kind in RECV_KINDS)
                self.receives_of[action] = needs
                self.done_with[action] = tuple(need for need in needs if last_reader[need] is action)
                for need in self.done_with[action]:
                    buffer = taken.pop(need)
                    free[len(buffer)].append(buffer)

    def post(self, action: Action) -> None:
        """Post a send or a receive."""
        way = self._ways[action]
        way.arrived_ns = None
        way.posted_ns = time.perf_counter_ns()
        way.channel.Start()
        self._recorder.hold(way.num_bytes)
        self._under_way.append(way)

    def poll(self) -> None:
        """Let messages move and notes which have left or arrived."""
        done = [way for way in self._under_way if way.channel.Test()]
        if not done:
            return
        now_ns = time.perf_counter_ns()
        self._under_way = [way for way in self._under_way if way not in done]
        for way in done:
            way.arrived_ns = now_ns
            if way.is_send:
                self._recorder.hold(-way.num_bytes)
            self._recorder.span(way.action, LINK, way.posted_ns, now_ns, way.num_bytes)

    def arrived_ns(self, receive: Action) -> int | None:
        """Return when a message was seen to have arrived, None while it has not."""
        return self._ways[receive].arrived_ns

    def release(self, receive: Action) -> None:
        """Count a receive's buffer as free again."""
        self._recorder.hold(-self._ways[receive].num_bytes)

    @property
    def is_quiet(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    def close(self) -> None:
        """Free the requests; nothing may be under way."""
        for way in self._ways.values():
            way.channel.Free()
        self._ways.clear()

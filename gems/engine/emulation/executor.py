"""The executor of an emulated device.

Compute is a timed wait from the cost model, messages are real. Needs no torch.
The device has a timeline of its own beside the host's clock: an action begins at the planned end of
the one before it once its data has come, and ends its cost later. So a host that wakes up late does
not make the device slower.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from gems.engine.action_loop import ActionLoop
from gems.engine.supervision.recorder import COMPUTE, COPY_IN, COPY_OUT, LINK, Recorder
from gems.engine.transport.message_tags import MessageTags
from gems.engine.transport.mpi import PersistentRequest, Request, Transport
from gems.engine.transport.polling import Waiter, realtime_priority
from gems.runs.heartbeat import Heartbeat
from gems.schedule.action import (
    COMPUTE_KINDS,
    COPY_KINDS,
    RECV_KINDS,
    SEND_KINDS,
    WAIT_KINDS,
    Action,
    Kind,
)
from gems.schedule.costs import StageCosts
from gems.schedule.dependencies import boundary_of, dependencies, stages_summed
from gems.schedule.edges import BACKWARD_KINDS
from gems.schedule.ledger import Ledger
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import EVEN, Pace


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

    A message counts as arrived `link_ns` after it has: what a link takes that this machine does not
    have.

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
        link_ns: int = 0,
    ) -> None:
        """Make the requests.

        Raises:
            ConfigError: this MPI has too few tags for the messages of a step.
        """
        tags = MessageTags(schedule, 1, transports[0].max_tag)
        self.recorder = recorder
        self._link_ns = link_ns
        self._under_way: list[_Transfer] = []
        self._transfers: dict[Action, _Transfer] = {}
        self.receives_of: dict[Action, tuple[Action, ...]] = {}
        self.done_with: dict[Action, tuple[Action, ...]] = {}
        last_reader = {
            need: action
            for action in schedule.rank_schedules[rank]
            for need in dependencies(action, schedule)
        }
        sizes = [round(size) for size in boundary_bytes]
        content = np.ones(max(sizes, default=0), np.uint8)  # which all sends read
        # A request keeps its buffer, so buffers are shared here by receives that are never in use
        # together.
        free: dict[int, list[np.ndarray]] = {}
        taken: dict[Action, np.ndarray] = {}
        for action in schedule.rank_schedules[rank]:
            if action.kind in SEND_KINDS | RECV_KINDS:
                size = sizes[boundary_of(action)]
                transport = transports[action.kind in BACKWARD_KINDS]
                is_send = action.kind in SEND_KINDS
                (tag,) = tags.tags(action, 1)
                if is_send:
                    request = transport.persistent_send(content[:size], tags.peer(action), tag)
                else:
                    spare = free.setdefault(size, [])
                    taken[action] = spare.pop() if spare else np.empty(size, np.uint8)
                    request = transport.persistent_receive(taken[action], tags.peer(action), tag)
                self._transfers[action] = _Transfer(action, request, size, is_send)
            elif action.kind in COMPUTE_KINDS:
                needs = tuple(
                    need for need in dependencies(action, schedule) if need.kind in RECV_KINDS
                )
                self.receives_of[action] = needs
                self.done_with[action] = tuple(
                    need for need in needs if last_reader[need] is action
                )
                for need in self.done_with[action]:
                    buffer = taken.pop(need)
                    free[len(buffer)].append(buffer)

    def post(self, action: Action) -> None:
        """Post a send or a receive."""
        transfer = self._transfers[action]
        transfer.arrived_ns = None
        transfer.posted_ns = time.perf_counter_ns()
        transfer.request.Start()
        self.recorder.count_bytes(transfer.num_bytes)
        self._under_way.append(transfer)

    def poll(self) -> None:
        """Let messages move, and record which have left or arrived."""
        done = [transfer for transfer in self._under_way if transfer.request.Test()]
        if not done:
            return
        arrived_ns = time.perf_counter_ns() + self._link_ns
        self._under_way = [transfer for transfer in self._under_way if transfer not in done]
        for transfer in done:
            transfer.arrived_ns = arrived_ns
            if transfer.is_send:
                self.recorder.count_bytes(-transfer.num_bytes)
            self.recorder.span(
                transfer.action, LINK, transfer.posted_ns, arrived_ns, transfer.num_bytes
            )

    def arrived_ns(self, receive: Action) -> int | None:
        """Return when a message arrives or has arrived; None while it is not seen."""
        return self._transfers[receive].arrived_ns

    def release(self, receive: Action) -> None:
        """Count a receive's buffer as free again."""
        self.recorder.count_bytes(-self._transfers[receive].num_bytes)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is under way."""
        return not self._under_way

    def close(self) -> None:
        """Free the requests; nothing may be under way."""
        for transfer in self._transfers.values():
            transfer.request.Free()
        self._transfers.clear()


class EmulatedSums:
    """Sums gradients of a rank over its peers, of which there may be none.

    Without bytes the peers only meet.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        peers: Transport,
        stage_bytes: Sequence[float],
        recorder: Recorder,
    ) -> None:
        self._schedule = schedule
        self._peers = peers
        self._recorder = recorder
        self._counts = [round(num_bytes) // 4 for num_bytes in stage_bytes] or [
            0
        ] * schedule.num_stages
        self._used = 0
        counts = [self._counts[stage] for _, stage in schedule.placement.stages_on(rank)]
        self._gradients = np.zeros(sum(counts), np.float32)
        self._under_way: list[tuple[Action, Request, int]] = []

    def start(self, action: Action) -> None:
        """Post the sum of a stage's gradients."""
        if self._peers.size > 1 and self._counts[action.stage]:
            request = self._post([action.stage])
            self._under_way.append((action, request, time.perf_counter_ns()))

    def poll(self) -> None:
        """Let sums move, and record those that have ended."""
        while self._under_way and self._under_way[0][1].Test():
            action, _, posted_ns = self._under_way.pop(0)
            self._recorder.transfer(action, posted_ns, 4 * self._counts[action.stage])

    def finish(self, action: Action) -> None:
        """Sum the rest, and return when all of it is summed."""
        if self._peers.size > 1 and len(self._gradients):
            self._peers.wait_sum(self._post(stages_summed(action, self._schedule)))
        elif self._peers.size > 1:
            self._peers.barrier()
        for _, request, _ in self._under_way:
            self._peers.wait_sum(request)
        self.poll()
        self._used = 0

    def _post(self, stages: Iterable[int]) -> Request:
        begin = self._used
        self._used += sum(self._counts[stage] for stage in stages)
        return self._peers.post_sum(self._gradients[begin : self._used])


@dataclass(frozen=True, slots=True)
class EmulatedDevice:
    """What the actions of a rank take on its device.

    `costs` are in seconds and units of `activation_bytes`. At most `cap` units of activations are
    held: an action that allocates some waits for copies to host memory. `pace` makes this rank
    slower than the costs, or makes it wait for its inputs.
    """

    costs: StageCosts
    activation_bytes: int = 0
    cap: float | None = None
    pace: Pace = EVEN


class EmulatedExecutor:
    """Runs one rank's actions on an emulated device.

    The device has one compute stream and a copy engine in each direction. `sums` are the sums of
    gradients, if the schedule has any.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        device: EmulatedDevice,
        channels: EmulatedChannels,
        waiter: Waiter,
        sums: EmulatedSums | None = None,
        heartbeat: Heartbeat | None = None,
    ) -> None:
        actions = schedule.rank_schedules[rank]
        costs = device.costs
        self._schedule = schedule
        self._rank = rank
        self._device = device
        self._channels = channels
        self._waiter = waiter
        self._recorder = channels.recorder
        self._sums = sums
        pace = device.pace
        self._time_ns = {
            action: round(costs.time(action) * pace.factor(rank, action) * 1e9)
            for action in actions
        }
        self._inputs_ns = {
            action: round(time * 1e9) for action, time in pace.inputs_ready(schedule, rank).items()
        }
        self._copies_of = {
            action: tuple(
                need for need in dependencies(action, schedule) if need.kind in COPY_KINDS
            )
            for action in actions
        }
        self._ledger = Ledger(schedule, costs)
        self._free_ns = self._begin_ns = 0
        self._engine_free_ns: dict[Kind, int] = {}
        self._copy_end_ns: dict[Action, int] = {}
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        handlers = (
            dict.fromkeys((Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.STEP), self._compute)
            | dict.fromkeys(SEND_KINDS | RECV_KINDS, channels.post)
            | dict.fromkeys(COPY_KINDS, self._copy)
            | dict.fromkeys(WAIT_KINDS, self._wait)
        )
        if sums is not None:
            handlers |= {Kind.START_REDUCE: sums.start, Kind.REDUCE_GRAD: self._reduce}
        self._loop = ActionLoop(rank, actions, handlers, self._poll, heartbeat)

    def run(self, step: int) -> None:
        """Run all actions once, until the last message has left."""
        self._recorder.begin_step(step)
        self._ledger = Ledger(self._schedule, self._device.costs, self._device.cap)
        self._engine_free_ns.clear()
        self._copy_end_ns.clear()
        with realtime_priority():
            self._free_ns = self._begin_ns = time.perf_counter_ns()
            self._loop.run(step)
            self._waiter.wait_until(lambda: self._channels.is_idle, "sends to leave")
        self._run_due(None)
        self._recorder.end_step()

    def _compute(self, action: Action) -> None:
        begin_ns = self._ready_ns(action)
        for receive in self._channels.receives_of.get(action, ()):
            begin_ns = max(begin_ns, self._wait_for(receive))
        ready_ns = self._begin_ns + self._inputs_ns.get(action, 0)
        if ready_ns > begin_ns:
            self._recorder.waited(self._recorder.step, begin_ns, ready_ns, action)
            begin_ns = ready_ns
        begin_ns = round(self._ledger.take(self._rank, action, begin_ns))
        self._run_due(begin_ns)
        self._recorder.count_bytes(self._bytes(self._ledger.brings(action)))
        end_ns = begin_ns + self._time_ns[action]
        self._waiter.wait_until_time(end_ns)
        self._run_due(end_ns)
        self._ledger.give(action)
        self._recorder.count_bytes(-self._bytes(self._ledger.leaves(action)))
        for receive in self._channels.done_with.get(action, ()):
            self._channels.release(receive)
        self._recorder.span(action, COMPUTE, begin_ns, end_ns)
        self._free_ns = end_ns

    def _ready_ns(self, action: Action) -> int:
        """Return when the device is free and the copies that an action needs have ended."""
        return max((self._free_ns, *(self._copy_end_ns[copy] for copy in self._copies_of[action])))

    def _wait_for(self, receive: Action) -> int:
        """Wait until a message is seen and return when it arrives."""
        arrived_ns = self._channels.arrived_ns
        if arrived_ns(receive) is None:
            self._waiter.wait_until(lambda: arrived_ns(receive) is not None, receive)
        return arrived_ns(receive) or 0

    def _copy(self, action: Action) -> None:
        """Plan a copy on its engine; its end is known at once, and the rank goes on."""
        begin_ns = max(self._ready_ns(action), self._engine_free_ns.get(action.kind, 0))
        size = self._bytes(self._device.costs.moved(action))
        is_out = action.kind is Kind.OFFLOAD
        is_freed = is_out and not self._schedule.has(Kind.FREE, *action[1:])
        if not is_out:
            begin_ns = round(self._ledger.take(self._rank, action, begin_ns))
            self._schedule_at(begin_ns, lambda: self._recorder.count_bytes(size))
        end_ns = begin_ns + self._time_ns[action]
        if is_out:
            self._ledger.give_at(action, end_ns)
        self._engine_free_ns[action.kind] = self._copy_end_ns[action] = end_ns

        def end() -> None:
            self._recorder.count_host_bytes(size if is_out else -size)
            if is_freed:
                self._recorder.count_bytes(-size)
            self._recorder.span(action, COPY_OUT if is_out else COPY_IN, begin_ns, end_ns, size)

        self._schedule_at(end_ns, end)

    def _wait(self, action: Action) -> None:
        """Wait for a copy to end, and free what one to the host has moved."""
        end_ns = self._ready_ns(action)
        self._waiter.wait_until_time(end_ns)
        self._run_due(end_ns)
        self._ledger.give(action)
        self._recorder.count_bytes(-self._bytes(self._ledger.leaves(action)))
        self._free_ns = end_ns

    def _bytes(self, activations: float) -> int:
        return round(activations * self._device.activation_bytes)

    def _schedule_at(self, time_ns: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_ns, next(self._order), act))

    def _run_due(self, time_ns: int | None) -> None:
        """Run what is scheduled up to a time, or all of it."""
        while self._due and (time_ns is None or self._due[0][0] <= time_ns):
            heapq.heappop(self._due)[2]()

    def _poll(self) -> None:
        self._channels.poll()
        if self._sums is not None:
            self._sums.poll()

    def _reduce(self, action: Action) -> None:
        begin_ns = self._free_ns
        assert self._sums is not None
        self._sums.finish(action)
        self._free_ns = max(begin_ns, time.perf_counter_ns())
        self._recorder.span(action, COMPUTE, begin_ns, self._free_ns)

"""The emulated device: compute is a timed wait from the cost model, messages are real. Needs no torch.

Time on the device is kept beside the host's: an action begins when the one before it was planned to end and its data
has come, and ends its cost later, so that a host that wakes up late does not make the device slower.
"""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable

from gems.engine.action_loop import Loop
from gems.engine.emulation.channels import EmulatedLinks
from gems.engine.supervision.recorder import COMPUTE, COPY_IN, COPY_OUT, Recorder
from gems.engine.transport.polling import Patience, promptly
from gems.runs.heartbeat import Heartbeat
from gems.schedule.action import COPY_KINDS, Action, Kind
from gems.schedule.costs import StageCosts
from gems.schedule.dependencies import dependencies
from gems.schedule.ledger import Ledger
from gems.schedule.pace import EVEN, Pace
from gems.schedule.schedule import Schedule


class Holdings:
    """Bytes that an emulated rank would hold on its device, and the most of them so far."""

    def __init__(self) -> None:
        self.held_bytes = self.peak_bytes = 0

    def hold(self, num_bytes: int) -> None:
        """Count bytes that came (above 0) or went (below 0)."""
        self.held_bytes += num_bytes
        self.peak_bytes = max(self.peak_bytes, self.held_bytes)


class Emulated:
    """Runs one rank's row on an emulated device with one compute stream and a copy engine each way.

    Args:
        schedule: lowered.
        rank: the rank's place in the pipeline.
        costs: of the schedule's stages, in units.
        unit_s: how long a unit of time is.
        activation_bytes: how large a unit of activations is.
        cap: the most activations held, in units; what brings some waits for copies to host memory to make room.
        links: the rank's messages.
        patience: how the rank waits; it polls the links.
        recorder: gets the events.
        reduce: sums the gradients with the peers, and returns when that is done.
        heartbeat: marks each action.
        pace: what makes this rank slower than the costs, or lets it wait for its inputs.
    """

    def __init__(
        self,
        schedule: Schedule,
        rank: int,
        costs: StageCosts,
        unit_s: float,
        activation_bytes: int,
        cap: float | None,
        links: EmulatedLinks,
        patience: Patience,
        recorder: Recorder,
        reduce: Callable[[], None],
        heartbeat: Heartbeat | None = None,
        pace: Pace = EVEN,
    ) -> None:
        row = schedule.rows[rank]
        self._schedule, self._rank, self._costs, self._cap = schedule, rank, costs, cap
        self._links, self._patience, self._recorder, self._reduce_all = links, patience, recorder, reduce
        self._time_ns = {action: round(costs.time(action) * pace.factor(rank, action) * unit_s * 1e9) for action in row}
        self._inputs_ns = {
            action: round(time * unit_s * 1e9) for action, time in pace.inputs_ready(schedule, rank).items()
        }
        self._copies_of = {
            action: tuple(need for need in dependencies(action, schedule) if need.kind in COPY_KINDS) for action in row
        }
        counter = Ledger(schedule, costs)
        self._brings = {action: round(counter.brings(action) * activation_bytes) for action in row}
        self._leaves = {action: round(counter.leaves(action) * activation_bytes) for action in row}
        self._copied_bytes = {
            action: round(costs.activation[action.stage] * activation_bytes)
            for action in row
            if action.kind in COPY_KINDS
        }
        self._ledger = counter
        self._free_ns = self._begin_ns = 0
        self._engines: dict[Kind, int] = {}
        self._copied: dict[Action, int] = {}
        self._due: list[tuple[int, int, Callable[[], None]]] = []
        self._order = itertools.count()
        self._loop = Loop(
            rank,
            row,
            dict.fromkeys((Kind.F, Kind.B, Kind.I, Kind.W, Kind.R, Kind.STEP), self._compute)
            | dict.fromkeys((Kind.SEND_F, Kind.SEND_B, Kind.RECV_F, Kind.RECV_B), links.post)
            | dict.fromkeys(COPY_KINDS, self._copy)
            | {Kind.REDUCE_GRAD: self._reduce},
            links.poll,
            heartbeat,
        )

    def run(self, step: int) -> None:
        """Run the row once, to the last message."""
        self._recorder.begin_step(step)
        self._ledger = Ledger(self._schedule, self._costs, self._cap)
        self._engines.clear()
        self._copied.clear()
        with promptly():
            self._free_ns = self._begin_ns = time.perf_counter_ns()
            self._loop.run(step)
            self._patience.for_(lambda: self._links.is_quiet, "sends to leave")
        self._settle_copies(None)
        self._recorder.end_step()

    def _compute(self, action: Action) -> None:
        begin_ns = max((self._free_ns, *(self._copied[copy] for copy in self._copies_of[action])))
        receives = self._links.receives_of.get(action, ())
        for receive in receives:
            begin_ns = max(begin_ns, self._arrival_of(receive))
        ready_ns = self._begin_ns + self._inputs_ns.get(action, 0)
        if ready_ns > begin_ns:
            self._recorder.waited(self._recorder.step, begin_ns, ready_ns, action)
            begin_ns = ready_ns
        begin_ns = round(self._ledger.take(self._rank, action, begin_ns))
        self._settle_copies(begin_ns)
        self._recorder.hold(self._brings[action])
        end_ns = begin_ns + self._time_ns[action]
        self._patience.until(end_ns)
        self._settle_copies(end_ns)
        self._ledger.give(action)
        self._recorder.hold(-self._leaves[action])
        for receive in self._links.done_with.get(action, ()):
            self._links.release(receive)
        self._recorder.span(action, COMPUTE, begin_ns, end_ns)
        self._free_ns = end_ns

    def _arrival_of(self, receive: Action) -> int:
        """Wait for a message and gives when it was seen."""
        arrived_ns = self._links.arrived_ns
        if arrived_ns(receive) is None:
            self._patience.for_(lambda: arrived_ns(receive) is not None, receive)
        return arrived_ns(receive) or 0

    def _copy(self, action: Action) -> None:
        """Plan a copy on its engine, whose time is known at once; the rank goes on."""
        begin_ns = max((
            self._free_ns, self._engines.get(action.kind, 0), *(self._copied[copy] for copy in self._copies_of[action]),
        ))  # fmt: skip
        size, is_out = self._copied_bytes[action], action.kind is Kind.OFFLOAD
        if not is_out:
            begin_ns = round(self._ledger.take(self._rank, action, begin_ns))
            self._when(begin_ns, lambda: self._recorder.hold(size))
        end_ns = begin_ns + self._time_ns[action]
        if is_out:
            self._ledger.give_at(action, end_ns)
        self._engines[action.kind] = self._copied[action] = end_ns

        def end() -> None:
            self._recorder.hold_on_host(size if is_out else -size)
            if is_out:
                self._recorder.hold(-size)
            self._recorder.span(action, COPY_OUT if is_out else COPY_IN, begin_ns, end_ns, size)

        self._when(end_ns, end)

    def _when(self, time_ns: int, act: Callable[[], None]) -> None:
        heapq.heappush(self._due, (time_ns, next(self._order), act))

    def _settle_copies(self, time_ns: int | None) -> None:
        """Count what copies have brought and let go up to a time, or all of it."""
        while self._due and (time_ns is None or self._due[0][0] <= time_ns):
            heapq.heappop(self._due)[2]()

    def _reduce(self, action: Action) -> None:
        begin_ns = self._free_ns
        self._reduce_all()
        self._free_ns = max(begin_ns, time.perf_counter_ns())
        self._recorder.span(action, COMPUTE, begin_ns, self._free_ns)

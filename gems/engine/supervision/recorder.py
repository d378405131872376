"""The recorder: times a rank's actions and counts its memory, for its part of the trace.

It needs torch only on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

from gems.schedule.action import Action
from gems.trace import KINDS, STREAMS

if TYPE_CHECKING:
    import torch

COMPUTE = STREAMS.index("compute")
LINK = STREAMS.index("link")
COPY_OUT = STREAMS.index("copy_out")
COPY_IN = STREAMS.index("copy_in")
_CODES = {kind: code for code, kind in enumerate(KINDS)}
Timestamp = Any  # host nanoseconds, or a torch.cuda.Event


class MemoryCounter:
    """The bytes held now and their peak; all changes are passed on to `total` too."""

    def __init__(self, total: Callable[[int], None] | None = None) -> None:
        self._total = total
        self.held_bytes = self.peak_bytes = 0

    def count_bytes(self, num_bytes: int) -> None:
        """Count bytes that were allocated (above 0) or freed (below 0)."""
        if not num_bytes:
            return
        self.held_bytes += num_bytes
        if self.held_bytes > self.peak_bytes:
            self.peak_bytes = self.held_bytes
        if self._total is not None:
            self._total(num_bytes)

    def set_bytes(self, held_bytes: int) -> None:
        """Replace the bytes held now."""
        if held_bytes != self.held_bytes:
            self.count_bytes(held_bytes - self.held_bytes)


class EventSink(Protocol):
    """A sink for the rows of a rank's events: the rank's part of the trace."""

    rank: int

    def add(self, table: str, row: tuple[Any, ...]) -> None:
        """Add one row to a table of the trace."""


class Recorder:
    """Writes the events of a rank to its part of the trace.

    Events timed by the host's clock are written at once. Compute on a GPU is timed by CUDA events,
    which are read at the end of the step and converted to the host's clock by one event of known
    time.

    Attributes:
        memory: Bytes counted on the device, which events show. Torch's allocator also holds
            workspaces of libraries; its peaks are attributes of the rank's part of the trace.
        weights: The part of `memory` for parameters, their gradients, and buffers.
        optimizer: The part of `memory` for the optimizer's state.
    """

    def __init__(self, part: EventSink | None, device: torch.device | None = None) -> None:
        self._part = part
        self._device = device
        self._cuda: Any = None
        if device is not None and device.type == "cuda":
            import torch

            self._cuda = torch.cuda
        self.memory = MemoryCounter()
        self.count_bytes = self.memory.count_bytes
        self._counters: list[tuple[str, MemoryCounter]] = []
        self.weights, self.optimizer = (
            self.open_counter("weights"),
            self.open_counter("optimizer state"),
        )
        self._host_bytes = 0
        self._spans: list[tuple[Action, int, Timestamp, Timestamp, int, int, int]] = []
        self._base: tuple[Timestamp, int] | None = None
        self.step = -1
        self.is_on = part is not None

    @property
    def device(self) -> torch.device | None:
        """Return the device whose bytes are counted; None if compute is emulated."""
        return self._device

    def open_counter(self, name: str) -> MemoryCounter:
        """Return a new counter for one kind of bytes, which are counted in `memory` too."""
        counter = MemoryCounter(self.count_bytes)
        self._counters.append((name, counter))
        return counter

    def held_by_kind(self) -> dict[str, int]:
        """Return the bytes counted now, by the names of their counters.

        Bytes without a counter belong to tensors between stages and are listed as messages.
        """
        held: dict[str, int] = {}
        for name, counter in self._counters:
            held[name] = held.get(name, 0) + counter.held_bytes
        return held | {"messages": self.memory.held_bytes - sum(held.values())}

    def count_host_bytes(self, num_bytes: int) -> None:
        """Count bytes copied from the device to host memory (above 0), or back (below 0)."""
        self._host_bytes += num_bytes

    def begin_step(self, step: int) -> None:
        """Set the step of the next events."""
        self.step = step
        if self._cuda is not None:
            # the time of an idle stream is known; copies may go on
            stream = self._cuda.current_stream(self._device)
            if not stream.query():
                stream.synchronize()
            self._base = (self.timestamp(), time.perf_counter_ns())

    def synchronize(self) -> None:
        """Wait until the device has done all posted work, so that the host's clock is right."""
        if self._cuda is not None:
            self._cuda.synchronize(self._device)

    def timestamp(self) -> Timestamp:
        """Return a timestamp of the compute stream."""
        if self._cuda is None:
            return time.perf_counter_ns()
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def compute(self, action: Action, start: Timestamp) -> None:
        """Record an action of the compute stream from `start` to now."""
        if self.is_on:
            self.span(action, COMPUTE, start, self.timestamp())

    def transfer(self, action: Action, posted_ns: int, moved_bytes: int) -> None:
        """Record a transfer from its posting to now."""
        self.span(action, LINK, posted_ns, time.perf_counter_ns(), moved_bytes)

    def span(
        self, action: Action, stream: int, start: Timestamp, end: Timestamp, moved_bytes: int = 0
    ) -> None:
        """Record an action between two timestamps.

        Timestamps of a GPU, which it may not have reached yet, are written at the end of the step.
        """
        if self.is_on:
            row = (
                action,
                stream,
                start,
                end,
                moved_bytes,
                self.memory.held_bytes,
                self._host_bytes,
            )
            if isinstance(start, int):
                self._write(*row)
            else:
                self._spans.append(row)

    def waited(self, step: int, start_ns: int, end_ns: int, read: Action | None = None) -> None:
        """Record a wait for the input of the forward `read`, or of the whole step if it is None."""
        if self._part is not None and self.is_on:
            stage, direction = (-1, 0) if read is None else (read.stage, read.direction)
            micro_batch = -1 if read is None or read.micro_batch is None else read.micro_batch
            held = (self.memory.held_bytes, self._host_bytes)
            place = (_CODES["INPUT"], stage, -1, direction, micro_batch, COMPUTE)
            self._part.add("events", (self._part.rank, step, *place, start_ns, end_ns, 0, *held))

    def end_step(self) -> int:
        """Write the events of the step that are not in the trace part yet.

        Return the host's time in nanoseconds at which the device had done all of them.
        """
        self.synchronize()
        end_ns = time.perf_counter_ns()
        spans = self._spans
        self._spans = []
        for action, stream, start, end, *counted in spans:
            self._write(action, stream, self._ns(start), self._ns(end), *counted)
        return end_ns

    def _write(
        self, action: Action, stream: int, start_ns: int, end_ns: int, *counted: int
    ) -> None:
        if self._part is None:
            return
        kind, stage, micro_batch, direction, segment = action
        place = (
            _CODES[kind.value],
            stage,
            -1 if segment is None else segment,
            direction,
            -1 if micro_batch is None else micro_batch,
            stream,
        )
        self._part.add("events", (self._part.rank, self.step, *place, start_ns, end_ns, *counted))

    def _ns(self, timestamp: Timestamp) -> int:
        assert self._base is not None
        event, host_ns = self._base
        return int(host_ns + round(event.elapsed_time(timestamp) * 1e6))

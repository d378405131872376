"""The recorder: times what a rank does and counts what it holds, for its part of the trace.

Needs torch on a GPU only.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Protocol

from gems.schedule.action import Action
from gems.trace import KINDS, STREAMS

if TYPE_CHECKING:
    import torch

COMPUTE, LINK = STREAMS.index("compute"), STREAMS.index("link")
COPY_OUT, COPY_IN = STREAMS.index("copy_out"), STREAMS.index("copy_in")
INPUT = KINDS.index("INPUT")
_CODES = {kind: code for code, kind in enumerate(KINDS)}
Timestamp = Any  # host nanoseconds on a CPU, a torch.cuda.Event on a GPU


class DeviceMemory(Protocol):
    """Counts the bytes held on a device."""

    def count_bytes(self, num_bytes: int) -> None:
        """Count bytes that were allocated (above 0) or freed (below 0)."""

    @property
    def held_bytes(self) -> int:
        """Device bytes held now."""


class EventSink(Protocol):
    """Takes the rows of a rank's events: its part of the trace."""

    rank: int

    def add(self, table: str, row: tuple[Any, ...]) -> None:
        """Add one row to a table of the trace."""


class Recorder:
    """Keeps the events of a step in memory, and writes them when it ends.

    Compute on a GPU is timed by CUDA events, read at the end of the step and converted to the host's clock by one
    event of known time.
    """

    def __init__(self, part: EventSink | None, memory: DeviceMemory, device: torch.device | None = None) -> None:
        self._part = part
        self._memory = memory
        self._device = device
        self._cuda: Any = None
        if device is not None and device.type == "cuda":
            import torch

            self._cuda = torch.cuda
        self._spans: list[tuple[Action, int, Timestamp, Timestamp, int, int, int]] = []
        self._base: tuple[Timestamp, int] | None = None
        self._host_bytes = 0
        self.step = -1
        self.is_on = part is not None

    def now(self) -> int:
        """Return the host's monotonic time in ns."""
        return time.perf_counter_ns()

    def count_bytes(self, num_bytes: int) -> None:
        """Count bytes that were allocated (above 0) or freed (below 0) on the device."""
        self._memory.count_bytes(num_bytes)

    def count_host_bytes(self, num_bytes: int) -> None:
        """Count bytes that were copied from the device to host memory (above 0), or back (below 0)."""
        self._host_bytes += num_bytes

    def begin_step(self, step: int) -> None:
        """Set the step that the next events belong to."""
        self.step = step
        if self._cuda is not None:
            self.synchronize()
            self._base = (self.timestamp(), time.perf_counter_ns())

    def synchronize(self) -> None:
        """Wait until the device has done all that was posted, so that the host's clock is right."""
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
            self.stamped(action, COMPUTE, start, self.timestamp())

    def stamped(self, action: Action, stream: int, start: Timestamp, end: Timestamp, moved_bytes: int = 0) -> None:
        """Record an action between two timestamps of its stream, which a GPU may not have reached yet."""
        if self.is_on:
            held = (self._memory.held_bytes, self._host_bytes)
            self._spans.append((action, stream, start, end, moved_bytes, *held))

    def transfer(self, action: Action, posted_ns: int, moved_bytes: int) -> None:
        """Record a transfer from its posting to now."""
        if self.is_on:
            self._add(
                action, LINK, posted_ns, time.perf_counter_ns(), moved_bytes, self._memory.held_bytes, self._host_bytes
            )

    def span(self, action: Action, stream: int, start_ns: int, end_ns: int, moved_bytes: int = 0) -> None:
        """Record an action between two times of the host's clock, on one of the trace's streams."""
        if self.is_on:
            self._add(action, stream, start_ns, end_ns, moved_bytes, self._memory.held_bytes, self._host_bytes)

    def waited(self, step: int, start_ns: int, end_ns: int, read: Action | None = None) -> None:
        """Record a wait for input: that of the forward `read`, or of the whole step if there is none."""
        if self._part is not None and self.is_on:
            stage, direction = (-1, 0) if read is None else (read.stage, read.direction)
            micro_batch = -1 if read is None or read.micro_batch is None else read.micro_batch
            held = (self._memory.held_bytes, self._host_bytes)
            self._part.add(
                "events",
                (self._part.rank, step, INPUT, stage, -1, direction, micro_batch, COMPUTE, start_ns, end_ns, 0, *held),
            )

    def end_step(self) -> None:
        """Write the events of the step to the trace part."""
        self.synchronize()
        for action, stream, start, end, *counted in self._spans:
            self._add(action, stream, self._ns(start), self._ns(end), *counted)
        self._spans.clear()

    def _ns(self, timestamp: Timestamp) -> int:
        if self._base is None or self._cuda is None:
            return int(timestamp)
        event, host_ns = self._base
        return int(host_ns + round(event.elapsed_time(timestamp) * 1e6))

    def _add(
        self,
        action: Action,
        stream: int,
        start_ns: int,
        end_ns: int,
        moved_bytes: int,
        device_bytes: int,
        host_bytes: int,
    ) -> None:
        if self._part is None:
            return
        kind, stage, micro_batch, direction, segment = action
        segment = -1 if segment is None else segment
        micro_batch = -1 if micro_batch is None else micro_batch
        self._part.add(
            "events",
            (self._part.rank, self.step, _CODES[kind.value], stage, segment, direction, micro_batch,
             stream, start_ns, end_ns, moved_bytes, device_bytes, host_bytes),
        )  # fmt: skip

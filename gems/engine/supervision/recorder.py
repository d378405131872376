"""The recorder: stamps what a rank does and holds, for its part of the trace. Needs torch on a GPU only."""

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
Mark = Any  # host nanoseconds on a processor, a torch.cuda.Event on a GPU


class Holdings(Protocol):
    """What counts the bytes on a device."""

    def hold(self, num_bytes: int) -> None:
        """Count bytes that came (above 0) or went (below 0)."""

    @property
    def held_bytes(self) -> int:
        """Device bytes held now."""


class EventSink(Protocol):
    """What takes the rows of a rank's events: its part of the trace."""

    rank: int

    def add(self, table: str, row: tuple[Any, ...]) -> None:
        """Keep one row of a table of the trace."""


class Recorder:
    """Keeps the events of a step in memory and writes them when it ends.

    On a GPU work runs behind the host's back, so compute is stamped with CUDA events, which are read when the step
    has ended and set against the host's clock by one event of known time. Without a device the host's clock counts.
    """

    def __init__(self, part: EventSink | None, ledger: Holdings, device: torch.device | None = None) -> None:
        self._part = part
        self._ledger = ledger
        self._device = device
        self._cuda: Any = None
        if device is not None and device.type == "cuda":
            import torch

            self._cuda = torch.cuda
        self._spans: list[tuple[Action, int, Mark, Mark, int, int, int]] = []
        self._base: tuple[Mark, int] | None = None
        self._host_bytes = 0
        self.step = -1
        self.is_on = part is not None

    def now(self) -> int:
        """Return the host's monotonic time in ns."""
        return time.perf_counter_ns()

    def hold(self, num_bytes: int) -> None:
        """Count bytes that came or went on the device."""
        self._ledger.hold(num_bytes)

    def hold_on_host(self, num_bytes: int) -> None:
        """Count bytes that came from the device to host memory, or went back."""
        self._host_bytes += num_bytes

    def begin_step(self, step: int) -> None:
        """Report which step the next events belong to."""
        self.step = step
        if self._cuda is not None:
            self.settle()
            self._base = (self.mark(), time.perf_counter_ns())

    def settle(self) -> None:
        """Wait until the device has done all that it was given, so that the host's clock tells when."""
        if self._cuda is not None:
            self._cuda.synchronize(self._device)

    def mark(self) -> Mark:
        """Stamp the present place in the compute stream."""
        if self._cuda is None:
            return time.perf_counter_ns()
        event = self._cuda.Event(enable_timing=True)
        event.record(self._cuda.current_stream(self._device))
        return event

    def compute(self, action: Action, start: Mark) -> None:
        """Record an action of the compute stream that began at `start` and ends now."""
        if self.is_on:
            self.stamped(action, COMPUTE, start, self.mark())

    def stamped(self, action: Action, stream: int, start: Mark, end: Mark, moved_bytes: int = 0) -> None:
        """Record an action between two stamps of its stream, which may still lie ahead on a GPU."""
        if self.is_on:
            held = (self._ledger.held_bytes, self._host_bytes)
            self._spans.append((action, stream, start, end, moved_bytes, *held))

    def transfer(self, action: Action, posted_ns: int, moved_bytes: int) -> None:
        """Record a transfer from its posting to now, when it is seen complete."""
        if self.is_on:
            self._add(
                action, LINK, posted_ns, time.perf_counter_ns(), moved_bytes, self._ledger.held_bytes, self._host_bytes
            )

    def span(self, action: Action, stream: int, start_ns: int, end_ns: int, moved_bytes: int = 0) -> None:
        """Record an action whose begin and end are known, on one of the trace's streams."""
        if self.is_on:
            self._add(action, stream, start_ns, end_ns, moved_bytes, self._ledger.held_bytes, self._host_bytes)

    def waited(self, step: int, start_ns: int, end_ns: int, read: Action | None = None) -> None:
        """Records that the rank waited for input: that of the forward `read`, or else of the whole of `step`."""
        if self._part is not None and self.is_on:
            stage, direction = (-1, 0) if read is None else (read.stage, read.direction)
            micro_batch = -1 if read is None or read.micro_batch is None else read.micro_batch
            held = (self._ledger.held_bytes, self._host_bytes)
            self._part.add(
                "events",
                (self._part.rank, step, INPUT, stage, -1, direction, micro_batch, COMPUTE, start_ns, end_ns, 0, *held),
            )

    def end_step(self) -> None:
        """Read the stamps of the step and hands the rows to the trace part."""
        self.settle()
        for action, stream, start, end, *counted in self._spans:
            self._add(action, stream, self._ns(start), self._ns(end), *counted)
        self._spans.clear()

    def _ns(self, mark: Mark) -> int:
        if self._base is None or self._cuda is None:
            return int(mark)
        event, host_ns = self._base
        return int(host_ns + round(event.elapsed_time(mark) * 1e6))

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

"""The recorder: stamps what a rank does and holds, for its part of the trace."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from gems.engine.ledger import Ledger
from gems.schedule.action import Action
from gems.trace import KINDS, STREAMS, TracePart

COMPUTE, LINK = STREAMS.index("compute"), STREAMS.index("link")
_CODES = {kind: code for code, kind in enumerate(KINDS)}
Mark = Any  # host nanoseconds on a processor, a torch.cuda.Event on a GPU


@dataclass(slots=True)
class _Span:
    action: Action
    start: Mark
    end: Mark
    device_bytes: int


class Recorder:
    """Keeps the events of a step in memory and writes them when it ends.

    On a GPU work runs behind the host's back, so compute is stamped with CUDA events, which are read when the step
    has ended and set against the host's clock by one event of known time.
    """

    def __init__(self, part: TracePart | None, ledger: Ledger, device: torch.device) -> None:
        self._part = part
        self._ledger = ledger
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._spans: list[_Span] = []
        self._base: tuple[Mark, int] | None = None
        self.step = -1
        self.is_on = part is not None

    def now(self) -> int:
        """Gives the host's monotonic time in ns."""
        return time.perf_counter_ns()

    def hold(self, num_bytes: int) -> None:
        """Counts bytes that came or went on the device."""
        self._ledger.hold(num_bytes)

    def begin_step(self, step: int) -> None:
        """Says which step the next events belong to."""
        self.step = step
        if self._is_cuda:
            self.settle()
            self._base = (self.mark(), time.perf_counter_ns())

    def settle(self) -> None:
        """Waits until the device has done all that it was given, so that the host's clock tells when."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def mark(self) -> Mark:
        """Stamps the present place in the compute stream."""
        if not self._is_cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def compute(self, action: Action, start: Mark) -> None:
        """Records an action of the compute stream that began at `start` and ends now."""
        if self.is_on:
            self._spans.append(_Span(action, start, self.mark(), self._ledger.held_bytes))

    def transfer(self, action: Action, posted_ns: int, moved_bytes: int) -> None:
        """Records a transfer from its posting to now, when it is seen complete."""
        if self.is_on:
            self._add(action, LINK, posted_ns, time.perf_counter_ns(), moved_bytes, self._ledger.held_bytes)

    def end_step(self) -> None:
        """Reads the stamps of the step and hands the rows to the trace part."""
        self.settle()
        for span in self._spans:
            self._add(span.action, COMPUTE, self._ns(span.start), self._ns(span.end), 0, span.device_bytes)
        self._spans.clear()

    def _ns(self, mark: Mark) -> int:
        if self._base is None or not self._is_cuda:
            return int(mark)
        event, host_ns = self._base
        return int(host_ns + round(event.elapsed_time(mark) * 1e6))

    def _add(
        self, action: Action, stream: int, start_ns: int, end_ns: int, moved_bytes: int, device_bytes: int
    ) -> None:
        if self._part is None:
            return
        segment = -1 if action.segment is None else action.segment
        micro_batch = -1 if action.micro_batch is None else action.micro_batch
        self._part.add(
            "events",
            (self._part.rank, self.step, _CODES[action.kind.value], action.stage, segment, action.direction, micro_batch,
             stream, start_ns, end_ns, moved_bytes, device_bytes, 0),
        )  # fmt: skip

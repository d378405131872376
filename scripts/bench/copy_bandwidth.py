"""Copy bandwidth between a GPU and pinned host memory: each way alone, and both at once on streams of their own."""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch
from torch import Tensor

MIB = 2**20
SIZES_BYTES = (MIB, 16 * MIB, 256 * MIB)
ROUND_BYTES = 2**30  # what one timing moves at least
ROUNDS = 7


@dataclass(frozen=True, slots=True)
class Bandwidth:
    """Bytes per second by the size of a copy; `duplex` ones while the other way is busy too."""

    copy_bytes: int
    d2h_bytes_per_s: float
    h2d_bytes_per_s: float
    duplex_d2h_bytes_per_s: float
    duplex_h2d_bytes_per_s: float


def bandwidth(device: torch.device, copy_bytes: int) -> Bandwidth:
    """Measure copies of one size, as the median of several timings."""
    lane_out, lane_in = _Lane(device, copy_bytes, is_out=True), _Lane(device, copy_bytes, is_out=False)
    for lane in (lane_out, lane_in):
        lane.post(1)
    torch.cuda.synchronize(device)
    alone: list[tuple[float, float]] = []
    both: list[tuple[float, float]] = []
    count = max(1, ROUND_BYTES // copy_bytes)
    for _ in range(ROUNDS):
        alone.append((_rates([lane_out], count, device)[0], _rates([lane_in], count, device)[0]))
        out, back = _rates([lane_out, lane_in], count, device)
        both.append((out, back))
    return Bandwidth(
        copy_bytes,
        *(statistics.median(rates) for rates in zip(*alone, strict=True)),
        *(statistics.median(rates) for rates in zip(*both, strict=True)),
    )


class _Lane:
    """One way: a stream, a tensor on the device and a pinned one on the host."""

    def __init__(self, device: torch.device, copy_bytes: int, is_out: bool) -> None:
        self.copy_bytes = copy_bytes
        self.stream = torch.cuda.Stream(device)
        on_device = torch.zeros(copy_bytes, dtype=torch.uint8, device=device)
        on_host = torch.zeros(copy_bytes, dtype=torch.uint8, pin_memory=True)
        self._pair: tuple[Tensor, Tensor] = (on_host, on_device) if is_out else (on_device, on_host)

    def post(self, count: int) -> None:
        with torch.cuda.stream(self.stream):
            for _ in range(count):
                self._pair[0].copy_(self._pair[1], non_blocking=True)


def _rates(lanes: list[_Lane], count: int, device: torch.device) -> list[float]:
    """Return each lane's bytes per second while all of them copy; copies are posted in turn, a few at a time."""
    torch.cuda.synchronize(device)
    spans = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in lanes]
    for lane, (start, _) in zip(lanes, spans, strict=True):
        start.record(lane.stream)
    for _ in range(count):
        for lane in lanes:
            lane.post(1)
    for lane, (_, end) in zip(lanes, spans, strict=True):
        end.record(lane.stream)
    torch.cuda.synchronize(device)
    moved = count * lanes[0].copy_bytes
    return [moved / (start.elapsed_time(end) * 1e-3) for start, end in spans]

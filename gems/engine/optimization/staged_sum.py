"""A sum over ranks through memory of another place or type, bucket by bucket, so that copies and sums overlap."""

from __future__ import annotations

import torch
from torch import Tensor

from gems.engine.transport.links import Sums

BUCKET_ELEMENTS = 2**23  # of 4 or 8 bytes: a copy of milliseconds


class StagedSum:
    """Sums a tensor of a GPU in pinned host memory, or one of a low type in float32.

    Both ways have streams of their own: while ranks sum one bucket, the next ones leave, and earlier ones come back.
    """

    def __init__(self, tensor: Tensor, sums: Sums, elements: int = BUCKET_ELEMENTS) -> None:
        """Lay out the buckets of a flat tensor."""
        self._device, self._sums = tensor.device, sums
        in_place = _can_sum_at(self._device, sums)
        dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
        place = self._device if in_place else torch.device("cpu")
        staged = torch.empty(tensor.shape, dtype=dtype, device=place, pin_memory=not in_place)
        self._buckets = list(zip(torch.split(tensor, elements), torch.split(staged, elements), strict=True))
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        if not in_place:
            self._streams = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def run(self) -> None:
        """Sum the tensor in place, for the current stream; collective."""
        if self._streams is None:
            for bucket, staged in self._buckets:
                staged.copy_(bucket)
            requests = [self._sums.post_sum(staged) for _, staged in self._buckets]
            for request, (bucket, staged) in zip(requests, self._buckets, strict=True):
                self._sums.wait_sum(request)
                bucket.copy_(staged)
            return
        out, back = self._streams
        current = torch.cuda.current_stream(self._device)
        out.wait_stream(current)
        with torch.cuda.stream(out):
            left = [self._copy(bucket, staged) for bucket, staged in self._buckets]
        requests = []
        for event, (_, staged) in zip(left, self._buckets, strict=True):
            event.synchronize()
            requests.append(self._sums.post_sum(staged))
        with torch.cuda.stream(back):
            for request, (bucket, staged) in zip(requests, self._buckets, strict=True):
                self._sums.wait_sum(request)
                bucket.copy_(staged, non_blocking=True)
        current.wait_stream(back)

    def _copy(self, bucket: Tensor, staged: Tensor) -> torch.cuda.Event:
        staged.copy_(bucket, non_blocking=True)
        event: torch.cuda.Event = torch.cuda.current_stream(self._device).record_event()
        return event


def needs_staging(tensor: Tensor, sums: Sums) -> bool:
    """Return whether ranks cannot sum a tensor where it is, as what it is."""
    return not _can_sum_at(tensor.device, sums) or tensor.dtype not in (torch.float32, torch.float64)


def _can_sum_at(device: torch.device, sums: Sums) -> bool:
    return device.type == "cpu" or sums.sums_on_device

"""Sums of a flat tensor over ranks, which run while the rank computes."""

from __future__ import annotations

from collections import deque
from contextlib import nullcontext

import torch
from torch import Tensor

from gems.engine.transport.links import Request, Sums

BUCKET_ELEMENTS = 2**23  # 4 or 8 bytes per element: a bucket is copied in milliseconds


class FlatSum:
    """A sum of one flat tensor in place, step after step.

    All ranks start the same sums in the same order. If ranks cannot sum the tensor in its own
    memory and type, it is staged bucket by bucket: from a GPU in pinned host memory, a low type in
    float32. Copies in both directions have their own streams: while ranks sum one bucket, the next
    ones leave and earlier ones come back.
    """

    def __init__(self, tensor: Tensor, sums: Sums, elements: int = BUCKET_ELEMENTS) -> None:
        """Lay out the buckets."""
        self._device = tensor.device
        self._sums = sums
        self._buckets = [(tensor, tensor)]
        self._streams: tuple[torch.cuda.Stream, torch.cuda.Stream] | None = None
        self._leaving: deque[tuple[torch.cuda.Event, Tensor, Tensor]] = deque()
        self._coming: deque[tuple[Request, Tensor, Tensor]] = deque()
        in_place = self._device.type == "cpu" or sums.sums_on_device
        if in_place and tensor.dtype in (torch.float32, torch.float64):
            return
        dtype = torch.float64 if tensor.dtype is torch.float64 else torch.float32
        place = self._device if in_place else torch.device("cpu")
        staged = torch.empty(tensor.shape, dtype=dtype, device=place, pin_memory=not in_place)
        self._buckets = list(
            zip(torch.split(tensor, elements), torch.split(staged, elements), strict=True)
        )
        if not in_place:
            self._streams = torch.cuda.Stream(self._device), torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def start(self) -> None:
        """Begin the sum, after the work of the current stream; `finish` returns the tensor.

        Buckets that need no event are posted at once.
        """
        if self._streams is None:
            for bucket, staged in self._buckets:
                if staged is not bucket:
                    staged.copy_(bucket)
                self._post(bucket, staged)
            return
        self._streams[0].wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._streams[0]):
            for bucket, staged in self._buckets:
                staged.copy_(bucket, non_blocking=True)
                self._leaving.append(
                    (torch.cuda.current_stream(self._device).record_event(), bucket, staged)
                )

    def poll(self) -> bool:
        """Post the buckets that have left, and bring back those that are summed.

        Return whether all of the sum is posted, so that the next may be.
        """
        while self._leaving and self._leaving[0][0].query():  # type: ignore[no-untyped-call]
            self._post(*self._leaving.popleft()[1:])
        while self._coming and self._coming[0][0].Test():
            self._bring_next()
        return not self._leaving

    def post(self) -> None:
        """Post all buckets, each after it has left the device."""
        while self._leaving:
            event, bucket, staged = self._leaving.popleft()
            event.synchronize()
            self._post(bucket, staged)

    @property
    def is_over(self) -> bool:
        """Return whether all buckets are on their way back."""
        return not self._leaving and not self._coming

    def finish(self) -> None:
        """Bring back all buckets for the current stream."""
        self.post()
        while self._coming:
            self._bring_next()
        if self._streams is not None:
            torch.cuda.current_stream(self._device).wait_stream(self._streams[1])

    def _post(self, bucket: Tensor, staged: Tensor) -> None:
        self._coming.append((self._sums.post_sum(staged), bucket, staged))

    def _bring_next(self) -> None:
        request, bucket, staged = self._coming.popleft()
        self._sums.wait_sum(request)
        if staged is bucket:
            return
        with nullcontext() if self._streams is None else torch.cuda.stream(self._streams[1]):
            bucket.copy_(staged, non_blocking=True)

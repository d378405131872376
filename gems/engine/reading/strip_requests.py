"""What strips read of images and masks, and the requests of a step in the order of its reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from gems.data.micro_batch_reader import Part, ReadRequest
from gems.schedule.action import Kind
from gems.schedule.schedule import Schedule
from gems.streaming.block_plan import Box, is_empty

# one step's requests: by micro-batch, then windows of masks by None, then by `StripRead`
Requests = Sequence[tuple[Any, ReadRequest]]


class StripRead(NamedTuple):
    """A read of a strip: of the rows of its images, or of their masks; maybe to run it again."""

    strip: int
    is_again: bool
    is_mask: bool = False


@dataclass(frozen=True, slots=True)
class MaskParts:
    """The parts of masks whose losses are computed one by one, by strip of an image.

    Attributes:
        boxes: A part for each strip; some may be empty.
        are_weighed: Whether the weight of a step depends on its labels, which are read twice then.
    """

    boxes: Sequence[Box]
    are_weighed: bool

    def __iter__(self) -> Iterator[int]:
        """Iterate over the strips that have a part."""
        return (strip for strip, box in enumerate(self.boxes) if not is_empty(box))


def strip_reads(schedule: Schedule, rank: int) -> list[StripRead]:
    """Return what a rank may read of strips in each step, in order; nothing without strips."""
    ends = ((0, False), (schedule.num_stages - 1, True))
    return [
        StripRead(action.micro_batch, action.kind is Kind.R, is_mask)
        for action in schedule.rank_schedules[rank] * (schedule.num_strips > 1)
        if action.kind in (Kind.F, Kind.R) and action.micro_batch is not None
        for stage, is_mask in ends
        if action.stage == stage
    ]


@dataclass(frozen=True, slots=True)
class StripRequests:
    """Divides the requests of a step among its strips.

    Attributes:
        order: The reads of strips, in the order in which a step takes them.
        parts: The part of an image for each strip.
        masks: The part of a mask for each strip, if strips have losses of their own.
        as_bytes: Whether images are read as bytes.
    """

    order: Sequence[StripRead]
    parts: Sequence[Part]
    masks: MaskParts | None
    as_bytes: bool

    def __call__(self, requests: Requests) -> Requests:
        """Return requests of what is read whole, then windows of masks, then reads of strips."""
        by_micro_batch = dict(requests)
        kinds = {read.is_mask for read in self.order}
        whole = [
            replace(
                one,
                images=one.images and False not in kinds,
                labels=one.labels and True not in kinds,
                as_bytes=self.as_bytes,
            )
            for one in by_micro_batch.values()
        ]
        weighed = self.masks if True in kinds and self.masks and self.masks.are_weighed else ()
        windows = [
            self._of_strip(one, strip, is_mask=True)
            for one in by_micro_batch.values()
            if one.labels
            for strip in weighed
        ]
        strips = []
        for read in self.order:
            m, strip = divmod(read.strip, self._num_strips)
            strips.append((read, self._of_strip(by_micro_batch[m], strip, read.is_mask)))
        return [
            *(
                (m, one)
                for m, one in zip(by_micro_batch, whole, strict=True)
                if one.images or one.labels
            ),
            *((None, window) for window in windows),
            *strips,
        ]

    @property
    def _num_strips(self) -> int:
        return len(self.parts)

    def _of_strip(self, whole: ReadRequest, strip: int, is_mask: bool) -> ReadRequest:
        part = self.parts[strip]
        if is_mask:
            assert self.masks is not None
            part = tuple(self.masks.boxes[strip])
        return replace(whole, images=not is_mask, labels=is_mask, part=part, as_bytes=self.as_bytes)

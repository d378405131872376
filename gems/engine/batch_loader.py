"""Loads what a rank reads in each step, ahead of time, with torch's DataLoader.

It reads in worker processes, or in a thread if there are none.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import pairwise, product, tee
from queue import SimpleQueue
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_convert

from gems.config.schema import RunSpec
from gems.data import Dataset, Split, open_dataset
from gems.data.dataset import batch_indices, micro_batch_slice
from gems.data.micro_batch_reader import MicroBatchReader, Part, ReadRequest
from gems.engine.device import DTYPES, CopyIn
from gems.engine.executor import Batch
from gems.engine.reading.reader import Reader
from gems.engine.reading.strip_requests import (
    MaskParts,
    Requests,
    StripRead,
    StripRequests,
    strip_reads,
)
from gems.engine.transport.mpi import Comm, allgather
from gems.errors import ConfigError
from gems.plan.rank_plan import RankPlan
from gems.streaming.axis_rules import even_ends

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
Loaded = tuple[tuple[Any, ReadRequest], Any]  # the request, and what was read
T = TypeVar("T")
_as_tensors: Any = default_convert


@dataclass(frozen=True, slots=True)
class ReadShare:
    """What a rank reads in each step.

    Images of the micro-batches that start there, and labels of those that end there. If images run
    in strips, `strips` are those of which it reads rows of images or masks, in order: once for the
    forward, and once more if the strip is run again.
    """

    replica: int = 0
    images: Collection[int] = ()
    labels: Collection[int] = ()
    strips: Sequence[StripRead] = ()

    @classmethod
    def of(cls, plan: RankPlan, rank: int) -> ReadShare:
        """Return the share of a rank of the run."""
        schedule = plan.schedule
        replica, index = plan.position(rank)
        rank_of = schedule.placement.rank_of
        images, labels = (
            [
                m
                for m, way in sorted(schedule.whole_directions().items())
                if rank_of(way, s) == index
            ]
            for s in (0, schedule.num_stages - 1)
        )
        return cls(replica, images, labels, strip_reads(schedule, index))


class BatchLoader:
    """Loads images of the micro-batches that start on this rank and labels of those that end on it.

    Both ranks draw the same samples from the seed, so no rank sends samples. A rank with neither
    the first nor the last stage needs no dataset. The samples depend only on the seed and the step,
    not on the process that loads them.

    Attributes:
        num_train, num_validation: The numbers of samples.
    """

    def __init__(
        self,
        spec: RunSpec,
        dataset: Dataset | None,
        share: ReadShare,
        device: torch.device,
        first_step: int = 0,
        masks: MaskParts | None = None,
    ) -> None:
        """Begin to load ahead; strips are read as rows if the source can read rows.

        So are `masks`, if the loss of a strip needs no other.
        """
        self._spec = spec
        self._share = share
        self.dataset = dataset
        self._data = cast(Dataset, dataset)  # every rank that reads has one
        self._device = device
        self._copies = CopyIn(device) if device.type == "cuda" else None
        self.reads = bool(share.images or share.labels)
        self._dtype = DTYPES[spec.train.compute_dtype]
        self._is_channels_last = spec.machine.channels_last
        self._collate = partial(
            _collate, self._dtype, self._is_channels_last, spec.data.num_classes
        )
        self._scale: tuple[Tensor, ...] | None = None  # of bytes
        self._train: Steps | None = None
        self._validation_reader: Reader | None = None
        self.num_train = self.num_validation = 0
        if dataset is not None:
            self.num_train = dataset.num_train
            self.num_validation = dataset.num_validation
        if not self.reads or first_step >= spec.train.steps:
            return
        steps = first_step, spec.train.steps
        self._train = self._steps("train", self._requests, share.strips, steps, masks)

    @classmethod
    def open(
        cls,
        plan: RankPlan,
        comm: Comm,
        device: torch.device,
        first_step: int = 0,
        view: Callable[[Dataset], Dataset] | None = None,
        masks: MaskParts | None = None,
    ) -> BatchLoader:
        """Open the data of a run, or a `view` of it, if this rank reads any; collective."""
        spec = plan.spec
        share = ReadShare.of(plan, comm.rank)
        dataset = None
        if share.images or share.labels:
            dataset = open_dataset(spec.data, spec.seed)
            dataset = dataset if view is None else view(dataset)
        loader = cls(spec, dataset, share, device, first_step, masks)
        counts = loader.num_train, loader.num_validation
        # from a rank that reads, which rank 0 need not
        loader.num_train, loader.num_validation = max(allgather(comm, counts))
        return loader

    def batch(self, step: int) -> Batch:
        """Return the batch of a training step, on the rank's device."""
        if self._train is None:
            return Batch({}, {})
        return self._on_device(self._train.get(step), partial(self._requests, step))

    def close(self) -> None:
        """Stop loading ahead."""
        if self._train is not None:
            self._train.close()
            self._train.reader.end()
        if self._validation_reader is not None:
            self._validation_reader.end()

    def _requests(self, step: int) -> Requests:
        """Return what this rank reads in a training step."""
        parallel = self._spec.parallel
        samples = batch_indices(
            self._data.num_train, self._spec.seed, step, self._spec.parallel.global_batch
        )
        size = parallel.micro_batch_size
        number = parallel.micro_batches or 1
        return [
            (
                m,
                ReadRequest(
                    "train",
                    samples[micro_batch_slice(self._share.replica, m, number, size)],
                    m in self._share.images,
                    m in self._share.labels,
                ),
            )
            for m in range(number)
            if m in self._share.images or m in self._share.labels
        ]

    def _by_strip(
        self, split: Split, strips: Sequence[StripRead], masks: MaskParts | None
    ) -> list[StripRead]:
        """Return the reads of strips that the source can do."""
        num_strips = self._spec.parallel.num_strips
        has_parts = masks is not None and self._data.reads_mask_rows(split)
        with_masks = set(masks or ()) if has_parts else set()
        reads_rows = bool(strips) and self._data.reads_rows(split)
        return [
            read
            for read in strips
            if (read.strip % num_strips in with_masks if read.is_mask else reads_rows)
        ]

    def _steps(
        self,
        split: Split,
        requests: Callable[[int], Requests],
        strips: Sequence[StripRead],
        steps: tuple[int, int],
        masks: MaskParts | None,
        reader: Reader | None = None,
    ) -> Steps:
        """Begin to read the requests of `steps`, from the first to the end.

        Images and labels that `strips` read, in the order in which each step takes them, come after
        the whole ones, and after the parts of masks by which the step is weighed. Images of bytes
        are read as bytes if strips take them.
        """
        data = self._spec.data
        order = self._by_strip(split, strips, masks)
        takes_rows = not all(read.is_mask for read in strips)
        as_bytes = takes_rows and self._data.reads_bytes(split)
        parts = self._parts if order else []
        by_strip = StripRequests(order, parts, masks, as_bytes)

        def wanted(step: int) -> Requests:
            return by_strip(requests(step)) if order or as_bytes else requests(step)

        ahead = data.prefetch_steps * (1 if order else len(wanted(steps[0])))
        if reader is None:
            pins = self._device.type == "cuda"
            reader = Reader(
                MicroBatchReader(self._data), data.num_workers, ahead, self._collate, pins
            )
        depth = 0 if data.num_workers or self._data.seeds_process else ahead
        return Steps(reader, wanted, *steps, depth)

    @cached_property
    def _parts(self) -> list[Part]:
        """Return the spans of each part of an image along its axes, in raster order."""
        sides = self._spec.data.sides_px
        grid = self._spec.parallel.full_grid(len(sides))
        return list(
            product(
                *(
                    pairwise((0, *even_ends(side, number)))
                    for side, number in zip(sides, grid, strict=True)
                )
            )
        )

    def _on_device(self, batch: Batch, requests: Callable[[], Requests]) -> Batch:
        """Return a batch on the device; on a GPU, images are available as copies arrive."""
        copies = self._copies
        if batch.masks is not None:
            batch = replace(batch, labels=self._shapes(requests()))
        if copies is None:
            return self._normalised(batch, batch.images.__getitem__)

        def arriving(read: Callable[..., Tensor] | None) -> Callable[..., Tensor] | None:
            return None if read is None else lambda *strip: copies.begin(read(*strip)).take()

        windows = batch.windows
        labels = {
            m: copies.begin(labels) for m, labels in batch.labels.items() if batch.masks is None
        }
        arrivals = {m: copies.begin(images) for m, images in batch.images.items()}
        on_device = Batch(
            {m: arrival.tensor for m, arrival in arrivals.items()},
            {m: arrival.take() for m, arrival in labels.items()} or batch.labels,
            arriving(batch.rows),
            lambda m: arrivals[m].take(),
            arriving(batch.masks),
            None if windows is None else lambda: (copies.begin(w).take() for w in windows()),
        )
        return self._normalised(on_device, lambda m: arrivals[m].take())

    def _normalised(self, batch: Batch, image: Callable[[int], Tensor]) -> Batch:
        """Return a batch whose strips of bytes become values when they are taken.

        If the images are whole, `image` returns those of a micro-batch.
        """
        read = batch.rows

        def cut(strip: int, is_again: bool) -> Tensor:
            m, number = divmod(strip, len(self._parts))
            return image(m)[:, :, *(slice(*span) for span in self._parts[number])]

        if any(images.dtype is torch.uint8 for images in batch.images.values()):
            read = cut
        if read is None:
            return batch
        rows = read
        return replace(batch, rows=lambda *strip: self._as_values(rows(*strip)))

    def _as_values(self, images: Tensor) -> Tensor:
        """Return bytes as normalised values, with the bits that the dataset's rows have."""
        if images.dtype is not torch.uint8:
            return images
        if self._scale is None:
            self._scale = tuple(
                torch.from_numpy(part).to(self._device) for part in self._data.byte_scale()
            )
        mean, deviation = self._scale
        values = images.to(torch.float32, memory_format=torch.contiguous_format)
        return _in_form(values.sub_(mean).div_(deviation), self._dtype, self._is_channels_last)

    def _shapes(self, requests: Requests) -> dict[int, Tensor]:
        """Return labels with the shapes of masks and no memory."""
        zero = torch.zeros((), dtype=torch.int64)
        sides = self._spec.data.sides_px
        return {
            m: zero.expand(len(one.samples[: one.num_known]), *sides)
            for m, one in requests
            if one.labels
        }

    def validation(
        self,
        num_micro_batches: int,
        has_images: bool,
        has_labels: bool,
        strips: Sequence[StripRead] = (),
        masks: MaskParts | None = None,
    ) -> Iterator[Batch]:
        """Yield this replica's share of the validation samples, `num_micro_batches` at a time.

        If they run as `strips`, images are read by rows if the source can read rows, and so are the
        `masks` that the outputs of strips are compared with.
        Every rank of the pipeline gets the same number of batches. The last micro-batch of a
        replica is filled up with samples without a label, so it has fewer labels than images.
        """
        size = self._spec.parallel.micro_batch_size
        replicas = self._spec.parallel.replicas
        per_replica = math.ceil(self.num_validation / replicas)
        first = self._share.replica * per_replica
        end = min(first + per_replica, self.num_validation)
        num_rounds = math.ceil(per_replica / (size * num_micro_batches))

        def requests(number: int) -> Requests:
            starts = first + (number * num_micro_batches + np.arange(num_micro_batches)) * size
            batches = []
            for m, start in enumerate(starts.tolist()):
                indices = np.arange(start, start + size)
                samples = np.stack(
                    [np.where(indices < end, indices, 0), np.zeros_like(indices)], axis=1
                )
                num_known = max(0, min(size, end - start))
                batches.append(
                    (m, ReadRequest("validation", samples, has_images, has_labels, num_known))
                )
            return batches

        if not (has_images or has_labels):
            yield from (Batch({}, {}) for _ in range(num_rounds))
            return
        loading = self._steps(
            "validation", requests, strips, (0, num_rounds), masks, self._validation_reader
        )
        self._validation_reader = loading.reader
        try:
            for number in range(num_rounds):
                yield self._on_device(loading.get(number), partial(requests, number))
        finally:
            loading.close()


class Steps:
    """The batches of rising steps, read in the order in which they are taken."""

    def __init__(
        self, reader: Reader, requests: Callable[[int], Requests], first: int, end: int, depth: int
    ) -> None:
        """Begin to read; with a `depth`, a thread reads up to that many requests ahead."""
        self.reader = reader
        self._requests = requests
        layout = requests(first)
        self._num_whole = sum(request.part is None for _, request in layout)
        self._windows = [place for place, (key, _) in enumerate(layout) if key is None]
        self._places = {key: place for place, (key, one) in enumerate(layout) if one.part and key}
        self._per_step = len(layout)
        expected, sent = tee(one for step in range(first, end) for one in requests(step))
        # neither zip nor enumerate: both keep their last item alive until the next call
        loaded = map(_pair, expected, reader.read(request for _, request in sent))
        self._ahead = ReadAhead(loaded, depth) if depth else None
        self._found = self._ahead or loaded
        self._next = first * self._per_step

    def get(self, step: int) -> Batch:
        """Return the batch of a step; batches of skipped steps are dropped.

        Take the windows of the batch before its rows, and these before you get the next step.

        Raises:
            ConfigError: A sample cannot be read, or a worker process ended.
        """
        loaded = [self._take(step * self._per_step + place) for place in range(self._num_whole)]
        kinds = {read.is_mask for read in self._places}
        rows, masks = (
            partial(self._part, step, is_mask) if is_mask in kinds else None
            for is_mask in (False, True)
        )
        windows = partial(self._read_windows, step) if self._windows else None
        return replace(as_batch(loaded), rows=rows, masks=masks, windows=windows)

    def close(self) -> None:
        """Stop reading ahead in a thread; the processes of `reader` may still read other steps."""
        if self._ahead is not None:
            self._ahead.close()

    def _part(self, step: int, is_mask: bool, strip: int, is_again: bool) -> Tensor:
        return self._read(step, self._places[StripRead(strip, is_again, is_mask)])

    def _read_windows(self, step: int) -> Iterator[Tensor]:
        return (self._read(step, place) for place in self._windows)

    def _read(self, step: int, place: int) -> Tensor:
        """Return a part of the images or masks of a micro-batch."""
        if step * self._per_step + place < self._next:  # a step that runs again
            request = self._requests(step)[place][1]
            read = self.reader.read_here(request)
        else:
            (_, request), read = self._take(step * self._per_step + place)
        images, labels = _checked(read)
        part: Tensor = images if request.images else labels[: request.num_known]
        return part

    def _take(self, position: int) -> Loaded:
        if position >= self._next:
            for found in self._found:
                self._next += 1
                if self._next > position:
                    return found
        raise ValueError(f"request {position} was given already or is beyond the last step")


def _pair(expected: tuple[Any, ReadRequest], loaded: Any) -> Loaded:
    return expected, loaded


class ReadAhead(Iterator[T]):
    """Takes items in a daemon thread, at most `depth` ahead; re-raises an error in its place."""

    def __init__(self, items: Iterator[T], depth: int) -> None:
        self._items = items
        self._room = threading.Semaphore(depth)
        self._ready: SimpleQueue[T | _Error] = SimpleQueue()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        self._thread.start()

    def __next__(self) -> T:
        item = self._ready.get()
        if isinstance(item, _Error):
            self._ready.put(item)
            raise item.error
        self._room.release()
        return item

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread; wait up to `timeout_s` for the item that it is reading."""
        self._is_closed = True
        self._room.release()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        error: BaseException = StopIteration()
        try:
            while self._room.acquire() and not self._is_closed:
                self._ready.put(next(self._items))
        except BaseException as found:
            error = found
        self._ready.put(_Error(error))


class _Error(NamedTuple):
    error: BaseException


def as_batch(loaded: Iterable[Loaded]) -> Batch:
    """Return the batch of micro-batches that were read.

    Raises:
        ConfigError: A sample could not be read; the first such error is raised.
    """
    images: dict[int, Tensor] = {}
    labels: dict[int, Tensor] = {}
    for (m, request), read in loaded:
        item = _checked(read)
        if request.images:
            images[m] = item[0]
        if request.labels:
            labels[m] = item[1][: request.num_known]
    return Batch(images, labels)


def _checked(read: Any) -> Any:
    """Return the images and labels that were read, unless this is an error."""
    if isinstance(read, ConfigError):
        raise read
    return read


def _collate(dtype: torch.dtype, is_channels_last: bool, num_classes: int, samples: Any) -> Any:
    """Return the tensors that were read: images in `dtype`, masks in the least integer type."""
    if isinstance(samples, ConfigError):
        return samples
    images, labels = _as_tensors(samples)
    if images is not None and images.is_floating_point():
        images = _in_form(images, dtype, is_channels_last)
    return images, None if labels is None else compact(labels, num_classes)


def _in_form(images: Tensor, dtype: torch.dtype, is_channels_last: bool) -> Tensor:
    is_last = is_channels_last and images.dim() == 4
    form = torch.channels_last if is_last else torch.preserve_format
    return images.to(dtype, memory_format=form)


def compact(labels: Tensor, num_classes: int) -> Tensor:
    """Return masks in the smallest integer type that can hold them and all classes.

    This saves device memory, since the masks of a whole step may be on the device at once.
    """
    if labels.ndim < 3 or labels.is_floating_point() or not labels.numel():
        return labels
    most = max(int(labels.abs().max()), num_classes - 1)
    return labels.to(next(kind for kind in _INTEGERS if most <= torch.iinfo(kind).max))

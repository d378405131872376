"""Loads what a rank reads of each step, ahead of time.

In a thread, or in processes by torch's DataLoader.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from itertools import count, tee
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Sampler, default_convert
from torch.utils.data import Dataset as TorchDataset

from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.data import Dataset
from gems.data.dataset import batch_indices, micro_batch_slice
from gems.data.prefetch import MicroBatchReader, Prefetcher, Request
from gems.engine.device import Arrival, CopyIn
from gems.engine.executor import Batch
from gems.errors import ConfigError
from gems.models.streaming.rules import even_ends

_INTEGERS = (torch.int8, torch.int16, torch.int32, torch.int64)
Requests = Mapping[int, Request]  # of one step: micro-batch -> its samples
_as_tensors: Any = default_convert
_PRELOADED = ["torch", "gems.data"]  # by the process from which workers are forked


class Steps(Protocol):
    """Batches of rising steps, on the host."""

    def get(self, step: int) -> Batch:
        """Return the batch of a step."""

    def close(self) -> None:
        """Stop loading."""


class BatchLoader:
    """Loads samples for the micro-batches that start on this rank, and labels for those that end on it.

    Both ranks draw the same samples from the seed, so none sends them. A rank with neither the
    first nor the last stage needs no dataset. What is loaded depends on the seed and the step
    alone, whoever loads it.
    """

    def __init__(
        self,
        spec: RunSpec,
        dataset: Dataset | None,
        replica: int,
        image_micro_batches: Collection[int],
        label_micro_batches: Collection[int],
        dtype: torch.dtype,
        device: torch.device,
        first_step: int = 0,
        strip_order: Sequence[int] = (),
    ) -> None:
        """Begin to load ahead; of the images of strips in `strip_order`, as forwards take them, rows if there are."""
        self._spec = spec
        self._replica = replica
        self.dataset = dataset
        self._data = cast(Dataset, dataset)  # which a rank that reads has
        self._image_micro_batches = image_micro_batches
        self._label_micro_batches = label_micro_batches
        self._dtype = dtype
        self._device = device
        self._copies = CopyIn(device) if device.type == "cuda" else None
        self.reads = bool(image_micro_batches or label_micro_batches)
        self._train: Steps | None = None
        self._validation_workers: Workers | None = None
        self._all_workers: list[Workers] = []
        if not self.reads:
            return
        per_step = len({*image_micro_batches, *label_micro_batches})
        if strip_order and self._data.reads_rows("train"):
            self._train = self._by_strips(self._requests, first_step, spec.train.steps, strip_order)
        else:
            self._train = self._ahead(
                self._requests, first_step, spec.train.steps, partial(self._workers, per_step)
            )

    def batch(self, step: int) -> Batch:
        """Return the batch of a training step, on the rank's device."""
        return Batch({}, {}) if self._train is None else self._on_device(self._train.get(step))

    def close(self) -> None:
        """Stop loading ahead."""
        if self._train is not None:
            self._train.close()
        for workers in self._all_workers:
            workers.end()

    def _requests(self, step: int) -> Requests:
        """Return what this rank reads in a training step."""
        parallel = self._spec.parallel
        samples = batch_indices(
            self._data.num_train, self._spec.seed, step, global_batch(self._spec)
        )
        size = parallel.micro_batch_size
        number = parallel.micro_batches or 1
        return {
            m: Request(
                "train",
                samples[micro_batch_slice(self._replica, m, number, size)],
                m in self._image_micro_batches,
                m in self._label_micro_batches,
            )
            for m in range(number)
            if m in self._image_micro_batches or m in self._label_micro_batches
        }

    def _load(self, requests: Requests) -> Batch:
        """Load the micro-batches of a step in this process."""
        read = MicroBatchReader(self._data)
        batch = as_batch(
            requests, {m: _as_tensors(read[request]) for m, request in requests.items()}
        )
        batch = Batch({m: self._typed(images) for m, images in batch.images.items()}, batch.labels)
        if self._device.type != "cuda":
            return batch
        images, labels = (
            {m: held.pin_memory() for m, held in part.items()}
            for part in (batch.images, batch.labels)
        )
        return Batch(images, labels)

    def _ahead(
        self,
        requests: Callable[[int], Requests],
        first: int,
        end: int,
        workers: Callable[[], Workers] | None,
    ) -> Steps:
        """Begin to load what is requested of the steps `first` to `end`, in the processes that there may be."""
        if self._spec.data.num_workers and workers is not None:
            return workers().steps(map(requests, range(first, end)), first)
        depth = 0 if self._data.seeds_process else self._spec.data.prefetch_steps
        return Prefetcher(lambda step: self._load(requests(step)), depth, first, end - 1)

    def _by_strips(
        self,
        requests: Callable[[int], Requests],
        first: int,
        end: int,
        order: Sequence[int],
        workers: Callable[[], Workers] | None = None,
    ) -> StripSteps:
        """Begin to load the labels of steps, and the rows of strips in the order in which each step takes them."""
        num_strips = self._spec.parallel.strips
        ends = even_ends(self._spec.data.height_px, num_strips)

        def labels(step: int) -> Requests:
            return {
                m: replace(request, images=False)
                for m, request in requests(step).items()
                if request.labels
            }

        def strips(number: int) -> Requests:
            step, place = divmod(number, len(order))
            m, strip = divmod(order[place], num_strips)
            rows = ends[strip - 1] if strip else 0, ends[strip]
            return {order[place]: replace(requests(step)[m], labels=False, rows=rows)}

        ahead = self._ahead(
            strips, first * len(order), end * len(order), workers or partial(self._workers, 1)
        )
        return StripSteps(
            self._ahead(labels, first, end, None),
            ahead,
            order,
            lambda number: self._load(strips(number)),
        )

    def _workers(self, per_step: int) -> Workers:
        data = self._spec.data
        ahead = math.ceil(max(1, data.prefetch_steps) * per_step / data.num_workers)
        workers = Workers(
            MicroBatchReader(self._data), data.num_workers, ahead, self._device.type == "cuda"
        )
        self._all_workers.append(workers)
        return workers

    def _typed(self, images: Tensor) -> Tensor:
        return (
            images.to(self._dtype, memory_format=self._format(images))
            if images.is_floating_point()
            else images
        )

    def _format(self, images: Tensor) -> torch.memory_format:
        is_last = self._spec.machine.channels_last and images.dim() == 4
        return torch.channels_last if is_last else torch.preserve_format

    def _on_device(self, batch: Batch) -> Batch:
        """Return a batch whose images are typed, on a GPU as they arrive there."""
        rows = batch.rows
        copies = self._copies
        if copies is None:
            images = {m: self._typed(images) for m, images in batch.images.items()}
            return replace(
                batch, images=images, rows=None if rows is None else lambda n: self._typed(rows(n))
            )

        def begin(images: Tensor) -> Arrival:
            dtype = self._dtype if images.is_floating_point() else images.dtype
            return copies.begin(images, dtype, self._format(images))

        labels = {m: copies.begin(labels) for m, labels in batch.labels.items()}
        arrivals = {m: begin(images) for m, images in batch.images.items()}
        return Batch(
            {m: arrival.tensor for m, arrival in arrivals.items()},
            {m: arrival.take() for m, arrival in labels.items()},
            None if rows is None else lambda strip: begin(rows(strip)).take(),
            lambda m: arrivals[m].take(),
        )

    def validation(
        self,
        num_validation: int,
        num_micro_batches: int,
        has_images: bool,
        has_labels: bool,
        num_strips: int = 1,
    ) -> Iterator[Batch]:
        """Yield this replica's share of the `num_validation` samples, `num_micro_batches` micro-batches at a time.

        If they run as `num_strips` strips, images come by rows if the source reads rows. Every rank
        of the pipeline gets as many batches. The last micro-batch of a replica is filled with
        samples that have no label: its labels are fewer.
        """
        size = self._spec.parallel.micro_batch_size
        replicas = self._spec.parallel.replicas
        per_replica = math.ceil(num_validation / replicas)
        first = self._replica * per_replica
        end = min(first + per_replica, num_validation)
        num_rounds = math.ceil(per_replica / (size * num_micro_batches))

        def requests(number: int) -> Requests:
            starts = first + (number * num_micro_batches + np.arange(num_micro_batches)) * size
            made = {}
            for m, start in enumerate(starts.tolist()):
                indices = np.arange(start, start + size)
                samples = np.stack(
                    [np.where(indices < end, indices, 0), np.zeros_like(indices)], axis=1
                )
                made[m] = Request(
                    "validation", samples, has_images, has_labels, max(0, min(size, end - start))
                )
            return made

        if not (has_images or has_labels):
            yield from (Batch({}, {}) for _ in range(num_rounds))
            return
        by_rows = has_images and num_strips > 1 and self._data.reads_rows("validation")

        def workers() -> Workers:
            self._validation_workers = self._validation_workers or self._workers(
                1 if by_rows else num_micro_batches
            )
            return self._validation_workers

        loading: Steps
        if by_rows:
            loading = self._by_strips(
                requests, 0, num_rounds, range(num_micro_batches * num_strips), workers
            )
        else:
            loading = self._ahead(requests, 0, num_rounds, workers)
        try:
            for number in range(num_rounds):
                yield self._on_device(loading.get(number))
        finally:
            loading.close()


class StripSteps:
    """Steps whose batches give the rows of strips one by one, read ahead in the order in which forwards take them."""

    def __init__(
        self, labels: Steps, ahead: Steps, order: Sequence[int], load: Callable[[int], Batch]
    ) -> None:
        """Take what loads labels by step and rows by number, and `load` for rows that are asked for again."""
        self._labels = labels
        self._ahead = ahead
        self._load = load
        self._places = {strip: place for place, strip in enumerate(order)}
        self._next = 0

    def get(self, step: int) -> Batch:
        """Return the batch of a step, whose rows are taken before the next step."""
        return replace(self._labels.get(step), rows=partial(self._rows, step))

    def close(self) -> None:
        """Stop loading."""
        self._labels.close()
        self._ahead.close()

    def _rows(self, step: int, strip: int) -> Tensor:
        number = step * len(self._places) + self._places[strip]
        if number < self._next:  # a step that runs again
            return self._load(number).images[strip]
        self._next = number + 1
        return self._ahead.get(number).images[strip]


def as_batch(requests: Requests, found: Mapping[int, Any]) -> Batch:
    """Return the batch of a step's micro-batches as they were read.

    Raises:
        ConfigError: the first sample that could not be read.
    """
    images: dict[int, Tensor] = {}
    labels: dict[int, Tensor] = {}
    for m, request in requests.items():
        if isinstance(found[m], ConfigError):
            raise found[m]
        if request.images:
            images[m] = found[m][0]
        if request.labels:
            labels[m] = compact(found[m][1])
            if request.num_known is not None:
                labels[m] = labels[m][: request.num_known]
    return Batch(images, labels)


def compact(labels: Tensor) -> Tensor:
    """Return masks in the least integer type that holds them.

    Those of a whole step are on the device at once.
    """
    if labels.ndim < 3 or labels.is_floating_point() or not labels.numel():
        return labels
    most = int(labels.abs().max())
    return labels.to(next(kind for kind in _INTEGERS if most <= torch.iinfo(kind).max))


class Workers:
    """Processes that read micro-batches, kept over several sequences of steps.

    They are forked from a process that is started anew (forkserver): a fork of a rank is not safe
    once MPI runs.
    """

    def __init__(self, reader: MicroBatchReader, num_workers: int, ahead: int, pin: bool) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(_PRELOADED)
        self._order = _Order()
        self._num_workers = num_workers
        self._loader: DataLoader[Any] = DataLoader(
            cast("TorchDataset[Any]", reader),
            batch_size=None,
            sampler=self._order,
            num_workers=num_workers,
            collate_fn=_as_tensors,
            prefetch_factor=ahead,
            pin_memory=pin,
            persistent_workers=True,
            multiprocessing_context=context,
            generator=torch.Generator(),
        )
        self._expected: Iterator[Requests] = iter(())
        self._found: Iterator[Any] = iter(())
        self._numbers: Iterator[int] = count()

    def steps(self, steps: Iterable[Requests], first_step: int) -> Workers:
        """Begin to read the requests of the steps from `first_step` on."""
        self._numbers = count(first_step)
        self._expected, sent = tee(steps)
        self._order.requests = (request for requests in sent for request in requests.values())
        try:
            with (
                _clean_start(),
                warnings.catch_warnings(action="ignore"),
            ):  # the error below says as much
                self._found = iter(self._loader)
        except Exception as error:
            raise ConfigError(
                "data.num_workers",
                self._num_workers,
                f"the dataset cannot be sent to a process ({error})",
                "open files in __getitem__, name functions instead of lambda, or set"
                " data.num_workers=0",
            ) from error
        return self

    def get(self, step: int) -> Batch:
        """Return the batch of a step; steps rise, and those jumped over are dropped.

        Raises:
            ConfigError: a sample that cannot be read, or a process that ended.
        """
        for number, requests in zip(self._numbers, self._expected, strict=False):
            try:
                found = {m: next(self._found) for m in requests}
            except RuntimeError as error:
                raise ConfigError(
                    "data.num_workers",
                    self._num_workers,
                    f"a process that reads samples ended ({error})",
                    "if memory or /dev/shm was full, use fewer, or a lower data.prefetch_steps",
                ) from error
            if number == step:
                return as_batch(requests, found)
        raise ValueError(f"step {step} was given already or is beyond the last step")

    def close(self) -> None:
        """Stop nothing: the processes read other steps later."""

    def end(self) -> None:
        """End the processes."""
        iterator: Any = self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()


@contextmanager
def _clean_start() -> Iterator[None]:
    """Start processes that import neither the program of the ranks nor, by it, MPI, which would join the ranks."""
    main: Any = sys.modules["__main__"]
    spec = main.__spec__
    file = getattr(main, "__file__", None)
    key = "MPI4PY_RC_INITIALIZE"
    is_ours = spec is not None and spec.name.startswith("gems.")
    before = os.environ.get(key)
    os.environ[key] = "false"
    if is_ours:
        main.__spec__ = None
        main.__file__ = None
    try:
        yield
    finally:
        main.__spec__ = spec
        main.__file__ = file
        os.environ.pop(key)
        if before is not None:
            os.environ[key] = before


class _Order(Sampler[Request]):
    """The requests in the order in which they are read, set anew for each sequence."""

    def __init__(self) -> None:
        self.requests: Iterable[Request] = ()

    def __iter__(self) -> Iterator[Request]:
        return iter(self.requests)

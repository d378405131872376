"""Loads what a rank reads of each step, ahead of time."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator
from typing import cast

import numpy as np
import torch
from torch import Tensor

from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.data import Dataset, Split
from gems.data.dataset import batch_indices, micro_batch_slice
from gems.data.prefetch import Prefetcher
from gems.engine.executor import Batch
from gems.engine.metrics import NO_LABEL


class BatchLoader:
    """Loads samples for the micro-batches that start on this rank, and labels for those that end on it.

    Both ranks draw the same samples from the seed, so none sends them. A rank with neither the first nor the last
    stage needs no dataset.
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
    ) -> None:
        self._spec, self._replica = spec, replica
        self._data = cast(Dataset, dataset)  # which a rank that reads has
        self._image_micro_batches, self._label_micro_batches = image_micro_batches, label_micro_batches
        self._dtype, self._device = dtype, device
        self.reads = bool(image_micro_batches or label_micro_batches)
        last_step = spec.train.steps - 1
        self._ahead = Prefetcher(self._load, spec.data.prefetch_steps, first_step, last_step) if self.reads else None

    def batch(self, step: int) -> Batch:
        """Return the batch of a training step, on the rank's device."""
        return Batch({}, {}) if self._ahead is None else self._on_device(self._ahead.get(step))

    def close(self) -> None:
        """Stop loading ahead."""
        if self._ahead is not None:
            self._ahead.close()

    def _load(self, step: int) -> Batch:
        parallel = self._spec.parallel
        samples = batch_indices(self._data.num_train, self._spec.seed, step, global_batch(self._spec))
        size, count = parallel.micro_batch_size, parallel.micro_batches or 1
        chosen = [samples[micro_batch_slice(self._replica, m, count, size)] for m in range(count)]
        return Batch(
            {m: self._images("train", chosen[m]) for m in self._image_micro_batches},
            {m: self._labels("train", chosen[m]) for m in self._label_micro_batches},
        )

    def _images(self, split: Split, samples: np.ndarray) -> Tensor:
        given = torch.from_numpy(np.stack([self._data.image(split, int(index), int(draw)) for index, draw in samples]))
        return given.to(self._dtype) if given.is_floating_point() else given

    def _labels(self, split: Split, samples: np.ndarray) -> Tensor:
        labels = [np.asarray(self._data.label(split, int(index)), dtype=np.int64) for index, _ in samples]
        return torch.from_numpy(np.stack(labels))

    def _on_device(self, batch: Batch) -> Batch:
        return Batch(
            {m: images.to(self._device, non_blocking=True) for m, images in batch.images.items()},
            {m: labels.to(self._device, non_blocking=True) for m, labels in batch.labels.items()},
        )

    def validation(
        self, num_validation: int, num_micro_batches: int, has_images: bool, has_labels: bool
    ) -> Iterator[Batch]:
        """Yield this replica's share of the `num_validation` samples, `num_micro_batches` micro-batches at a time.

        Every rank of the pipeline gets as many batches. The last micro-batch of a replica is filled with samples that
        have no label.
        """
        size = self._spec.parallel.micro_batch_size
        replicas = self._spec.parallel.replicas
        per_replica = math.ceil(num_validation / replicas)
        per_round = size * num_micro_batches
        first = self._replica * per_replica
        end = min(first + per_replica, num_validation)
        for round_first in range(0, per_replica, per_round):
            images: dict[int, Tensor] = {}
            labels: dict[int, Tensor] = {}
            for m in range(num_micro_batches):
                indices = np.arange(size) + first + round_first + m * size
                known = indices < end
                samples = np.stack([np.where(known, indices, 0), np.zeros(size, dtype=np.int64)], axis=1)
                if has_images:
                    images[m] = self._images("validation", samples)
                if has_labels:
                    labels[m] = self._labels("validation", samples)
                    labels[m][torch.from_numpy(~known)] = NO_LABEL
            yield self._on_device(Batch(images, labels))

"""Read the samples of micro-batches, in any process or thread."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gems.data.dataset import Dataset, Split
from gems.errors import ConfigError
from gems.utils.targets import target_error

Part = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class ReadRequest:
    """The (index, draw) pairs of one micro-batch, shape (size, 2), and the parts that a rank needs.

    Samples after the first `num_known` only fill the micro-batch and have no label; if None, all
    have one. With `part`, (first, end) along each axis, only this part is read: of the images, or
    else of the masks that are the labels. If `as_bytes`, images are the stored bytes.
    """

    split: Split
    samples: NDArray[np.int64]
    images: bool
    labels: bool
    num_known: int | None = None
    part: Part | None = None
    as_bytes: bool = False


class MicroBatchReader:
    """A reader of a dataset's micro-batches, in this process or in another one without MPI."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __getitem__(
        self, request: ReadRequest
    ) -> tuple[NDArray[Any] | None, NDArray[Any] | None] | ConfigError:
        """Return images and labels, or the error of a sample that cannot be read.

        An error is returned instead of raised, so that it can cross processes.
        """
        try:
            return self._read(request, request.samples)
        except ConfigError as error:
            return error
        except Exception as error:
            return self._error(request, error)

    def __len__(self) -> int:
        """Return the number of samples of both splits."""
        return self._dataset.num_train + self._dataset.num_validation

    def _read(
        self, request: ReadRequest, samples: NDArray[np.int64]
    ) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        part = request.part
        if part is None:
            is_read = request.images and not request.as_bytes
            batch = self._dataset.batch(request.split, samples, is_read, request.labels)
            if is_read or not request.images:
                return batch
            part = tuple((0, side) for side in self._dataset.shape[1:])
            request = replace(request, labels=False, part=part)
            return self._read(request, samples)[0], batch[1]
        rows = self._dataset.byte_rows if request.as_bytes else self._dataset.rows
        read: Any = rows if request.images else self._dataset.mask_rows
        parts = [
            read(request.split, index, draw, *part[0], *part[1:])
            for index, draw in samples.tolist()
        ]
        stacked = parts[0][np.newaxis] if len(parts) == 1 else np.stack(parts)
        return (stacked, None) if request.images else (None, stacked)

    def _error(self, request: ReadRequest, whole: Exception) -> ConfigError:
        """Return the error of the first failing sample, found by reading the samples one by one."""
        for index, draw in request.samples.tolist():
            name = self._dataset.name_of(request.split, index)
            try:
                self._read(request, np.array([[index, draw]]))
            except ConfigError as error:
                return error
            except Exception as error:
                return target_error("data", name, "cannot be read", error)
        name = self._dataset.name_of(request.split, int(request.samples[0, 0]))
        return ConfigError(
            "data", name, f"cannot be stacked with the others of its micro-batch ({whole})"
        )

"""Loads the samples of coming steps while the current step computes.

What is read, and a thread that reads ahead.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from gems.data.dataset import Dataset, Split
from gems.errors import ConfigError
from gems.utils.targets import target_error

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Request:
    """The (index, draw) pairs of one micro-batch, shape (size, 2), and what a rank needs of them.

    Those after the first `num_known` only fill the micro-batch and have no label; None: all have
    one. With `rows`, from the first to the end, only these of the images are read, and no labels.
    """

    split: Split
    samples: NDArray[np.int64]
    images: bool
    labels: bool
    num_known: int | None = None
    rows: tuple[int, int] | None = None


class MicroBatchReader:
    """Reads micro-batches of a dataset, in this process or in another, which needs no MPI for it."""

    def __init__(self, dataset: Dataset) -> None:
        self._dataset = dataset

    def __getitem__(
        self, request: Request
    ) -> tuple[NDArray[Any] | None, NDArray[Any] | None] | ConfigError:
        """Return images and labels, or the error of a sample that cannot be read, which crosses processes so."""
        try:
            return self._read(request, request.samples)
        except ConfigError as error:
            return error
        except Exception as error:
            return self._error(request, error)

    def __len__(self) -> int:
        """Return the samples of both splits."""
        return self._dataset.num_train + self._dataset.num_validation

    def _read(
        self, request: Request, samples: NDArray[np.int64]
    ) -> tuple[NDArray[Any] | None, NDArray[Any] | None]:
        if request.rows is None:
            return self._dataset.batch(request.split, samples, request.images, request.labels)
        found = [
            self._dataset.rows(request.split, index, draw, *request.rows)
            for index, draw in samples.tolist()
        ]
        return found[0][np.newaxis] if len(found) == 1 else np.stack(found), None

    def _error(self, request: Request, whole: Exception) -> ConfigError:
        """Return the error of the first sample at fault, found by reading them one by one."""
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


class Prefetcher(Generic[T]):
    """Calls `load(step)` in a daemon thread, at most `depth` steps ahead of what was taken.

    Loading begins at `first_step`. Steps are taken in rising order; those jumped over are dropped.
    With `last_step` nothing beyond it is loaded. With depth 0 there is no thread and `get` loads in
    place. When `load` raises, the thread ends, and `get` of that step or a later one raises the
    same exception.
    """

    def __init__(
        self,
        load: Callable[[int], T],
        depth: int,
        first_step: int = 0,
        last_step: int | None = None,
    ) -> None:
        if depth < 0:
            raise ValueError(f"depth={depth}")
        self._load = load
        self._depth = depth
        self._end = math.inf if last_step is None else last_step + 1
        self._wanted = first_step
        self._next = first_step
        self._ready: dict[int, T] = {}
        self._failure: tuple[int, BaseException] | None = None
        self._closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name="prefetch", daemon=True)
        if depth:
            self._thread.start()

    def get(self, step: int) -> T:
        """Return the item of `step`, waiting for it if need be.

        Raises what `load` raised, ValueError for a step already given or beyond the last,
        RuntimeError once closed.
        """
        with self._changed:
            if not self._wanted <= step < self._end:
                raise ValueError(f"step {step} was given already or is beyond the last step")
            if not self._depth and not self._closed:
                self._wanted = step + 1
                return self._load(step)
            self._wanted = step
            self._next = max(self._next, step)
            self._ready = {ahead: item for ahead, item in self._ready.items() if ahead >= step}
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: step in self._ready or self._failed(step) or self._closed
            )
            if step in self._ready:
                self._wanted = step + 1
                self._changed.notify_all()
                return self._ready.pop(step)
            if self._failure is not None and self._failed(step):
                raise self._failure[1]
            raise RuntimeError("the prefetcher is closed")

    def close(self, timeout_s: float = 5.0) -> None:
        """Stop the thread, waiting up to `timeout_s` for a load in progress; may be called twice."""
        with self._changed:
            self._closed = True
            self._ready.clear()
            self._changed.notify_all()
        if self._depth and self._thread is not threading.current_thread():
            self._thread.join(timeout_s)

    def __enter__(self) -> Prefetcher[T]:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _failed(self, step: int) -> bool:
        return self._failure is not None and step >= self._failure[0]

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closed or self._next < min(self._end, self._wanted + self._depth)
                )
                if self._closed:
                    return
                step = self._next
                self._next += 1
            try:
                item = self._load(step)
            except BaseException as error:
                with self._changed:
                    self._failure = (step, error)
                    self._changed.notify_all()
                return
            with self._changed:
                if step >= self._wanted and not self._closed:
                    self._ready[step] = item
                self._changed.notify_all()

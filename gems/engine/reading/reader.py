"""Read requests of micro-batches with torch's DataLoader, in processes or in the calling thread."""

from __future__ import annotations

import math
import multiprocessing
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch.utils.data import DataLoader, Sampler
from torch.utils.data import Dataset as TorchDataset

from gems.data.micro_batch_reader import MicroBatchReader, ReadRequest
from gems.errors import ConfigError

_PRELOADED = ["torch", "gems.data"]  # imported by the process from which workers are forked


class Reader:
    """Reads micro-batches with torch's DataLoader, in processes shared by sequences of steps.

    The processes are forked from a fresh process (forkserver), because a fork of a rank is not safe
    once MPI runs. Without `num_workers`, the reader reads in the calling thread.
    """

    def __init__(
        self,
        dataset: MicroBatchReader,
        num_workers: int,
        ahead: int,
        collate: Callable[[Any], Any],
        pins: bool,
    ) -> None:
        self._dataset = dataset
        self._order = _Order()
        self._num_workers = num_workers
        self._collate = collate
        in_processes: dict[str, Any] = {}
        if num_workers:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(_PRELOADED)
            in_processes = {
                "prefetch_factor": math.ceil(max(1, ahead) / num_workers),
                "persistent_workers": True,
                "multiprocessing_context": context,
            }
        self._loader: DataLoader[Any] = DataLoader(
            cast("TorchDataset[Any]", dataset),
            batch_size=None,
            sampler=self._order,
            num_workers=num_workers,
            collate_fn=collate,
            pin_memory=pins,
            generator=torch.Generator(),
            **in_processes,
        )

    def read(self, requests: Iterable[ReadRequest]) -> Iterator[Any]:
        """Begin to read requests.

        Raises:
            ConfigError: The dataset cannot be sent to a process; or, while results are read, a
                worker process ended.
        """
        self._order.requests = requests
        try:
            # the error below says what the warnings would say
            with _clean_start(), warnings.catch_warnings(action="ignore"):
                batches = iter(self._loader)
        except Exception as error:
            raise ConfigError(
                "data.num_workers",
                self._num_workers,
                f"the dataset cannot be sent to a process ({error})",
                "open files in __getitem__, name functions instead of lambda, or set"
                " data.num_workers=0",
            ) from error
        return self._guarded(batches) if self._num_workers else batches

    def read_here(self, request: ReadRequest) -> Any:
        """Read a micro-batch in this process and return it."""
        return self._collate(self._dataset[request])

    def _guarded(self, batches: Iterator[Any]) -> Iterator[Any]:
        try:
            yield from batches
        except RuntimeError as error:
            raise ConfigError(
                "data.num_workers",
                self._num_workers,
                f"a process that reads samples ended ({error})",
                "if memory or /dev/shm was full, use fewer, or a lower data.prefetch_steps",
            ) from error

    def end(self) -> None:
        """End the processes."""
        iterator: Any = self._loader._iterator
        if iterator is not None:
            iterator._shutdown_workers()


@contextmanager
def _clean_start() -> Iterator[None]:
    """Start processes without the ranks' program, which would start MPI and join the ranks."""
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


class _Order(Sampler[ReadRequest]):
    """The requests in reading order, replaced for each sequence of steps."""

    def __init__(self) -> None:
        self.requests: Iterable[ReadRequest] = ()

    def __iter__(self) -> Iterator[ReadRequest]:
        return iter(self.requests)

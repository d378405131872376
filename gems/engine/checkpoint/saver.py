"""The saver: all ranks agree after each step on whether to save or stop, and save while training goes on."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Protocol, TypeVar

import numpy as np

from gems.config.schema import TrainConfig
from gems.engine.checkpoint.manifest import (
    HostTensor,
    Manifest,
    ShardFile,
    checkpoint_folder,
    prune,
    shard_name,
    write_shard,
)
from gems.engine.supervision.stop_request import StopListener
from gems.engine.transport.mpi import Request, Transport, allgather, broadcast
from gems.errors import RankFailedError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.utils.atomic_io import write_json

_STOPS, _IS_DUE, _UNFINISHED = range(3)
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class StateSource(Protocol):
    """Copies the state of a rank for its shard."""

    def take(self, losses: Sequence[float]) -> None:
        """Copy the state as it is now."""

    def host_tensors(self) -> Mapping[str, HostTensor]:
        """Return what was copied last; called by the thread that writes."""


class Saver:
    """Saves checkpoints between steps, and stops the run after a step if any rank is asked to.

    Shards are copied between steps and written by a thread; then rank 0 writes the manifest. A checkpoint that is due
    while another is being written is taken after the first step that finds it written. If one cannot be written, the
    run continues as long as it has an older one, and fails otherwise.
    """

    def __init__(
        self,
        folder: RunFolder,
        train: TrainConfig,
        control: Transport,
        manifest: Manifest,
        heartbeat: Heartbeat,
        source: StateSource | None = None,
        stop: StopListener | None = None,
    ) -> None:
        """Begin after the state of `manifest`, from which those of checkpoints are made.

        `source` is None for a run without a state, whose checkpoints have a step number only.
        """
        self._folder, self._train, self._control = folder, train, control
        self._first, self._heartbeat, self._source, self._stop = manifest, heartbeat, source, stop
        self._samples_per_step = int(manifest.identity["global batch"])
        self._last_saved_step: int | None = manifest.step or None
        self._is_periodic = train.checkpoint_steps is not None or train.checkpoint_s is not None
        self._is_owed = False
        self._pending: tuple[int, Future[ShardFile | None]] | None = None  # the step, and its shard
        self._saved_s = time.monotonic()
        self._mine, self._all = np.zeros(3), np.zeros(3)
        self._request: Request | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def begin(self) -> None:
        """Post this rank's part of the decision before a step, so that nobody waits for it after; collective."""
        if self._stop is None and not self._is_periodic:
            return
        every_s = self._train.checkpoint_s
        is_time = every_s is not None and time.monotonic() - self._saved_s >= every_s
        self._mine[_STOPS] = self._stop is not None and self._stop.reason() is not None
        self._mine[_IS_DUE] = is_time and self._control.rank == 0
        self._mine[_UNFINISHED] = self._pending is not None and not self._pending[1].done()
        self._request = self._control.post_maximum(self._mine, self._all)

    def end(self, step: int, losses: Sequence[float]) -> bool:
        """Act on the decision before `step`, and return whether the run has saved its state and stops; collective.

        Raises:
            RankFailedError: the state cannot be saved, and the run is to stop or has no older checkpoint.
        """
        if self._request is None:
            return False
        self._control.wait(self._request, "all ranks to agree")
        self._request = None
        stops, is_due, is_unfinished = (bool(value) for value in self._all)
        if stops or not is_unfinished:
            self._complete()
        if stops:
            self._save_and_stop(step, losses)
            return True
        every = self._train.checkpoint_steps
        is_last = step == self._train.steps and self._is_periodic
        self._is_owed |= is_due or is_last or (every is not None and step % every == 0)
        if self._is_owed and (self._pending is None or is_last):
            self._complete()
            self._begin_to_save(step, losses)
        return False

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, after the last step; collective."""
        self._complete()
        self.close()

    def close(self) -> None:
        """End the thread without waiting for a shard that it may still be writing."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin_to_save(self, step: int, losses: Sequence[float]) -> None:
        self._is_owed = False
        self._saved_s = time.monotonic()
        if self._source is not None:
            self._source.take(losses)
        self._pending = step, self._thread.submit(self._write, step)

    def _write(self, step: int) -> ShardFile | None:
        if self._source is None:
            return None
        folder = checkpoint_folder(self._folder.checkpoints, step)
        folder.mkdir(parents=True, exist_ok=True)
        return write_shard(folder / shard_name(self._control.rank), self._source.host_tensors())

    def _complete(self) -> str | None:
        """Wait until all ranks have written and rank 0 has completed the checkpoint; return what went wrong, if so."""
        if self._pending is None:
            return None
        (step, shard), self._pending = self._pending, None
        self._heartbeat.beat(step, "checkpoint")
        mine = _result(shard)
        results = allgather(self._control.comm, mine)
        faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(results) if fault is not None]
        of_rank_0: str | None = faults[0] if faults else None
        if self._control.rank == 0 and not faults:
            files = tuple(written for written, _ in results if written is not None)
            of_rank_0 = _result(self._thread.submit(self._commit, step, files))[1]
        fault: str | None = broadcast(self._control.comm, of_rank_0)
        if fault is None:
            self._last_saved_step = step
        elif self._control.rank == 0 and self._last_saved_step is not None:
            _log.warning(
                "the state before step %d could not be saved (%s); the checkpoint of step %d remains",
                step, fault, self._last_saved_step,
            )  # fmt: skip
        if fault is not None and self._last_saved_step is None:
            raise RankFailedError(f"the state before step {step} could not be saved: {fault}")
        return fault

    def _commit(self, step: int, files: tuple[ShardFile, ...]) -> None:
        samples = self._first.samples + (step - self._first.step) * self._samples_per_step
        utc = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = replace(self._first, step=step, samples=samples, utc=utc, files=files)
        manifest.write(checkpoint_folder(self._folder.checkpoints, step))
        prune(self._folder.checkpoints, self._train.keep_checkpoints)

    def _save_and_stop(self, step: int, losses: Sequence[float]) -> None:
        self._begin_to_save(step, losses)
        fault = self._complete()
        if fault is not None:
            raise RankFailedError(f"the run was to stop, and its state before step {step} could not be saved: {fault}")
        mine = self._stop.reason() if self._stop is not None else None
        reasons = self._control.comm.gather(mine)
        if reasons is not None:
            reason = next((reason for reason in reasons if reason is not None), "unknown")
            utc = datetime.now(UTC).isoformat(timespec="milliseconds")
            write_json(self._folder.stopped_json, {"step": step, "reason": reason, "utc": utc})
            _log.info("stopped before step %d, the state is saved: %s", step, reason)


def _result(future: Future[_T]) -> tuple[_T | None, str | None]:
    """Wait for a thread's result, and return it or what went wrong."""
    try:
        return future.result(), None
    except OSError as error:
        return None, f"{error.strerror}: {error.filename}" if error.filename else str(error)

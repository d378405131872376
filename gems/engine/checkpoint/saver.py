"""The saver: after each step all ranks agree to save or stop, and they save in the background."""

from __future__ import annotations

import logging
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

import numpy as np

from gems.config.schema import TrainConfig
from gems.engine.checkpoint.manifest import (
    Manifest,
    ShardFile,
    checkpoint_folder,
    checkpoint_folders,
    make_room,
    prune,
    shard_name,
    write_shard,
)
from gems.engine.supervision.stop_request import StopListener
from gems.engine.transport.mpi import Request, Transport, allgather, broadcast
from gems.errors import RankFailedError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.utils.atomic_io import DISK_FULL, write_json

if TYPE_CHECKING:  # emulated ranks save without torch
    from torch import Tensor

RETRY_S = 30.0
BEAT_S = 1.0
_STOPS, _IS_DUE, _UNFINISHED = range(3)
_T = TypeVar("_T")
_log = logging.getLogger(__name__)


class SaveError(NamedTuple):
    """The reason why a state could not be saved.

    Attributes:
        text: The message.
        errno: The system's number of the error.
        has_room_now: Room was made after the error.
    """

    text: str
    errno: int | None
    has_room_now: bool = False


class StateSource(Protocol):
    """Copies the state of a rank for its shard."""

    def take(self, losses: Sequence[float]) -> None:
        """Copy the current state."""

    def num_bytes(self) -> int:
        """Return the size of the last copy in bytes."""

    def host_tensors(self) -> Mapping[str, Tensor]:
        """Return the last copy; called by the thread that writes."""


class Saver:
    """Saves checkpoints between steps, and stops the run after a step if any rank is asked to stop.

    Shards are copied between steps and written by a thread; then rank 0 writes the manifest. A
    checkpoint that is due while another is being written is taken after the first step that finds
    the other one complete.

    Before a save, rank 0 checks that there is room, and removes older checkpoints if that makes
    some. If a save fails on any rank, all ranks remove its parts and save again every RETRY_S,
    without a step in between: one more step would be one more to lose. After
    `train.max_failed_saves` failures in a row the run fails; its last complete checkpoint remains.
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
        """Begin after the state of `manifest`, the template for the manifests of later checkpoints.

        `source` is None for a run without a state, whose checkpoints have only a step number.
        """
        self._folder = folder
        self._train = train
        self._control = control
        self._first = manifest
        self._heartbeat = heartbeat
        self._source = source
        self._stop = stop
        self._samples_per_step = int(manifest.identity["global batch"])
        self._last_saved_step: int | None = manifest.step or None
        self._is_periodic = train.checkpoint_steps is not None or train.checkpoint_s is not None
        self._is_owed = False
        self._pending: tuple[int, Future[ShardFile | None]] | None = None  # step and shard
        self._saved_s = time.monotonic()
        self._mine, self._all = np.zeros(3), np.zeros(3)
        self._request: Request | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._step, self._losses = manifest.step, ()  # type: tuple[int, Sequence[float]]
        self._num_failed = 0  # in a row
        self._show_error: Callable[[str | None], None] | None = None

    def begin(self) -> None:
        """Post this rank's part of the decision, so no rank waits after the step; collective."""
        if self._stop is None and not self._is_periodic:
            return
        every_s = self._train.checkpoint_s
        is_time = every_s is not None and time.monotonic() - self._saved_s >= every_s
        self._mine[_STOPS] = self._stop is not None and self._stop.reason() is not None
        self._mine[_IS_DUE] = is_time and self._control.rank == 0
        self._mine[_UNFINISHED] = self._pending is not None and not self._pending[1].done()
        self._request = self._control.post_maximum(self._mine, self._all)

    def end(
        self,
        step: int,
        losses: Sequence[float],
        show_error: Callable[[str | None], None] | None = None,
    ) -> bool:
        """Act on the decision posted before `step`; collective.

        Return True if the run has saved its state and stops. On rank 0, `show_error` gets the
        reason why saving fails, and None once a save has succeeded.

        Raises:
            RankFailedError: `train.max_failed_saves` attempts to save the state have failed.
        """
        if self._request is None:
            return False
        self._control.wait(self._request, "all ranks to agree")
        self._request = None
        self._step = step
        self._losses = losses
        self._show_error = show_error
        stops, is_due, is_unfinished = (bool(value) for value in self._all)
        every = self._train.checkpoint_steps
        is_last = step == self._train.steps and self._is_periodic
        self._is_owed |= is_due or is_last or (every is not None and step % every == 0)
        error = self._complete() if stops or is_last or not is_unfinished else None
        if stops:
            self._save_and_stop()
            return True
        if error is None and self._is_owed and self._pending is None:
            error = self._begin_to_save()
        self._retry(error)
        return False

    def finish(self, *, retries: bool = True) -> None:
        """Wait after the last step for the checkpoint that is being written; collective.

        If the checkpoint cannot be saved, only log the error: the run's results may still find
        room. Without `retries`, do not try to save the state again.
        """
        error = self._complete()
        text = (
            f"the last state could not be saved: {error.text}"
            if error is not None and not retries
            else None
        )
        try:
            self._retry(error if retries else None)
        except RankFailedError as failure:
            text = str(failure)
        if text is not None and self._control.rank == 0:
            _log.error("%s", text)
        self.close()

    def close(self) -> None:
        """End the thread without waiting for a shard that it may still be writing."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin_to_save(self) -> SaveError | None:
        """Begin to save the current state, unless there is no room for it.

        Return the error in that case, the same on all ranks.
        """
        self._is_owed = False
        self._saved_s = time.monotonic()
        num_bytes = 0
        if self._source is not None:
            self._source.take(self._losses)
            num_bytes = self._source.num_bytes()
        total = self._control.sum_to_first([num_bytes])
        local_error = None
        if total is not None:
            local_error = _result(
                self._thread.submit(make_room, self._folder.checkpoints, int(total[0]))
            )[1]
        error: SaveError | None = broadcast(self._control.comm, local_error)
        if error is None:
            self._pending = self._step, self._thread.submit(self._write, self._step)
        return error

    def _write(self, step: int) -> ShardFile | None:
        if self._source is None:
            return None
        folder = checkpoint_folder(self._folder.checkpoints, step)
        folder.mkdir(parents=True, exist_ok=True)
        return write_shard(folder / shard_name(self._control.rank), self._source.host_tensors())

    def _complete(self) -> SaveError | None:
        """Wait until all ranks have written and rank 0 has completed the checkpoint.

        Return the error if that failed, otherwise None.
        """
        if self._pending is None:
            return None
        (step, shard), self._pending = self._pending, None
        self._heartbeat.beat(step, "checkpoint")
        results = allgather(self._control.comm, _result(shard))
        errors = [
            SaveError(f"rank {rank}: {error.text}", error.errno)
            for rank, (_, error) in enumerate(results)
            if error is not None
        ]
        of_rank_0 = errors[0] if errors else None
        if self._control.rank == 0:
            if not errors:
                files = tuple(written for written, _ in results if written is not None)
                of_rank_0 = _result(self._thread.submit(self._commit, step, files))[1]
            if of_rank_0 is not None:
                of_rank_0 = self._discard(step, of_rank_0)
        error: SaveError | None = broadcast(self._control.comm, of_rank_0)
        if error is None:
            self._last_saved_step = step
            if self._num_failed and self._control.rank == 0:
                _log.info("the state before step %d is saved", step)
                if self._show_error is not None:
                    self._show_error(None)
            self._num_failed = 0
        return error

    def _retry(self, error: SaveError | None) -> None:
        """If a save has failed, save the current state again until that succeeds; collective.

        Raises:
            RankFailedError: `train.max_failed_saves` saves have failed in a row.
        """
        while error is not None:
            if not error.has_room_now:
                self._count(error)
                self._pause()
            error = self._begin_to_save() or self._complete()

    def _discard(self, step: int, error: SaveError) -> SaveError:
        """Remove the parts of a checkpoint, and older ones too if the disk or a quota is full."""
        shutil.rmtree(checkpoint_folder(self._folder.checkpoints, step), ignore_errors=True)
        if error.errno not in DISK_FULL or len(checkpoint_folders(self._folder.checkpoints)) < 2:
            return error
        prune(self._folder.checkpoints, 1)
        return error._replace(has_room_now=True)

    def _count(self, error: SaveError) -> None:
        """Report a failed save.

        Raises:
            RankFailedError: It was the last failure that `train.max_failed_saves` allows.
        """
        self._num_failed += 1
        limit = self._train.max_failed_saves
        last = self._last_saved_step
        remains = (
            "there is no checkpoint" if last is None else f"the checkpoint of step {last} remains"
        )
        if self._num_failed >= limit:
            raise RankFailedError(
                f"the state before step {self._step} could not be saved: {error.text}; "
                f"{self._num_failed} tries (train.max_failed_saves={limit}); {remains}"
            ) from OSError(error.errno, error.text)
        if self._control.rank == 0:
            text = f"save {self._num_failed} of {limit} failed: {error.text}"
            _log.warning(
                "the state before step %d: %s; %s; again in %g s",
                self._step,
                text,
                remains,
                RETRY_S,
            )
            if self._show_error is not None:
                self._show_error(text)

    def _pause(self) -> None:
        pause = threading.Event()
        end_s = time.monotonic() + RETRY_S
        while (left_s := end_s - time.monotonic()) > 0:
            self._heartbeat.beat(self._step, "checkpoint")
            pause.wait(min(left_s, BEAT_S))

    def _commit(self, step: int, files: tuple[ShardFile, ...]) -> None:
        samples = self._first.samples + (step - self._first.step) * self._samples_per_step
        utc = datetime.now(UTC).isoformat(timespec="seconds")
        manifest = replace(self._first, step=step, samples=samples, utc=utc, files=files)
        manifest.write(checkpoint_folder(self._folder.checkpoints, step))
        prune(self._folder.checkpoints, self._train.keep_checkpoints)

    def _save_and_stop(self) -> None:
        self._retry(self._begin_to_save() or self._complete())
        local_reason = self._stop.reason() if self._stop is not None else None
        reasons = self._control.comm.gather(local_reason)
        if reasons is not None:
            reason = next((reason for reason in reasons if reason is not None), "unknown")
            utc = datetime.now(UTC).isoformat(timespec="milliseconds")
            write_json(
                self._folder.stopped_json, {"step": self._step, "reason": reason, "utc": utc}
            )
            _log.info("stopped before step %d, the state is saved: %s", self._step, reason)


def _result(future: Future[_T]) -> tuple[_T | None, SaveError | None]:
    """Wait for a thread and return its result, or its error."""
    try:
        return future.result(), None
    except OSError as error:
        text = f"{error.strerror}: {error.filename}" if error.filename else str(error)
        return None, SaveError(text, error.errno)

"""The saver: agrees with all ranks, step by step, on when to save and when to stop, and saves beside the training."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Protocol, TypeVar

import numpy as np

from gems.config.schema import TrainConfig
from gems.engine.checkpoint.manifest import Manifest, checkpoint_folder, prune
from gems.engine.checkpoint.shard import Piece, Written, shard_name, write_shard
from gems.engine.transport.mpi import Request, Transport
from gems.errors import RankFailedError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Heartbeat
from gems.utils.atomic_io import write_json

_STOPS, _IS_DUE, _UNFINISHED = range(3)
_T = TypeVar("_T")


class Asks(Protocol):
    """Who may want the run to end early."""

    def reason(self) -> str | None:
        """Return why the run shall save and stop at a step's end; None while nobody wants that."""


class Source(Protocol):
    """What a rank's shard is made of."""

    def take(self, losses: Sequence[float]) -> None:
        """Copy the state as it is now."""

    def pieces(self) -> Mapping[str, Piece]:
        """Return what was copied last; called in the thread that writes."""


@dataclass(frozen=True, slots=True)
class _Pending:
    step: int
    shard: Future[Written | None]


class Saver:
    """Takes checkpoints at step boundaries, and ends the run at one when any rank is asked to.

    What ranks must agree on goes with one non-blocking maximum of three numbers a step, posted when it begins and read when
    it ends, so nobody waits for it: whether to stop, whether rank 0's clock says that it is time to save, and whether every
    rank's shard is on disk. The shards are copied at a boundary and written by a thread. A checkpoint that is due while
    another is being written is taken at the first boundary behind it. It counts from the moment that rank 0 has written the
    manifest, last of all.

    A shard that cannot be written is told of, and the run goes on while an older checkpoint stands: a full disk costs the
    checkpoint and no computation. Without an older one the run ends, for its user counts on it.
    """

    def __init__(
        self,
        folder: RunFolder,
        train: TrainConfig,
        control: Transport,
        about: Manifest,
        heartbeat: Heartbeat,
        source: Source | None = None,
        stop: Asks | None = None,
    ) -> None:
        """Begin behind the state that `about` describes: its step is the first one, and the manifests are like it.

        `source` is None for a run without a state; its checkpoints tell the step and nothing else.
        """
        self._folder, self._train, self._control = folder, train, control
        self._about, self._heartbeat, self._source, self._stop = about, heartbeat, source, stop
        self._samples_per_step = int(about.identity["global batch"])
        self._standing: int | None = about.step or None
        self._is_periodic = train.checkpoint_steps is not None or train.checkpoint_s is not None
        self._is_owed = False
        self._pending: _Pending | None = None
        self._saved_s = time.monotonic()
        self._mine, self._all = np.zeros(3), np.zeros(3)
        self._request: Request | None = None
        self._thread = ThreadPoolExecutor(1, "checkpoint")

    def begin(self) -> None:
        """Post, at a step's begin, what this rank has to say; collective."""
        if self._stop is None and not self._is_periodic:
            return
        every_s = self._train.checkpoint_s
        is_time = every_s is not None and time.monotonic() - self._saved_s >= every_s
        self._mine[_STOPS] = self._stop is not None and self._stop.reason() is not None
        self._mine[_IS_DUE] = is_time and self._control.rank == 0
        self._mine[_UNFINISHED] = self._pending is not None and not self._pending.shard.done()
        self._request = self._control.post_maximum(self._mine, self._all)

    def end(self, step: int, losses: Sequence[float]) -> bool:
        """Read, at a step's end, what all have said, and acts on it; `step` is the next one, `losses` those of all before.

        Gives whether the run has saved its state and stops here. Collective.

        Raises:
            RankFailedError: the state cannot be saved, and the run stops or no older checkpoint stands.
        """
        if self._request is None:
            return False
        self._control.wait(self._request, "all ranks to agree")
        self._request = None
        stops, is_due, is_unfinished = (bool(said) for said in self._all)
        if self._pending is not None and (stops or not is_unfinished):
            self._complete()
        if stops:
            self._save_and_stop(step, losses)
            return True
        every = self._train.checkpoint_steps
        is_last = step == self._train.steps and self._is_periodic
        self._is_owed |= is_due or is_last or (every is not None and step % every == 0)
        if self._is_owed and (self._pending is None or is_last):
            if self._pending is not None:
                self._complete()
            self._begin_to_save(step, losses)
        return False

    def finish(self) -> None:
        """Wait for the checkpoint that is being written, behind the last step; collective."""
        if self._pending is not None:
            self._complete()
        self.close()

    def close(self) -> None:
        """End the thread; nobody waits for what it may still be writing, which is no checkpoint."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _begin_to_save(self, step: int, losses: Sequence[float]) -> None:
        self._is_owed = False
        self._saved_s = time.monotonic()
        if self._source is not None:
            self._source.take(losses)
        self._pending = _Pending(step, self._thread.submit(self._write, step))

    def _write(self, step: int) -> Written | None:
        if self._source is None:
            return None
        folder = checkpoint_folder(self._folder.checkpoints, step)
        folder.mkdir(parents=True, exist_ok=True)
        return write_shard(folder / shard_name(self._control.rank), self._source.pieces())

    def _complete(self) -> str | None:
        """Wait until all ranks have written, and lets rank 0 make a checkpoint of it; gives what went wrong."""
        assert self._pending is not None
        pending, self._pending = self._pending, None
        self._heartbeat.beat(pending.step, "checkpoint")
        told = self._control.comm.allgather(_result(pending.shard))
        faults = [f"rank {rank}: {fault}" for rank, (_, fault) in enumerate(told) if fault is not None]
        of_rank_0: str | None = faults[0] if faults else None
        if self._control.rank == 0 and not faults:
            files = tuple(written for written, _ in told if written is not None)
            of_rank_0 = _result(self._thread.submit(self._commit, self._manifest(pending.step, files)))[1]
        fault: str | None = self._control.comm.bcast(of_rank_0)
        if fault is None:
            self._standing = pending.step
        elif self._control.rank == 0 and self._standing is not None:
            said = f"gems: the state before step {pending.step} could not be saved ({fault}); "
            print(f"{said}the checkpoint of step {self._standing} stands", file=sys.stderr, flush=True)
        if fault is not None and self._standing is None:
            raise RankFailedError(f"the state before step {pending.step} could not be saved: {fault}")
        return fault

    def _manifest(self, step: int, files: tuple[Written, ...]) -> Manifest:
        samples = self._about.samples + (step - self._about.step) * self._samples_per_step
        utc = datetime.now(UTC).isoformat(timespec="seconds")
        return replace(self._about, step=step, samples=samples, utc=utc, files=files)

    def _commit(self, manifest: Manifest) -> None:
        manifest.write(checkpoint_folder(self._folder.checkpoints, manifest.step))
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
            print(f"gems: stopped before step {step}, the state is saved: {reason}", file=sys.stderr, flush=True)


def _result(future: Future[_T]) -> tuple[_T | None, str | None]:
    """Wait for a thread's work and gives it, or what went wrong."""
    try:
        return future.result(), None
    except OSError as error:
        return None, f"{error.strerror}: {error.filename}" if error.filename else str(error)

"""The watchdog: a thread of each rank that finds hangs, dumps all ranks' stacks and ends the job.

A rank hangs if its main thread has been in one action longer than `train.hang_timeout_s`
(PHASE_FACTOR times as long in a phase outside of the schedule, such as start-up or a checkpoint).
A rank that waits hangs only if no rank that it depends on, directly or through others, has begun
anything for that long. So a first step may be slow on one rank after the other.

The first rank that finds a hang writes STALLED.json. Two ranks of each node check for that file.
They and the finder send SIGUSR1 to the other ranks of their node. These ranks then write their
stacks, even while the interpreter is held. The watchdog never calls MPI, because the main thread
may be in it: it ends its process, and the launcher ends the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import functools
import io
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from gems.engine.supervision.failure import DUMP_S, ensure_exit, rank_facts, report_failure
from gems.engine.transport.polling import WaitState
from gems.errors import StalledError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Beat, Heartbeat, now_ns, read_beat
from gems.runs.wait_graph import SILENT_AFTER_S, WaitGraph, parse_action, waiting_chain
from gems.schedule.schedule import Schedule
from gems.utils.atomic_io import write_json
from gems.utils.process_tree import start_time

TICK_S = 1.0
CHECK_S = 2.0
GRACE_S = 3.0  # let a wait that has timed out end itself: it knows best what it waited for
LINGER_S = 20.0
LATE_S = 5.0
MAX_LATE = 3
PHASE_FACTOR = 3.0
NUM_CHECKING_RANKS = 2
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class LocalPeer:
    """A rank on this node.

    The start time of its process identifies it too, since process IDs are reused.
    """

    rank: int
    pid: int
    started: str
    pid_namespace: int  # of the rank's container

    @classmethod
    def this_process(cls, rank: int) -> LocalPeer:
        """Return the peer that describes this process."""
        try:
            namespace = Path("/proc/self/ns/pid").stat().st_ino
        except OSError:
            namespace = -1
        return cls(rank, os.getpid(), start_time(os.getpid()), namespace)


def request_stacks(peers: Sequence[LocalPeer], rank: int) -> None:
    """Send SIGUSR1 on behalf of `rank` to its peers, which then write their stacks."""
    me = next(peer for peer in peers if peer.rank == rank)
    for peer in peers:
        if peer.rank != rank and peer.pid_namespace == me.pid_namespace:
            with contextlib.suppress(OSError):
                if start_time(peer.pid) == peer.started:
                    os.kill(peer.pid, signal.SIGUSR1)


class RankHeartbeats(Mapping[int, Beat]):
    """The last heartbeats of all ranks; each file is read on first use."""

    def __init__(self, folder: RunFolder, num_ranks: int) -> None:
        self._folder = folder
        self._num_ranks = num_ranks
        self._read: dict[int, Beat | None] = {}

    def __getitem__(self, rank: int) -> Beat:
        if rank not in self._read:
            self._read[rank] = None
            with contextlib.suppress(OSError, ValueError):
                self._read[rank] = read_beat(self._folder.heartbeat(rank))
        beat = self._read[rank]
        if beat is None:
            raise KeyError(rank)
        return beat

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._num_ranks))

    def __len__(self) -> int:
        return self._num_ranks

    def known(self) -> dict[int, Beat]:
        """Return the heartbeats of the ranks that have one."""
        return {rank: self[rank] for rank in self if rank in self}


class Watchdog:
    """Watches one rank while the block runs.

    `peers` are the ranks of its node, including this one.
    """

    def __init__(
        self,
        folder: RunFolder,
        rank: int,
        num_ranks: int,
        heartbeat: Heartbeat,
        hang_timeout_s: float,
        peers: Sequence[LocalPeer],
        wait_state: WaitState,
    ) -> None:
        self._folder = folder
        self._rank = rank
        self._num_ranks = num_ranks
        self._heartbeat = heartbeat
        self._limit_s = hang_timeout_s
        self._wait_state = wait_state
        self._peers = tuple(peers)
        self._checks_others = rank in sorted(peer.rank for peer in peers)[:NUM_CHECKING_RANKS]
        self._main = threading.main_thread().ident or 0
        self._closing = threading.Event()
        # whoever holds it reports the end: the main thread or the watchdog
        self._ending = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._ticked_s = self._checked_s = self._armed_s = time.monotonic()
        self._last_seen = (0, 0, True)
        self._moved_ns = 0
        self._still_s = 0.0
        self._over_s = 0.0
        self._num_late = 0
        self._seen_s: float | None = None
        self._asked_s = -float("inf")

    def __enter__(self) -> Self:
        path = self._folder.stacks(self._rank)
        self._stacks: Any = sys.stderr
        with contextlib.suppress(OSError):  # open now, since signal handlers cannot open files
            path.parent.mkdir(parents=True, exist_ok=True)
            self._stacks = io.FileIO(path, "w")
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._arm()
        # a first sign of life, in case the rank is stopped before the first tick
        self._heartbeat.live()
        self._wait_state.is_progressing = self.is_progressing
        self._thread.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        frames: TracebackType | None,
    ) -> None:
        if not self._ending.acquire(blocking=False):
            time.sleep(2 * DUMP_S + GRACE_S)  # the watchdog is ending this process
        if isinstance(error, StalledError):
            error.waits_for = self._announce(error)
            # keep the thread alive: other ranks may look for the rank without signs of life
            return
        self._closing.set()
        self._thread.join(2 * TICK_S)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        if error is None and self._stacks is not sys.stderr:
            path = self._folder.stacks(self._rank)
            with contextlib.suppress(OSError):
                self._stacks.close()
                if path.stat().st_size == 0:
                    path.unlink()
                    path.parent.rmdir()

    def is_progressing(self) -> bool:
        """Return whether a rank that this one depends on has begun anything in time.

        The dependency may be direct or through other ranks. Time during which this process was
        stopped does not count, because SLURM suspends jobs that way.
        """
        if time.monotonic() - self._ticked_s > LATE_S:
            self._num_late += 1
            if self._num_late <= MAX_LATE:  # after that, the thread itself hangs
                return True
        else:
            self._num_late = 0
            if self._still_s + 2 * TICK_S < self._limit_s:
                return True
        try:
            what = self._wait_state.what
            self._heartbeat.live("" if what is None else str(what), self._moved_ns)
            at_ns = now_ns()
            beats = RankHeartbeats(self._folder, self._num_ranks)
            graph = WaitGraph(self._schedule, beats, at_ns, self._silent_s)
            return any(
                (at_ns - beat.moved_ns) * 1e-9 < self._limit_of(beat)
                for beat in graph.held_up_by(self._rank)
            )
        except Exception as error:
            _log.warning("cannot find out which ranks make progress: %r", error)
            return False

    @property
    def _silent_s(self) -> float:
        return max(3 * TICK_S, min(SILENT_AFTER_S, self._limit_s / 2))

    def _limit_of(self, beat: Beat) -> float:
        return self._limit_s if parse_action(beat.action) else PHASE_FACTOR * self._limit_s

    def _run(self) -> None:
        last = ""
        while not self._closing.wait(TICK_S):
            try:
                self._tick()
            except Exception as error:
                if repr(error) != last and not self._closing.is_set():
                    _log.warning("watchdog: %r", error)
                last = repr(error)

    def _tick(self) -> None:
        now_s = time.monotonic()
        passed_s = min(now_s - self._ticked_s, 2 * TICK_S)
        self._ticked_s = now_s
        what = self._wait_state.what
        beat = self._heartbeat.last()
        seen = (beat.time_ns if beat else 0, self._wait_state.count, what is None)
        if seen != self._last_seen:
            self._last_seen, self._moved_ns = seen, now_ns()
            self._still_s = self._over_s = 0.0
        else:
            self._still_s += passed_s
        self._heartbeat.live("" if what is None else str(what), self._moved_ns)
        if now_s - self._armed_s > self._limit_s / 4:
            self._arm()
        if self._checks_others and now_s - self._checked_s > CHECK_S - TICK_S / 2:
            self._checked_s = now_s
            self._check_others(now_s)
        if beat is not None and self._still_s > self._limit_of(beat) and not self._ending.locked():
            self._check(beat, what, passed_s)

    def _check(self, beat: Beat, what: object, passed_s: float) -> None:
        """End the job if the main thread has been in its action too long.

        The job goes on if that thread waits for a rank that makes progress.
        """
        if what is not None:
            if self._ticked_s - self._asked_s < max(TICK_S, self._limit_s / 10):
                return
            if self.is_progressing():
                self._asked_s = self._ticked_s
                self._over_s = 0.0
                return
        self._over_s += passed_s
        if self._over_s < GRACE_S or not self._ending.acquire(blocking=False):
            return
        ensure_exit()
        doing = f"waited for {what}" if what is not None else f"been in {beat.action}"
        error = StalledError(
            f"rank {self._rank} has {doing} for {self._still_s:.0f} s, and"
            f" train.hang_timeout_s={self._limit_s:g}"
        )
        error.waits_for = self._announce()
        frame = sys._current_frames().get(self._main)
        lines = "".join(traceback.format_stack(frame)).rstrip("\n").split("\n")
        code = report_failure(self._folder, self._rank, error, lines)
        time.sleep(DUMP_S)
        os._exit(code)

    def _announce(self, raised: BaseException | None = None) -> str | None:
        """Write STALLED.json, if no rank has yet, and the stacks.

        Return the chain of waiting ranks as text if this rank was the first, otherwise None.
        """
        document = rank_facts(self._rank, self._heartbeat.last()) | {
            "waited_s": round(self._still_s, 1)
        }
        is_first = False
        with contextlib.suppress(OSError), self._folder.stalled_json.open("x") as file:
            is_first = True
            json.dump(document, file)
        # read before the signals are sent, since these may wake up a rank that hangs
        beats = RankHeartbeats(self._folder, self._num_ranks).known() if is_first else {}
        at_ns = now_ns()
        self._dump("hangs", raised)
        request_stacks(self._peers, self._rank)
        if not is_first:
            return None
        try:
            chain = waiting_chain(self._schedule, beats, at_ns, self._silent_s)
            waits_for = chain.text(self._rank)
            roots = chain.root_records()
            more = {"waits_for": waits_for, "roots": roots, "cycle": list(chain.cycle)}
            write_json(self._folder.stalled_json, document | more)
            return waits_for
        except Exception as error:
            _log.warning("cannot find out who waits for whom: %r", error)
            return None

    def _check_others(self, now_s: float) -> None:
        """If another rank has found a hang, write stacks here, and later end this process."""
        if self._seen_s is None:
            if not self._ending.locked() and self._folder.stalled_json.exists():
                self._seen_s = now_s
                self._dump("another rank hangs")
                request_stacks(self._peers, self._rank)
        elif now_s - self._seen_s > LINGER_S:
            _log.error("ends, because another rank hangs")
            os._exit(StalledError.exit_code)

    def _dump(self, why: str, raised: BaseException | None = None) -> None:
        """Write the stack of `raised`, if given, and then the stacks of all threads."""
        beat = self._heartbeat.last()
        where = f"step {beat.step}, action {beat.action}" if beat else "no heartbeat"
        utc = datetime.now(UTC).isoformat(timespec="milliseconds")
        head = (
            f"rank {self._rank} on node {os.uname().nodename}, process {os.getpid()}, {where},"
            f" {utc}: {why}\n"
        )
        with contextlib.suppress(OSError, ValueError):
            lines = "".join(traceback.format_exception(raised)) if raised is not None else ""
            os.write(self._stacks.fileno(), (head + lines).encode(errors="replace"))
            faulthandler.dump_traceback(self._stacks, all_threads=True)

    def _arm(self) -> None:
        """Schedule a stack dump in case C code holds the interpreter and blocks this thread."""
        self._armed_s = time.monotonic()
        if not self._ending.locked():
            faulthandler.dump_traceback_later(self._limit_s * 1.25 + LATE_S, file=self._stacks)

    @functools.cached_property
    def _schedule(self) -> Schedule:
        return self._folder.read_schedule()

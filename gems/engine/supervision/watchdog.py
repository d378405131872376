"""The watchdog: a thread of each rank that finds stalls, has every rank leave its stacks, and ends the job.

A rank has stalled when its own thread has worked on one action longer than `train.hang_timeout_s` (in a phase outside of
the schedule, as start-up, loading or a checkpoint, PHASE_FACTOR times as long), or waits that long for another and
nobody that it hangs on has begun anything within the limit. So a first step may take long on one rank after the other.

The first rank that finds a stall writes STALLED.json. Two ranks of each node look for that file; they, and the finder
on its own node, send SIGUSR1 to the others there, whose stacks are then written even where the interpreter is held.
The watchdog never calls MPI, which the rank's own thread may be in: it ends its process, and so the launcher the others.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import json
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Self

from gems.engine.supervision.failure import DUMP_S, guard, report
from gems.engine.supervision.heartbeats import Marks
from gems.engine.supervision.local_peer import Neighbour, ask
from gems.engine.transport.polling import WAITING
from gems.errors import StalledError
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Beat, Heartbeat
from gems.runs.rank_state import SILENT_AFTER_S, World, action_of
from gems.runs.wait_graph import waiting_chain
from gems.schedule.schedule import Schedule
from gems.utils.atomic_io import write_json

TICK_S = 1.0
LOOK_S = 2.0
GRACE_S = 3.0  # a wait that has come to its limit ends itself first, and knows best what it waited for
LINGER_S = 20.0
LATE_S = 5.0
MAX_LATE = 3
PHASE_FACTOR = 3.0
NUM_LOOKOUTS = 2
SHOWN_ROOTS = 8


class Watchdog:
    """Watches over one rank while the block runs.

    Args:
        folder: the run's.
        rank: this one, of the world.
        num_ranks: of the world.
        heartbeat: this rank's.
        hang_timeout_s: the longest an action may take, and a wait while nobody moves.
        here: the ranks of this node, this one among them.
    """

    def __init__(
        self,
        folder: RunFolder,
        rank: int,
        num_ranks: int,
        heartbeat: Heartbeat,
        hang_timeout_s: float,
        here: Sequence[Neighbour],
    ) -> None:
        self._folder, self._rank, self._num_ranks = folder, rank, num_ranks
        self._heartbeat, self._limit_s = heartbeat, hang_timeout_s
        self._here = tuple(here)
        self._looks = rank in sorted(one.rank for one in here)[:NUM_LOOKOUTS]
        self._schedule: Schedule | None = None
        self._main = threading.main_thread().ident or 0
        self._closing = threading.Event()
        self._ending = threading.Lock()  # whoever holds it tells the end: the rank's own thread or the watchdog's
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)
        self._ticked_s = self._looked_s = self._armed_s = time.monotonic()
        self._mark, self._moved_ns = (0, 0, True), 0
        self._still_s, self._over_s, self._num_late = 0.0, 0.0, 0
        self._seen_s: float | None = None
        self._asked_s = -float("inf")

    def __enter__(self) -> Self:
        self._stacks = self._open_stacks()
        faulthandler.register(signal.SIGUSR1, file=self._stacks, all_threads=True)
        self._arm()
        self._heartbeat.live()  # who is stopped before the first tick has given a sign too
        WAITING.still_moves = self.still_moves
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, frames: TracebackType | None
    ) -> None:
        if not self._ending.acquire(blocking=False):
            time.sleep(2 * DUMP_S + GRACE_S)  # the watchdog is telling the end of this process
        if isinstance(error, StalledError):
            error.waits_for = self._announce(error)
            return  # the thread still gives signs of life while others look for who does not
        self._closing.set()
        self._thread.join(2 * TICK_S)
        faulthandler.cancel_dump_traceback_later()
        faulthandler.register(signal.SIGUSR1, all_threads=True)
        if error is None:
            self._remove_empty()

    def still_moves(self) -> bool:
        """Return whether a rank that this one hangs on, directly or through others, has begun something within the limit.

        Time in which this process was stopped as a whole does not count: SLURM suspends jobs so.
        """
        if time.monotonic() - self._ticked_s > LATE_S:
            self._num_late += 1
            if self._num_late <= MAX_LATE:  # beyond that the thread itself hangs
                return True
        else:
            self._num_late = 0
            if self._still_s + 2 * TICK_S < self._limit_s:
                return True
        try:
            what = WAITING.what
            self._heartbeat.live("" if what is None else str(what), self._moved_ns)
            now_ns = time.time_ns()
            world = World(self._read_schedule(), Marks(self._folder, self._num_ranks), now_ns, self._silent_s)
            return any((now_ns - beat.moved_ns) * 1e-9 < self._limit_of(beat) for beat in world.held_up_by(self._rank))
        except Exception as error:
            print(f"gems: rank {self._rank} cannot tell who moves: {error!r}", file=sys.stderr, flush=True)
            return False

    @property
    def _silent_s(self) -> float:
        return max(3 * TICK_S, min(SILENT_AFTER_S, self._limit_s / 2))

    def _limit_of(self, beat: Beat) -> float:
        return self._limit_s if action_of(beat.action) else PHASE_FACTOR * self._limit_s

    def _run(self) -> None:
        said = ""
        while not self._closing.wait(TICK_S):
            try:
                self._tick()
            except Exception as error:
                text = f"gems: watchdog of rank {self._rank}: {error!r}"
                if text != said and not self._closing.is_set():
                    print(text, file=sys.stderr, flush=True)
                said = text

    def _tick(self) -> None:
        now_s = time.monotonic()
        passed_s = min(now_s - self._ticked_s, 2 * TICK_S)
        self._ticked_s = now_s
        what, beat = WAITING.what, self._heartbeat.last()
        mark = (beat.time_ns if beat else 0, WAITING.count, what is None)
        if mark != self._mark:
            self._mark, self._moved_ns = mark, time.time_ns()
            self._still_s = self._over_s = 0.0
        else:
            self._still_s += passed_s
        self._heartbeat.live("" if what is None else str(what), self._moved_ns)
        if now_s - self._armed_s > self._limit_s / 4:
            self._arm()
        if self._looks and now_s - self._looked_s > LOOK_S - TICK_S / 2:
            self._looked_s = now_s
            self._look(now_s)
        if beat is not None and self._still_s > self._limit_of(beat) and not self._ending.locked():
            self._check(beat, what, passed_s)

    def _check(self, beat: Beat, what: object, passed_s: float) -> None:
        """End the job when the rank's own thread has been too long where it is, unless it waits for one that moves."""
        if what is not None:
            if self._ticked_s - self._asked_s < max(TICK_S, self._limit_s / 10):
                return
            if self.still_moves():
                self._asked_s, self._over_s = self._ticked_s, 0.0
                return
        self._over_s += passed_s
        if self._over_s < GRACE_S or not self._ending.acquire(blocking=False):
            return
        guard()
        doing = f"waited for {what}" if what is not None else f"been in {beat.action}"
        error = StalledError(
            f"rank {self._rank} has {doing} for {self._still_s:.0f} s, and train.hang_timeout_s={self._limit_s:g}"
        )
        error.waits_for = self._announce()
        frame = sys._current_frames().get(self._main)
        lines = [line for part in traceback.format_stack(frame) for line in part.rstrip("\n").split("\n")]
        code = report(self._folder, self._rank, error, lines)
        time.sleep(DUMP_S)
        os._exit(code)

    def _announce(self, raised: BaseException | None = None) -> str | None:
        """Write STALLED.json, if no rank has yet, and stacks; gives who waits for whom, if this rank was the first."""
        beat = self._heartbeat.last()
        document: dict[str, Any] = {
            "rank": self._rank, "node": os.uname().nodename, "pid": os.getpid(), "step": beat.step if beat else -1,
            "action": beat.action if beat else "start", "waited_s": round(self._still_s, 1),
            "utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
        }  # fmt: skip
        is_first = self._claim(document)
        # read before the signals, which may wake up whoever is stuck
        marks = Marks(self._folder, self._num_ranks).known() if is_first else {}
        now_ns = time.time_ns()
        self._dump("stalled", raised)
        ask(self._here, self._rank)
        if not is_first:
            return None
        try:
            chain = waiting_chain(self._read_schedule(), marks, now_ns, self._silent_s)
            waits_for = chain.text(self._rank)
            roots = [asdict(root) | {"state": root.state.value} for root in chain.roots[:SHOWN_ROOTS]]
            more = {"waits_for": waits_for, "roots": roots, "cycle": list(chain.cycle)}
            write_json(self._folder.stalled_json, document | more)
            return waits_for
        except Exception as error:
            print(f"gems: rank {self._rank} cannot tell who waits for whom: {error!r}", file=sys.stderr, flush=True)
            return None

    def _claim(self, document: Mapping[str, Any]) -> bool:
        """Make STALLED.json, and tells whether this rank is the one that did."""
        try:
            fd = os.open(self._folder.stalled_json, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except OSError:
            return False
        with contextlib.suppress(OSError), open(fd, "w") as file:
            json.dump(document, file)
        return True

    def _look(self, now_s: float) -> None:
        """Check whether another rank has found a stall: then all here leave their stacks, and soon nobody must be left."""
        if self._seen_s is None:
            if not self._ending.locked() and self._folder.stalled_json.exists():
                self._seen_s = now_s
                self._dump("another rank has stalled")
                ask(self._here, self._rank)
        elif now_s - self._seen_s > LINGER_S:
            print(f"gems: rank {self._rank} ends: ranks have stalled", file=sys.stderr, flush=True)
            os._exit(StalledError.exit_code)

    def _dump(self, why: str, raised: BaseException | None = None) -> None:
        """Write the stacks of all threads of this process, and first that of an exception which has left its place."""
        beat = self._heartbeat.last()
        where = f"step {beat.step}, action {beat.action}" if beat else "no mark"
        utc = datetime.now(UTC).isoformat(timespec="milliseconds")
        head = f"rank {self._rank} on node {os.uname().nodename}, process {os.getpid()}, {where}, {utc}: {why}\n"
        with contextlib.suppress(OSError, ValueError):
            lines = "".join(traceback.format_exception(raised)) if raised is not None else ""
            os.write(self._stacks.fileno(), (head + lines).encode(errors="replace"))
            faulthandler.dump_traceback(self._stacks, all_threads=True)

    def _arm(self) -> None:
        """Has the stacks written also where this thread gets no turn, since C code holds the interpreter."""
        self._armed_s = time.monotonic()
        if not self._ending.locked():
            faulthandler.dump_traceback_later(self._limit_s * 1.25 + LATE_S, file=self._stacks)

    def _open_stacks(self) -> Any:
        path = self._folder.stacks(self._rank)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            return io.FileIO(path, "w")  # now: a signal's handler can open none
        except OSError:
            return sys.stderr

    def _remove_empty(self) -> None:
        """Leave no empty file behind: there is one for each rank."""
        path = self._folder.stacks(self._rank)
        if self._stacks is sys.stderr:
            return
        with contextlib.suppress(OSError):
            self._stacks.close()
            if path.stat().st_size == 0:
                path.unlink()
                path.parent.rmdir()

    def _read_schedule(self) -> Schedule:
        if self._schedule is None:
            self._schedule = self._folder.read_schedule()
        return self._schedule

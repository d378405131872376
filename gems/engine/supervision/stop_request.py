"""The stop watch: hears that somebody wants the run to save and stop, whatever the main thread is in."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

LOOK_S = 1.0
WARNING, END = signal.SIGUSR2, signal.SIGTERM


class StopWatch:
    """Waits in a thread of its own for a stop by signal or by stop.json, also while the main thread is inside MPI.

    SIGUSR2 asks to save and stop. Where `spares_sigterm`, so does the first SIGTERM: at a preemption SLURM sends it to
    the ranks alone, and lets them live for the partition's GraceTime; the second ends this process as it would without
    the watch. Elsewhere SIGTERM is left alone: it comes from a launcher that wants an end. What ends the whole job
    (scancel, the time limit) goes to srun as well, which kills the ranks whatever they do.

    Python's own handlers run in the main thread when that comes back from C, which may be minutes later. So the
    signals are blocked, and one thread takes them. Threads inherit that from the one that starts them: `start` comes
    before MPI and all else that has threads; those of libraries loaded even earlier tell of a signal through a pipe.

    Args:
        stop_json: The file that asks for a stop, to be looked for about once a second; None for a rank that need not
            look. One rank that looks is enough, and spares the file system of a thousand.
        spares_sigterm: Whether the first SIGTERM asks to save.
    """

    def __init__(self, stop_json: Path | None, *, spares_sigterm: bool) -> None:
        self._stop_json = stop_json
        self._signals = (WARNING, END) if spares_sigterm else (WARNING,)
        self._reason: str | None = None
        self._num_ends = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Blocks the signals and starts the thread; once, from the main thread."""
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        self._fd_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _leave_it) for number in self._signals}
        self._thread = threading.Thread(target=self._run, name="stop watch", daemon=True)
        self._thread.start()

    def reason(self) -> str | None:
        """Report why the run should save and stop; None while nobody asked. Costs nothing."""
        return self._reason

    def close(self) -> None:
        """End the thread and gives the signals back; from the main thread."""
        if self._thread is None:
            return
        self._closing.set()
        with contextlib.suppress(ProcessLookupError):
            signal.pthread_kill(self._thread.ident or 0, WARNING)  # it waits for this, so it wakes up at once
        self._thread.join()
        self._thread = None
        for number, before in self._before.items():
            signal.signal(number, before)
        signal.set_wakeup_fd(self._fd_before)
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask_before)
        for end in self._pipe:
            os.close(end)

    def _run(self) -> None:
        while not self._closing.is_set():
            taken = signal.sigtimedwait(self._signals, LOOK_S)
            if self._closing.is_set():
                return
            for number in [*([taken.si_signo] if taken else []), *self._of_other_threads()]:
                self._take(number)
            if self._reason is None and self._stop_json is not None:
                self._reason = read_reason(self._stop_json)

    def _of_other_threads(self) -> list[int]:
        """Return the signals that a thread took which is older than the watch."""
        with contextlib.suppress(BlockingIOError):
            return [number for number in os.read(self._pipe[0], 64) if number in self._signals]
        return []

    def _take(self, number: int) -> None:
        self._num_ends += number == END
        if self._num_ends > 1:
            _end_by(END)
        if self._reason is None:
            self._reason = signal.Signals(number).name


def stop_watch(stop_json: Path, rank: int, environment: Mapping[str, str] = os.environ) -> StopWatch:
    """Make the watch of a rank: rank 0 looks for the file, and ranks that srun started save at SIGTERM."""
    return StopWatch(stop_json if rank == 0 else None, spares_sigterm="SLURM_STEP_ID" in environment)


def read_reason(stop_json: Path) -> str | None:
    """Read why somebody wants a stop; None where there is no such file."""
    try:
        text = stop_json.read_text(errors="replace")
    except FileNotFoundError:
        return None
    except OSError:
        return None  # a file system that is away for a moment; the next look may do
    try:
        document = json.loads(text)
    except ValueError:
        document = None
    reason = document.get("reason") if isinstance(document, dict) else None
    return " ".join(str(reason or stop_json.name).split())


def _leave_it(number: int, frame: object) -> None:
    """Stand for the default action, which would end the process when an older thread is given the signal."""


def _end_by(number: signal.Signals) -> None:
    """End this process by a signal's default action, from any thread: `signal.signal` works in the main one alone."""
    ctypes.CDLL(None).signal(int(number), None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [number])
    os.kill(os.getpid(), number)

"""Requests to save and stop a run, by signal or by file, received whatever the main thread does."""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import threading
from collections.abc import Mapping
from pathlib import Path

POLL_S = 1.0
SAVE = signal.SIGUSR2
END = signal.SIGTERM


class StopListener:
    """Listens in a thread for SIGUSR2, SIGTERM and stop.json, even if the main thread is in MPI.

    SIGUSR2 asks to save and stop. If `sigterm_asks`, so does the first SIGTERM: at a preemption,
    SLURM sends it to the ranks alone and grants them the partition's GraceTime. The second SIGTERM
    ends the process. Otherwise SIGTERM keeps its default action. Events that end the whole job
    (scancel, the time limit) reach srun too, which kills the ranks. `stop_json` is None for a rank
    that does not check the file: one rank that checks is enough, and spares the file system.
    """

    # Python's handlers run in the main thread once it is back from C, maybe minutes later. So the
    # signals are blocked, and this thread waits for them. A thread inherits the mask of the thread
    # that starts it, so `start` must come before MPI. Threads of libraries loaded earlier report
    # signals through the wake-up pipe.

    def __init__(self, stop_json: Path | None, *, sigterm_asks: bool) -> None:
        self._stop_json = stop_json
        self._signals = (SAVE, END) if sigterm_asks else (SAVE,)
        self._reason: str | None = None
        self._num_ends = 0
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Block the signals and start the thread.

        Call it once, from the main thread, before anything else has started threads.
        """
        self._pipe = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self._mask_before = signal.pthread_sigmask(signal.SIG_BLOCK, self._signals)
        self._fd_before = signal.set_wakeup_fd(self._pipe[1], warn_on_full_buffer=False)
        self._before = {number: signal.signal(number, _ignore) for number in self._signals}
        self._thread = threading.Thread(target=self._run, name="stop listener", daemon=True)
        self._thread.start()

    def reason(self) -> str | None:
        """Return why the run should save and stop; None if nobody has asked."""
        return self._reason

    def close(self) -> None:
        """End the thread and restore the signals; call it from the main thread."""
        if self._thread is None:
            return
        self._closing.set()
        with contextlib.suppress(ProcessLookupError):
            signal.pthread_kill(self._thread.ident or 0, SAVE)  # wakes it up
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
            taken = signal.sigtimedwait(self._signals, POLL_S)
            if self._closing.is_set():
                return
            # a wait that ends while another signal interrupts it returns a number from nowhere
            numbers = [taken.si_signo] if taken and taken.si_signo in self._signals else []
            with contextlib.suppress(BlockingIOError):  # signals that older threads have received
                numbers += [
                    number for number in os.read(self._pipe[0], 64) if number in self._signals
                ]
            for number in numbers:
                self._take(number)
            if self._reason is None and self._stop_json is not None:
                self._reason = read_reason(self._stop_json)

    def _take(self, number: int) -> None:
        self._num_ends += number == END
        if self._num_ends > 1:
            # by the signal's default action; `signal.signal` works in the main thread only
            ctypes.CDLL(None).signal(int(END), None)
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [END])
            os.kill(os.getpid(), END)
        if self._reason is None:
            self._reason = signal.Signals(number).name


def stop_listener(
    stop_json: Path, rank: int, environment: Mapping[str, str] = os.environ
) -> StopListener:
    """Return the stop listener of a rank.

    Only rank 0 checks the file. Ranks started by srun save at SIGTERM.
    """
    return StopListener(
        stop_json if rank == 0 else None, sigterm_asks="SLURM_STEP_ID" in environment
    )


def read_reason(stop_json: Path) -> str | None:
    """Return why a stop is wanted; None if the file does not exist."""
    document = None
    try:
        document = json.loads(stop_json.read_text(errors="replace"))
    except OSError:
        return None  # after a file system error, the file may be back at the next poll
    except ValueError:
        pass  # the file's existence is the request
    reason = document.get("reason") if isinstance(document, dict) else None
    return " ".join(str(reason or stop_json.name).split())


def _ignore(number: int, frame: object) -> None:
    """Replace the default action, which would end the process on a signal to an older thread."""

"""Ranks as children of this process: the launcher's command line, environment and results.

The module needs only the standard library, so that login nodes and `gems verify` can use it.
"""

from __future__ import annotations

import contextlib
import functools
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from gems.errors import ConfigError
from gems.utils.process_tree import end_family

LEFTOVERS = (
    "SLURM_",
    "SLURMD_",
    "SRUN_",
    "SALLOC_",
    "SBATCH_",
    "SUBMITIT_",
    "PMI",
    "HYDI_",
    "MPI_LOCAL",
    "OMPI_COMM_WORLD_",
    "PALS_",
    "PBS_",
    "FLUX_",
)
KEPT = ("SLURM_CONF", "PMIX_MCA_", "PBS_CONF_FILE", "PBS_SERVER", "PBS_DEFAULT", "PBS_EXEC")
GRACE_S = 5.0
POLL_S = 0.1
TAIL_LINES = 200
# Hydra's last lines help to find the failing rank. On a screen they are noise, and they may name
# another rank.
NOISE = re.compile(
    rb"\[mpiexec@[^\]]*\] Exit codes:|={80,}\s*$|=   (BAD TERMINATION|PID|EXIT CODE|CLEANING UP|YOU"
    rb" CAN IGNORE)"
    rb"|YOUR APPLICATION TERMINATED WITH|This typically refers to a problem|Please see the FAQ page"
    rb" for debugging"
)
NOISE_STARTS = (b"[mpiexec@", b"=", b"YOUR APPLICATION", b"This typically", b"Please see the")


@dataclass(frozen=True, slots=True)
class Ended:
    """The launcher's return code (negative for a signal) and its last lines of output."""

    returncode: int
    tail: tuple[str, ...]
    timed_out: bool = False
    gave_up: bool = False
    stopped_by: str | None = None


def mpiexec_argv(num_ranks: int, program: Sequence[str]) -> list[str]:
    """Return the command line that starts `num_ranks` ranks of `program` on this machine.

    The mpiexec in the interpreter's folder (from the mpich wheel) is preferred to the one on PATH.

    Raises:
        ConfigError: There is no mpiexec.
    """
    mpiexec = _find_mpiexec()
    return [mpiexec, *_flags(mpiexec), "-n", str(num_ranks), *program]


def _find_mpiexec() -> str:
    beside = Path(sys.executable).parent / "mpiexec"
    mpiexec = str(beside) if os.access(beside, os.X_OK) else shutil.which("mpiexec")
    if mpiexec is None:
        raise ConfigError(
            "cluster.launcher",
            "mpiexec",
            "there is no mpiexec beside the interpreter or on PATH",
            "`pip install mpich`, or load the site's MPI module",
        )
    return mpiexec


@functools.cache
def _flags(mpiexec: str) -> tuple[str, ...]:
    """Return the flags to start more ranks than cores, also as root, and to report dead ranks."""
    family = _family(mpiexec)
    if family == "mpich":
        return ("-print-all-exitcodes",)
    if family == "openmpi":
        as_root = ("--allow-run-as-root",) if os.geteuid() == 0 else ()
        return ("--oversubscribe", "--bind-to", "none", *as_root)
    return ()


def mpi_family() -> str | None:
    """Return the family of the local mpiexec, mpich or openmpi.

    Return None for another family, or without mpiexec.
    """
    try:
        return _family(_find_mpiexec())
    except ConfigError:
        return None


def _family(mpiexec: str) -> str | None:
    argv = [mpiexec, "--version"]
    no_input = subprocess.DEVNULL
    try:
        ended = subprocess.run(argv, stdin=no_input, capture_output=True, text=True, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    version = ended.stdout + ended.stderr
    if "HYDRA" in version:
        return "mpich"
    return "openmpi" if re.search(r"Open ?MPI|OpenRTE|PRTE|PRRTE", version) else None


def without_leftovers(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the environment without variables of an enclosing allocation or MPI process.

    mpiexec would start ranks with srun because of SLURM_*. sbatch prefers SBATCH_* to the script's
    own lines. PMI_* makes a process believe that it is a rank of another world. mpiexec finds the
    nodes of a job through PBS_NODEFILE. Variables that locate a server, such as SLURM_CONF, stay.
    """
    return {
        name: value
        for name, value in environment.items()
        if name.startswith(KEPT) or not name.startswith(LEFTOVERS)
    }


def rank_environment(threads_per_rank: int, *, keep_slurm: bool = False) -> dict[str, str]:
    """Return the environment of ranks: that of this process, with thread counts and switches.

    `keep_slurm` is for srun, which must see its allocation. mpiexec must not see it, because its
    ranks belong on this machine, even inside an allocation.
    """
    base = dict(os.environ) if keep_slurm else without_leftovers(os.environ)
    threads = {f"{name}_NUM_THREADS": str(threads_per_rank) for name in ("OMP", "MKL", "OPENBLAS")}
    switches = {
        "HDF5_USE_FILE_LOCKING": "FALSE",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONUNBUFFERED": "1",
    }
    return base | threads | switches


@dataclass(frozen=True, slots=True)
class Output:
    """Where a launcher's output goes: to stderr (`echo`), to a file, and line by line to a call."""

    log: Path | None = None
    echo: bool = True
    on_line: Callable[[str], None] | None = None


ECHO = Output()
QUIET = Output(echo=False)


def run_ranks(
    argv: Sequence[str],
    environment: Mapping[str, str],
    output: Output = ECHO,
    timeout_s: float | None = None,
    give_up: Callable[[], bool] | None = None,
    grace_s: float = GRACE_S,
    source: int = subprocess.DEVNULL,
) -> Ended:
    """Run a launcher to its end.

    Its input is the file descriptor `source`, empty by default. The launcher and all its
    descendants are ended on time-out, SIGTERM, SIGHUP, KeyboardInterrupt, or when `give_up`
    (polled) returns True. They get SIGTERM and after `grace_s` SIGKILL. KeyboardInterrupt is raised
    again.

    Raises:
        ConfigError: The launcher's program cannot be started.
    """
    deadline_s = None if timeout_s is None else time.monotonic() + timeout_s
    timed_out = gave_up = False
    with contextlib.ExitStack() as stack:
        stopped = stack.enter_context(_noting_signals())
        log = None
        if output.log is not None:
            log = stack.enter_context(output.log.open("ab", buffering=0))
        try:
            process = subprocess.Popen(
                list(argv),
                env=dict(environment),
                stdin=source,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ConfigError(
                "launcher", argv[0], f"cannot be started ({error.strerror})"
            ) from error
        assert process.stdout is not None
        pump = _Pump(process.stdout, log, output)
        try:
            while process.poll() is None and not (stopped or timed_out or gave_up):
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(POLL_S)
                timed_out = deadline_s is not None and time.monotonic() > deadline_s
                gave_up = give_up is not None and give_up()
        finally:
            end_family(process, grace_s)
            pump.finish()
    return Ended(
        process.returncode, tuple(pump.tail), timed_out, gave_up, stopped[0] if stopped else None
    )


class _Pump:
    """A thread that reads a launcher's output to its end, so that ranks never wait for a reader."""

    def __init__(self, source: IO[bytes], log: IO[bytes] | None, output: Output) -> None:
        self._source = source
        self._log = log
        self._output = output
        self._rest = b""
        self._shown = 0
        self.tail: deque[str] = deque(maxlen=TAIL_LINES)  # the last lines, without empty ones
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def finish(self) -> None:
        """Wait until all output is read, but not for an orphan that keeps the pipe open."""
        self._thread.join(timeout=2.0)
        if not self._thread.is_alive():
            self._source.close()

    def _run(self) -> None:
        while chunk := os.read(self._source.fileno(), 1 << 16):
            if self._log is not None:
                with contextlib.suppress(OSError):
                    self._log.write(chunk)
            self._take(chunk)
        self._take(b"\n" if self._rest else b"")

    def _take(self, chunk: bytes) -> None:
        *lines, self._rest = re.split(rb"(?<=[\n\r])", self._rest + chunk)
        for line in lines:
            if self._shown or not NOISE.match(line):
                self._show(line[self._shown :])
            self._shown = 0
            text = line.decode(errors="replace").strip()
            if text:
                self.tail.append(text[:2000])
                if self._output.on_line is not None:
                    self._output.on_line(text)
        if not any(start.startswith(self._rest[: len(start)]) for start in NOISE_STARTS):
            self._show(self._rest[self._shown :])
            self._shown = len(self._rest)

    def _show(self, text: bytes) -> None:
        if self._output.echo and text:
            with contextlib.suppress(OSError, ValueError):
                sys.stderr.buffer.write(text)
                sys.stderr.flush()


@contextlib.contextmanager
def _noting_signals() -> Iterator[list[str]]:
    """Collect SIGTERM and SIGHUP in a list while the block runs.

    Signals are only collected in the main thread, because Python allows no other. A caller's own
    SIGHUP handler stays, and so does nohup, which ignores SIGHUP.
    """
    noted: list[str] = []
    if threading.current_thread() is not threading.main_thread():
        yield noted
        return
    hangup = [signal.SIGHUP] if signal.getsignal(signal.SIGHUP) is signal.SIG_DFL else []

    def note(number: int, frame: types.FrameType | None) -> None:
        noted.append(signal.Signals(number).name)

    before = {number: signal.signal(number, note) for number in (signal.SIGTERM, *hangup)}
    try:
        yield noted
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

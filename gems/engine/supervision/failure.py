"""What a failing rank leaves: one line on stderr, FAILED.rank<k>.json, and an end that cannot hang."""

from __future__ import annotations

import contextlib
import faulthandler
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

from gems.errors import ConfigError, GemsError, RankFailedError
from gems.runs.failure_cause import classify_error
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Beat, read_beat
from gems.schedule.action import Action
from gems.utils.atomic_io import write_json
from gems.utils.host_memory import rss_bytes

SPEAK_S = 0.3  # launchers pass nothing on once a rank aborts, not even what it had said before
DUMP_S = 3.0  # the others look for a stall every two seconds, and need a moment to leave their stacks
END_LIMIT_S = 30.0
MAX_LINES = 200
T = TypeVar("T")


def launched_rank() -> int:
    """Return this process's rank as its launcher numbers it, which stands also where MPI did not start."""
    names = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "PALS_RANKID", "SLURM_PROCID")
    return next((int(os.environ[name]) for name in names if os.environ.get(name, "").isdecimal()), 0)


def report(folder: RunFolder, rank: int, error: BaseException, frames: Sequence[str] | None = None) -> int:
    """Report the failure in a line, writes FAILED.rank<k>.json, and gives the exit code for the job.

    The line comes first: it is what stays when the file system is full or gone. Nothing that goes wrong here is
    raised, and what of the record cannot be found out is left out of it.

    Args:
        folder: the run's.
        rank: this one.
        error: why it ends.
        frames: lines to be kept in place of the exception's own traceback, where another thread is at fault.
    """
    code = error.exit_code if isinstance(error, GemsError) else RankFailedError.exit_code
    beat = _quietly(lambda: read_beat(folder.heartbeat(rank)))
    cause = cause_of(error)
    with contextlib.suppress(Exception):
        _say(rank, beat, error, cause)
    lines = list(frames) if frames is not None else _traceback(error)
    record: dict[str, Any] = {
        "rank": rank, "node": os.uname().nodename, "pid": os.getpid(),
        "step": beat.step if beat else -1, "action": beat.action if beat else "start",
        "stage": stage_of(beat.action) if beat else None, "cause": cause, "cause_class": str(classify_error(error).cause),
        "kind": type(error).__name__, "errno": error.errno if isinstance(error, OSError) else None,
        "traceback": lines[-MAX_LINES:], "waits_for": getattr(error, "waits_for", None), **_memory(), "mpi": _mpi(),
        "exit_code": code, "utc": datetime.now(UTC).isoformat(timespec="milliseconds"),
    }  # fmt: skip
    try:
        write_json(folder.failed_json(rank), record)
    except Exception as failure:
        with contextlib.suppress(Exception):
            print(f"gems: rank {rank} cannot write to {folder.path}: {failure}", file=sys.stderr, flush=True)
    return code


def cause_of(error: BaseException) -> str:
    """Describe an exception in one line: one of ours by its text, others by class, text and what is known of their kind."""
    with contextlib.suppress(Exception):
        text = " ".join(str(error).split())
        if isinstance(error, GemsError):
            return text
        hint = classify_error(error).hint
        return " ".join(f"{type(error).__name__}: {text}{f' ({hint})' if hint else ''}".split())
    return type(error).__name__


def stage_of(action: str) -> int | None:
    """Return the stage that an action works on; None for what is no action of the schedule."""
    try:
        return Action.parse(action).stage
    except ConfigError:
        return None


def guard(limit_s: float = END_LIMIT_S) -> None:
    """Make sure that this process ends within `limit_s`, whatever hangs: a file system, MPI, an exit handler.

    From here on SIGTERM and SIGINT are left alone, which come when another rank has failed too: this one ends anyway,
    and what it has to say is not lost. Only the main thread can arrange that part.
    """
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(Exception):
        # A thread without Python: it works also when the interpreter is held.
        faulthandler.dump_traceback_later(limit_s, exit=True)


def end_all(code: int, wait_s: float = SPEAK_S) -> NoReturn:
    """End all ranks of the job, through MPI where it runs; from the main thread."""
    time.sleep(wait_s)
    with contextlib.suppress(BaseException):
        from gems.engine.transport.mpi import abort

        abort(code)
    os._exit(code)


def _say(rank: int, beat: Beat | None, error: BaseException, cause: str) -> None:
    where = "before the first step (start)"
    if beat is not None:
        in_step = f"in step {beat.step}, action {beat.action}"
        where = in_step if beat.step >= 0 else f"before the first step ({beat.action})"
    if not isinstance(error, GemsError):
        traceback.print_exception(error)
    waits_for = getattr(error, "waits_for", None)
    more = f"; {waits_for}" if waits_for else ""
    node = os.uname().nodename
    print(f"gems: rank {rank} on node {node} failed {where}: {cause}{more}", file=sys.stderr, flush=True)


def _traceback(error: BaseException) -> list[str]:
    def lines() -> list[str]:
        return [line for part in traceback.format_exception(error) for line in part.rstrip("\n").split("\n")]

    return _quietly(lines) or []


def _memory() -> dict[str, int | None]:
    """Return resident bytes of this process, and what torch's allocator uses and has taken of its GPU."""
    device: tuple[int, int] | None = _quietly(_device_bytes)
    allocated, reserved = device if device is not None else (None, None)
    return {"rss_bytes": _quietly(rss_bytes), "device_bytes": allocated, "device_reserved_bytes": reserved}


def _device_bytes() -> tuple[int, int] | None:
    torch = sys.modules.get("torch")  # never loaded here: this may be why the rank fails
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_allocated()), int(torch.cuda.memory_reserved())


def _mpi() -> str | None:
    """Return the MPI library's description, where it came to be loaded."""
    transport = sys.modules.get("gems.engine.transport.mpi")
    return None if transport is None else _quietly(lambda: str(transport.library()))


def _quietly(ask: Callable[[], T]) -> T | None:
    try:
        return ask()
    except Exception:
        return None

"""How a rank fails: one line in the log, FAILED.rank<k>.json, and an exit that cannot hang."""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from typing import Any, NoReturn, TypeVar

from gems.engine.supervision.out_of_memory import explain_out_of_memory
from gems.errors import ConfigError, GemsError, LostPeerError, RankFailedError, StalledError
from gems.runs.failure_cause import classify_error
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Beat, now_ns, read_beat
from gems.schedule.action import Action
from gems.utils.atomic_io import write_json
from gems.utils.host_memory import rss_bytes

FLUSH_S = 0.3  # launchers forward nothing after a rank aborts, not even what it wrote before
# grace period: let the launcher report the root cause of this rank's lost messages first
LOST_PEER_S = 2.0
# other ranks check for a hang every two seconds, and need a moment to write their stacks
DUMP_S = 3.0
END_LIMIT_S = 30.0
MAX_LINES = 200
T = TypeVar("T")
_log = logging.getLogger(__name__)


def report_failure(
    folder: RunFolder, rank: int, error: BaseException, frames: Sequence[str] | None = None
) -> int:
    """Log the failure in one line, write FAILED.rank<k>.json, and return the job's exit code.

    The function never raises; unknown facts are left out of the record. `frames` replace the
    exception's own traceback if another thread is at fault.
    """
    code = error.exit_code if isinstance(error, GemsError) else RankFailedError.exit_code
    beat = _or_none(lambda: read_beat(folder.heartbeat(rank)))
    cause = describe_cause(error)
    memory = _or_none(lambda: explain_out_of_memory(error, folder, rank))
    with contextlib.suppress(Exception):  # first of all: the file system may be full or gone
        where = "before the first step (start)"
        if beat is not None:
            in_step = f"in step {beat.step}, action {beat.action}"
            where = in_step if beat.step >= 0 else f"before the first step ({beat.action})"
        if not isinstance(error, GemsError):
            traceback.print_exception(error)
        waits_for = getattr(error, "waits_for", None)
        more = f"; {waits_for}" if waits_for else ""
        if memory is not None:
            more = f"; {memory.describe()}; to change: {'; '.join(memory.advice)}"
        _log.error("failed on node %s %s: %s%s", os.uname().nodename, where, cause, more)
    lines = (
        frames
        if frames is not None
        else _or_none(lambda: "".join(traceback.format_exception(error)).rstrip("\n").split("\n"))
    )
    allocated, reserved = _or_none(_device_bytes) or (None, None)
    record = rank_facts(rank, beat) | {
        "stage": stage_number(beat.action) if beat else None,
        "cause": cause,
        "cause_class": str(classify_error(error).cause),
        "kind": type(error).__name__,
        "errno": error.errno if isinstance(error, OSError) else None,
        "traceback": list(lines or ())[-MAX_LINES:],
        "waits_for": getattr(error, "waits_for", None),
        "rss_bytes": _or_none(rss_bytes),
        "device_bytes": allocated,
        "device_reserved_bytes": reserved,
        "memory": None if memory is None else memory.to_dict(),
        "mpi": _or_none(_mpi_library),
        "exit_code": code,
    }
    try:
        write_json(folder.failed_json(rank), record)
    except Exception as failure:
        with contextlib.suppress(Exception):
            _log.error("cannot write to %s: %s", folder.path, failure)
    return code


def rank_facts(rank: int, beat: Beat | None) -> dict[str, Any]:
    """Return the identity and location of this rank, for a record of its end."""
    utc = datetime.fromtimestamp(now_ns() / 1e9, UTC).isoformat(timespec="milliseconds")
    return {
        "rank": rank,
        "node": os.uname().nodename,
        "pid": os.getpid(),
        "step": beat.step if beat else -1,
        "action": beat.action if beat else "start",
        "utc": utc,
    }


def describe_cause(error: BaseException) -> str:
    """Describe an exception in one line: our own errors by text, others by type, text and hint."""
    with contextlib.suppress(Exception):
        text = " ".join(str(error).split())
        if isinstance(error, GemsError):
            return text
        hint = classify_error(error).hint
        return " ".join(f"{type(error).__name__}: {text}{f' ({hint})' if hint else ''}".split())
    return type(error).__name__


def stage_number(action: str) -> int | None:
    """Return the stage of an action; None for a phase outside of the schedule."""
    try:
        return Action.parse(action).stage
    except ConfigError:
        return None


def ensure_exit(limit_s: float = END_LIMIT_S) -> None:
    """Make sure that this process ends within `limit_s`, whatever hangs.

    A file system, MPI or an exit handler may hang. In the main thread, SIGTERM and SIGINT are
    ignored from now on: they come if another rank has failed too, and would end this rank before it
    has reported its failure.
    """
    with contextlib.suppress(ValueError):  # not in the main thread
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(Exception):
        # a thread without Python, which works even while the interpreter is held
        faulthandler.dump_traceback_later(limit_s, exit=True)


def abort_all_ranks(code: int, error: BaseException) -> NoReturn:
    """End all ranks of the job after an error, through MPI if it runs.

    Call it from the main thread. MPI_Abort kills the other ranks; after that, nobody can tell
    whether one of them had been killed before.
    """
    has_lost_peer = isinstance(error, LostPeerError) or type(error).__module__.startswith("mpi4py")
    time.sleep(
        DUMP_S if code == StalledError.exit_code else LOST_PEER_S if has_lost_peer else FLUSH_S
    )
    with contextlib.suppress(BaseException):
        from gems.engine.transport.mpi import abort

        abort(code)
    os._exit(code)


def _device_bytes() -> tuple[int, int] | None:
    torch = sys.modules.get("torch")  # never loaded here: this may be why the rank fails
    if torch is None or not torch.cuda.is_initialized():
        return None
    return int(torch.cuda.memory_allocated()), int(torch.cuda.memory_reserved())


def _mpi_library() -> str | None:
    transport = sys.modules.get("gems.engine.transport.mpi")
    return None if transport is None else str(transport.library())


def _or_none(read: Callable[[], T]) -> T | None:
    try:
        return read()
    except Exception:
        return None

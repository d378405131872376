"""Why a run ended: the causes of failure that the engine, launcher and `jobs diagnose` share."""

from __future__ import annotations

import errno
import re
from enum import StrEnum
from typing import NamedTuple

from gems.config.schema import MemoryConfig, ParallelConfig
from gems.errors import ConfigError, DoesNotFitError, NodeFailedError, StalledError

FILE_SYSTEM_ERRORS = (
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EIO,
    errno.ESTALE,
    errno.EROFS,
    errno.ENODEV,
    errno.ENOTCONN,
    errno.EREMOTEIO,
)
# messages of libraries other than torch's allocator
DEVICE_FULL = re.compile(r"(?:CUDA|HIP) error: out of memory")
HOST_FULL = re.compile(r"DefaultCPUAllocator: .*you tried to allocate")


class FailureCause(StrEnum):
    """Why a run ended, or what it is doing; the value is its name in messages and JSON."""

    DEVICE_MEMORY = "out of memory on device"
    HOST_MEMORY = "out of memory on host"
    DOES_NOT_FIT = "does not fit"
    EXCEPTION = "exception"
    KILLED = "killed"
    DEVICE = "device failed"
    NODE = "node failed"
    TIME_LIMIT = "time limit"
    PREEMPTED = "preempted"
    CANCELLED = "cancelled"
    STALLED = "stalled"
    FILE_SYSTEM = "file system"
    WRONG_MPI = "wrong MPI"
    CONFIGURATION = "configuration"
    LAUNCHER = "launcher"
    FINISHED = "finished"
    STOPPED = "stopped"
    RUNNING = "running"
    WAITING = "waiting"
    UNKNOWN = "unknown"

    @property
    def is_failure(self) -> bool:
        """Whether the run ended in failure."""
        return self not in (self.FINISHED, self.STOPPED, self.RUNNING, self.WAITING)


class ErrorClass(NamedTuple):
    """The cause of an exception, and a hint to append to its own message."""

    cause: FailureCause
    hint: str = ""


def classify_error(error: BaseException) -> ErrorClass:
    """Classify an exception by its type and error number.

    Use the first exception in its chain of causes that has a known cause.
    """
    seen: set[int] = set()
    link: BaseException | None = error
    while link is not None and id(link) not in seen:
        known = _classify(link)
        if known.cause is not FailureCause.EXCEPTION:
            return known
        seen.add(id(link))
        link = link.__cause__ or link.__context__
    return _classify(error)


def _classify(error: BaseException) -> ErrorClass:
    names = {kind.__name__ for kind in type(error).__mro__}
    if isinstance(error, StalledError):
        return ErrorClass(FailureCause.STALLED)
    if isinstance(error, NodeFailedError):
        return ErrorClass(FailureCause.NODE)
    if isinstance(error, DoesNotFitError):
        return ErrorClass(FailureCause.DOES_NOT_FIT)
    if isinstance(error, ConfigError):
        return ErrorClass(
            FailureCause.WRONG_MPI if error.key == "cluster.mpi" else FailureCause.CONFIGURATION
        )
    text = str(error) if isinstance(error, RuntimeError) else ""
    if "OutOfMemoryError" in names or DEVICE_FULL.search(text):
        return ErrorClass(FailureCause.DEVICE_MEMORY, "the device's memory is full")
    is_full = isinstance(error, OSError) and error.errno == errno.ENOMEM
    if isinstance(error, MemoryError) or is_full or HOST_FULL.search(text):
        return ErrorClass(
            FailureCause.HOST_MEMORY, "the node's memory, or the job's share of it, is full"
        )
    if (
        isinstance(error, OSError)
        and error.errno in FILE_SYSTEM_ERRORS
        and not _is_of_socket(error)
    ):
        name = errno.errorcode[error.errno]
        return ErrorClass(
            FailureCause.FILE_SYSTEM, f"{name}: the file system's fault, or the quota's"
        )
    if isinstance(error, ImportError):
        missing = getattr(error, "name", None) or str(error)
        text = f"{missing} {error}".lower()
        if "libmpi" in text or "mpi4py" in text or "libpmi" in text:
            return ErrorClass(
                FailureCause.WRONG_MPI, "mpi4py and this node's MPI library do not match"
            )
        hint = f"the environment of this node lacks {missing}: modules, container, cluster.python"
        return ErrorClass(FailureCause.CONFIGURATION, hint)
    if type(error).__module__.startswith("mpi4py"):
        return ErrorClass(FailureCause.EXCEPTION, "MPI failed: another rank may be gone")
    return ErrorClass(FailureCause.EXCEPTION)


def _is_of_socket(error: OSError) -> bool:
    # a file's mount may be gone as well, but then the file has a name
    return isinstance(error, ConnectionError) or (
        error.errno == errno.ENOTCONN and error.filename is None
    )


def device_memory_remedies(
    memory: MemoryConfig | None, parallel: ParallelConfig | None, is_fragmented: bool = False
) -> tuple[str, ...]:
    """Return the changes that may help after a device ran out of memory, most promising first.

    The sections of the run are None if unknown. Memory `is_fragmented` if the free blocks of
    torch's allocator together would have been large enough.
    """
    advice = []
    if is_fragmented:
        advice.append(
            "+cluster.environment.PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True: the allocator's"
            " free pieces would have been enough"
        )
    if memory is not None and not memory.keeps:
        advice.append(f"a smaller memory.limit_bytes, now under {memory.choice}")
    else:
        advice.append(
            "memory=plan with machine.device_bytes, which recomputes or offloads what does not fit"
        )
    if parallel is None or parallel.micro_batch_size > 1:
        now = "" if parallel is None else f", now {parallel.micro_batch_size}"
        advice.append(f"parallel.micro_batch_size: fewer images at once{now}")
    if parallel is not None:
        advice.append(f"parallel.strips: images in more strips of rows, now {parallel.strips}")
    partitions = "" if parallel is None else f", now {parallel.partitions}"
    advice.append(f"parallel.partitions: more ranks hold less each{partitions}")
    return (*advice, "schedule.activation_cap_bytes: fewer micro-batches in flight")

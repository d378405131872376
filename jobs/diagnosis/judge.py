"""Causes of a run's end, and which of several findings tells the cause: the earlier in time and the more specific."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """Why a run ended, or how it stands; the value is its name in words and JSON."""

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


NOT_FAILED = (Cause.FINISHED, Cause.STOPPED, Cause.RUNNING, Cause.WAITING)
# How much a finding of a class explains of others that have no time, most first. The orders of a scheduler come last
# among what is certain: a run that hangs after its failure is ended by its time limit.
SPECIFIC = (
    Cause.DEVICE, Cause.HOST_MEMORY, Cause.WRONG_MPI, Cause.DEVICE_MEMORY, Cause.DOES_NOT_FIT, Cause.FILE_SYSTEM,
    Cause.CONFIGURATION, Cause.LAUNCHER, Cause.NODE, Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.CANCELLED, Cause.EXCEPTION,
    Cause.KILLED, Cause.STALLED, Cause.UNKNOWN,
)  # fmt: skip
ORDERS = (Cause.NODE, Cause.PREEMPTED, Cause.TIME_LIMIT, Cause.CANCELLED)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one source says of a run's end, in its own words.

    `time_ns` is None where the source has no clock. `may_follow` says that something else may have brought it about:
    who waits for a rank that is gone stalls, and a launcher kills the ranks that are left.
    """

    cause: Cause
    source: str
    text: str
    time_ns: int | None = None
    rank: int | None = None
    node: str | None = None
    may_follow: bool = False


def judge(findings: Iterable[Finding]) -> Finding | None:
    """Return the finding that tells the cause; None where there is none.

    What may follow from something else counts only where nothing else was found: a rank that the kernel killed for
    memory also reads as killed by signal 9, and then the words about memory win. Among the rest the earliest goes first; where a
    source has no clock, one that names a fault goes before one that has, and an order of the scheduler's behind it.
    """
    found = list(findings)
    if any(finding.cause is Cause.NODE for finding in found):  # SLURM says it minutes after ranks have begun to wait
        found = [finding for finding in found if finding.cause is not Cause.STALLED]
    firm = [finding for finding in found if not finding.may_follow]
    if not firm:
        return min(found, key=_specific, default=None)
    return min(firm, key=lambda finding: (_time(finding), _specific(finding)))


def _specific(finding: Finding) -> int:
    return SPECIFIC.index(finding.cause) if finding.cause in SPECIFIC else len(SPECIFIC)


def _time(finding: Finding) -> float:
    if finding.time_ns is not None:
        return finding.time_ns
    return math.inf if finding.cause in ORDERS else -math.inf

"""Findings on a run's end, and which of several tells the cause: the earlier in time and the more specific."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from gems.runs.failure_cause import FailureCause

# The causes of findings without a time, the most specific first. The scheduler's orders come last among what is
# certain:
# a run that hangs after its failure is ended by its time limit.
BY_SPECIFICITY = (
    FailureCause.DEVICE, FailureCause.HOST_MEMORY, FailureCause.WRONG_MPI, FailureCause.DEVICE_MEMORY,
    FailureCause.DOES_NOT_FIT, FailureCause.FILE_SYSTEM, FailureCause.CONFIGURATION, FailureCause.LAUNCHER,
    FailureCause.NODE, FailureCause.PREEMPTED, FailureCause.TIME_LIMIT, FailureCause.CANCELLED, FailureCause.EXCEPTION,
    FailureCause.KILLED, FailureCause.STALLED, FailureCause.UNKNOWN,
)  # fmt: skip
ORDERS = (FailureCause.NODE, FailureCause.PREEMPTED, FailureCause.TIME_LIMIT, FailureCause.CANCELLED)


@dataclass(frozen=True, slots=True)
class Finding:
    """What one source reports of a run's end, in its own words.

    `time_ns` is None if the source has no clock. `may_follow` marks a possible consequence of something else: a rank
    that waits for a dead one stalls, and a launcher kills the ranks that are left.
    """

    cause: FailureCause
    source: str
    text: str
    time_ns: int | None = None
    rank: int | None = None
    node: str | None = None
    may_follow: bool = False


def judge(findings: Iterable[Finding]) -> Finding | None:
    """Return the finding that tells the cause, or None.

    A possible consequence counts only if nothing else was found: a rank that the kernel killed for its memory also
    reads as killed by signal 9. Among the rest the earliest goes first; of those without a time, faults go before
    findings that have one, and the scheduler's orders after them.
    """
    found = list(findings)
    if any(finding.cause is FailureCause.NODE for finding in found):  # reported minutes after ranks began to wait
        found = [finding for finding in found if finding.cause is not FailureCause.STALLED]
    certain = [finding for finding in found if not finding.may_follow]
    if not certain:
        return min(found, key=_specificity, default=None)
    return min(certain, key=lambda finding: (_time(finding), _specificity(finding)))


def _specificity(finding: Finding) -> int:
    return BY_SPECIFICITY.index(finding.cause) if finding.cause in BY_SPECIFICITY else len(BY_SPECIFICITY)


def _time(finding: Finding) -> float:
    if finding.time_ns is not None:
        return finding.time_ns
    return math.inf if finding.cause in ORDERS else -math.inf

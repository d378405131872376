"""Patterns in a run's logs that tell why it ended: messages of kernels, SLURM, MPI and libraries."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gems.runs.failure_cause import FailureCause
from jobs.diagnosis.finding import Finding
from jobs.slurm.messages import NODE_FAILURE, Cancellation, parse_cancellation

MAX_PER_CAUSE = 3
HEAD_BYTES, TAIL_BYTES = 1 << 20, 4 << 20  # of a longer log the middle is left out
LINE_CHARS = 400
LABEL = re.compile(r"^ *(?P<rank>\d{1,6}): ?")
NODE = r"(?P<node>[A-Za-z0-9][A-Za-z0-9._-]*)"


@dataclass(frozen=True, slots=True)
class LogPattern:
    """A pattern and the cause that it shows; a group `node` names the node at fault."""

    cause: FailureCause
    pattern: re.Pattern[str]
    may_follow: bool = False


def _pattern(cause: FailureCause, pattern: str, *, may_follow: bool = False) -> LogPattern:
    return LogPattern(cause, re.compile(pattern), may_follow)


# The first pattern that matches a line counts.
PATTERNS = (
    _pattern(FailureCause.NODE, NODE_FAILURE.pattern),
    _pattern(FailureCause.NODE, r"(?i)(?:task|batch|job) launch .*failed.*prolog|prolog (?:failure|failed|error)"),
    # MPICH's own shared memory, left behind by killed ranks, reads as a lack of memory.
    _pattern(FailureCause.LAUNCHER,
    r"MPIDI_POSIX\w*\(\d+\).*[Oo]ut of memory|unable to open shared memory|mpich_shm_\S+.*(?:denied|exists)"),
    _pattern(FailureCause.DEVICE_MEMORY,
    r"(?:CUDA|HIP|XPU)(?: error:)? out of memory|OutOfMemoryError|cudaErrorMemoryAllocation"
             r"|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|hipErrorOutOfMemory"),
    _pattern(FailureCause.HOST_MEMORY,
    r"[Dd]etected \d+ oom[-_]kill event|oom[-_]kill(?:er)?[:\s]|exceeded (?:job |step )?memory limit"
             r"|srun: error: " + NODE + r": tasks? [\d,-]+: Out Of Memory"),
    _pattern(FailureCause.HOST_MEMORY,
    r"Out of memory: Killed process|Memory cgroup out of memory|[Kk]illed by the cgroup out-of-memory handler"),
    _pattern(FailureCause.HOST_MEMORY,
    r"\bMemoryError\b|std::bad_alloc|DefaultCPUAllocator: .*allocate memory|Cannot allocate memory"
             r"|insufficient shared memory"),
    _pattern(FailureCause.DEVICE,
    r"(?i)uncorrectable (?:ECC|NVLink) error|uncorrectable ECC|fallen off the bus|fell off the bus"
             r"|NVRM: Xid .*: (?:48|62|63|64|74|79|92|94|95|119|120|140),|no CUDA-capable device is detected"
             r"|CUDA-capable devices? (?:\(s\) )?(?:is|are) busy or unavailable|GPU requires reset"),
    _pattern(FailureCause.FILE_SYSTEM,
    r"No space left on device|Disk quota exceeded|Stale (?:NFS )?file handle|Input/output error"
             r"|Read-only file system|Transport endpoint is not connected|Remote I/O error"),
    _pattern(FailureCause.WRONG_MPI,
    r"MPI sees a world of \d+|not built with SLURM's PMI support|unsupported PMI version"
             r"|PMI2?_(?:Init|Job_GetId|KVS\w*) .*fail|lib(?:mpi|pmi|pmix)\w*\.so[.\w]*: cannot open shared object file"
             r"|(?:can not|cannot) load PMIx|Couldn't find the specified plugin name for mpi"
             r"|(?:invalid|Invalid) MPI type"
             r"|GPU_SUPPORT_ENABLED is requested, but GTL library is not linked|pmix_psquash"
             r"|OPAL ERROR: .*[Pp]mix|PMIX ERROR|cannot load MPI library"),
    _pattern(FailureCause.LAUNCHER, r"execve\(\): |[Uu]nable to create step|slurmstepd: error: .*[Nn]o such file"
             r"|srun: error: (?:Unable to|Invalid|Task launch)|cannot be started|: command not found"
             r"|[Mm]odule\(s\) are unknown|Unable to locate a modulefile"),
    _pattern(FailureCause.EXCEPTION,
    r"^(?:[A-Za-z_][A-Za-z_0-9]*\.)*(?!StalledError|RankFailedError|SystemExit)"
             r"(?:[A-Z]\w*)?(?:Error|Exception)(?:: |$)"),
    _pattern(FailureCause.EXCEPTION, r"NCCL (?:error|WARN .*failed)|ncclInternalError|ncclUnhandledCudaError",
    may_follow=True),
    _pattern(FailureCause.EXCEPTION, r"MPICH ERROR|UCX +ERROR|Fatal error in \w*MPI|Fatal error in internal_",
    may_follow=True),
    _pattern(FailureCause.KILLED, r"\bBus error\b|Segmentation fault|Illegal instruction", may_follow=True),
)  # fmt: skip
# Exceptions that a rank meets because another one has gone.
CONSEQUENCE = re.compile(
    r"mpi4py\.MPI\.Exception|^Exception: .*MPI|MPI_ERR|ConnectionResetError|BrokenPipeError|KeyboardInterrupt"
)


def scan_lines(lines: Iterable[str], source: str) -> list[Finding]:
    """Return the findings in a log's lines, at most MAX_PER_CAUSE of each cause, in their order."""
    found: list[Finding] = []
    counts: dict[tuple[FailureCause, bool], int] = {}
    for line in lines:
        finding = scan_line(line, source)
        if finding is None:
            continue
        key = finding.cause, finding.may_follow
        counts[key] = counts.get(key, 0) + 1
        if counts[key] <= MAX_PER_CAUSE:
            found.append(finding)
    return found


def scan_line(line: str, source: str) -> Finding | None:
    """Return the finding in one line of a log, or None."""
    label = LABEL.match(line)
    text = line[label.end() :].strip() if label else line.strip()
    rank = int(label["rank"]) if label else None
    cancellation = parse_cancellation(text)
    if cancellation is not None and (cause := _cause(cancellation)) is not None:
        # srun --kill-on-bad-exit ends the step of a rank that has failed by the same message
        return Finding(
            cause, source, text[:LINE_CHARS], cancellation.time_ns, rank, may_follow=cause is FailureCause.KILLED
        )
    for each in PATTERNS:
        match = each.pattern.search(text)
        if match is not None:
            may_follow = each.cause is FailureCause.EXCEPTION and CONSEQUENCE.search(text) is not None
            node = match.groupdict().get("node")
            return Finding(
                each.cause, source, text[:LINE_CHARS], rank=rank, node=node, may_follow=each.may_follow or may_follow
            )
    return None


def classify_text(text: str) -> FailureCause | None:
    """Return the cause that an exception's text shows, or None if it shows none in particular."""
    finding = scan_line(text, "")
    is_vague = finding is None or finding.may_follow or finding.cause is FailureCause.EXCEPTION
    return None if finding is None or is_vague else finding.cause


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a log, of a long one the first and the last; none if it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = path.stat().st_size
        is_long = size > HEAD_BYTES + TAIL_BYTES
        yield from re.split(r"[\n\r]+", file.read(HEAD_BYTES if is_long else -1).decode(errors="replace"))
        if is_long:
            file.seek(size - TAIL_BYTES)
            yield from re.split(r"[\n\r]+", file.read().decode(errors="replace"))


def _cause(cancellation: Cancellation) -> FailureCause | None:
    if not cancellation.reason and not cancellation.is_job:
        return FailureCause.KILLED
    return FailureCause(cancellation.cause) if cancellation.cause in tuple(FailureCause) else None

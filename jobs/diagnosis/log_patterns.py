"""Words of kernels, SLURM, MPI and libraries in a run's logs that tell why it ended."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from jobs.diagnosis.judge import Cause, Finding

MAX_OF_A_SIGN = 3
HEAD_BYTES, TAIL_BYTES = 1 << 20, 4 << 20  # of a longer log the middle is left out
LINE_CHARS = 400
LABEL = re.compile(r"^ *(?P<rank>\d{1,6}): ?")
CANCELLED_AT = re.compile(r"CANCELLED AT (?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)")
NODE = r"(?P<node>[A-Za-z0-9][A-Za-z0-9._-]*)"


@dataclass(frozen=True, slots=True)
class Sign:
    """A pattern and the class that it tells; a group `node` names the node at fault."""

    cause: Cause
    pattern: re.Pattern[str]
    may_follow: bool = False


def _sign(cause: Cause, pattern: str, *, may_follow: bool = False) -> Sign:
    return Sign(cause, re.compile(pattern), may_follow)


# The first sign that fits a line counts.
SIGNS = (
    _sign(Cause.PREEMPTED, r"\*\*\* (?:JOB|STEP) .* DUE TO PREEMPTION"),
    _sign(Cause.TIME_LIMIT, r"\*\*\* (?:JOB|STEP) .* DUE TO TIME LIMIT"),
    _sign(Cause.NODE, rf"[Nn]ode failure on {NODE}"),
    _sign(Cause.NODE, r"\*\*\* (?:JOB|STEP) .* DUE TO NODE FAILURE"),
    _sign(Cause.CANCELLED, r"\*\*\* JOB .* CANCELLED AT (?!.* DUE TO )"),
    # srun --kill-on-bad-exit ends the step of a rank that has failed in the same words
    _sign(Cause.KILLED, r"\*\*\* STEP .* CANCELLED AT (?!.* DUE TO )", may_follow=True),
    _sign(Cause.NODE, r"(?i)(?:task|batch|job) launch .*failed.*prolog|prolog (?:failure|failed|error)"),
    # MPICH's own shared memory, left behind by killed ranks, reads as a lack of memory.
    _sign(Cause.LAUNCHER, r"MPIDI_POSIX\w*\(\d+\).*[Oo]ut of memory|unable to open shared memory|mpich_shm_\S+.*(?:denied|exists)"),
    _sign(Cause.DEVICE_MEMORY, r"(?:CUDA|HIP|XPU)(?: error:)? out of memory|OutOfMemoryError|cudaErrorMemoryAllocation"
          r"|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|hipErrorOutOfMemory"),
    _sign(Cause.HOST_MEMORY, r"[Dd]etected \d+ oom[-_]kill event|oom[-_]kill(?:er)?[:\s]|exceeded (?:job |step )?memory limit"
          r"|srun: error: " + NODE + r": tasks? [\d,-]+: Out Of Memory"),
    _sign(Cause.HOST_MEMORY, r"Out of memory: Killed process|Memory cgroup out of memory|[Kk]illed by the cgroup out-of-memory handler"),
    _sign(Cause.HOST_MEMORY, r"\bMemoryError\b|std::bad_alloc|DefaultCPUAllocator: .*allocate memory|Cannot allocate memory"
          r"|insufficient shared memory"),
    _sign(Cause.DEVICE, r"(?i)uncorrectable (?:ECC|NVLink) error|uncorrectable ECC|fallen off the bus|fell off the bus"
          r"|NVRM: Xid .*: (?:48|62|63|64|74|79|92|94|95|119|120|140),|no CUDA-capable device is detected"
          r"|CUDA-capable devices? (?:\(s\) )?(?:is|are) busy or unavailable|GPU requires reset"),
    _sign(Cause.FILE_SYSTEM, r"No space left on device|Disk quota exceeded|Stale (?:NFS )?file handle|Input/output error"
          r"|Read-only file system|Transport endpoint is not connected|Remote I/O error"),
    _sign(Cause.WRONG_MPI, r"MPI sees a world of \d+|not built with SLURM's PMI support|unsupported PMI version"
          r"|PMI2?_(?:Init|Job_GetId|KVS\w*) .*fail|lib(?:mpi|pmi|pmix)\w*\.so[.\w]*: cannot open shared object file"
          r"|(?:can not|cannot) load PMIx|Couldn't find the specified plugin name for mpi|(?:invalid|Invalid) MPI type"
          r"|GPU_SUPPORT_ENABLED is requested, but GTL library is not linked|pmix_psquash|OPAL ERROR: .*[Pp]mix|PMIX ERROR"
          r"|cannot load MPI library"),
    _sign(Cause.LAUNCHER, r"execve\(\): |[Uu]nable to create step|slurmstepd: error: .*[Nn]o such file"
          r"|srun: error: (?:Unable to|Invalid|Task launch)|cannot be started|: command not found|[Mm]odule\(s\) are unknown"
          r"|Unable to locate a modulefile"),
    _sign(Cause.EXCEPTION, r"^(?:[A-Za-z_][A-Za-z_0-9]*\.)*(?!StalledError|RankFailedError|SystemExit)(?:[A-Z]\w*)?(?:Error|Exception)(?:: |$)"),
    _sign(Cause.EXCEPTION, r"NCCL (?:error|WARN .*failed)|ncclInternalError|ncclUnhandledCudaError", may_follow=True),
    _sign(Cause.EXCEPTION, r"MPICH ERROR|UCX +ERROR|Fatal error in \w*MPI|Fatal error in internal_", may_follow=True),
    _sign(Cause.KILLED, r"\bBus error\b|Segmentation fault|Illegal instruction", may_follow=True),
)  # fmt: skip
# Exceptions that a rank meets because another one has gone.
FOLLOWS = re.compile(
    r"mpi4py\.MPI\.Exception|^Exception: .*MPI|MPI_ERR|ConnectionResetError|BrokenPipeError|KeyboardInterrupt"
)


def findings_in(lines: Iterable[str], source: str) -> list[Finding]:
    """Find the signs in a log's lines, a few of each class at most, in their order."""
    found: list[Finding] = []
    seen: dict[tuple[Cause, bool], int] = {}
    for line in lines:
        finding = of_line(line, source)
        if finding is None:
            continue
        key = finding.cause, finding.may_follow
        seen[key] = seen.get(key, 0) + 1
        if seen[key] <= MAX_OF_A_SIGN:
            found.append(finding)
    return found


def of_line(line: str, source: str) -> Finding | None:
    """Return what one line of a log tells; None where it tells nothing."""
    label = LABEL.match(line)
    text = line[label.end() :].strip() if label else line.strip()
    for sign in SIGNS:
        match = sign.pattern.search(text)
        if match is None:
            continue
        groups = match.groupdict()
        return Finding(
            sign.cause,
            source,
            text[:LINE_CHARS],
            time_ns=time_ns_of(text),
            rank=int(label["rank"]) if label else None,
            node=groups.get("node"),
            may_follow=sign.may_follow or (sign.cause is Cause.EXCEPTION and FOLLOWS.search(text) is not None),
        )
    return None


def cause_of_words(text: str) -> Cause | None:
    """Return the class that the words of an exception tell; None where they are of no class of their own."""
    finding = of_line(text, "")
    return None if finding is None or finding.may_follow or finding.cause is Cause.EXCEPTION else finding.cause


def time_ns_of(text: str) -> int | None:
    """Return the time, in ns, of SLURM's words about a cancelled job or step; its clock is the node's local one."""
    found = CANCELLED_AT.search(text)
    if found is not None:
        with contextlib.suppress(ValueError):
            return int(datetime.fromisoformat(found["time"]).timestamp() * 1e9)
    return None


def lines_of(path: Path) -> Iterator[str]:
    """Yield the lines of a log, of a long one the first and the last; none where it cannot be read."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = path.stat().st_size
        head = file.read(HEAD_BYTES if size > HEAD_BYTES + TAIL_BYTES else -1)
        yield from re.split(r"[\n\r]+", head.decode(errors="replace"))
        if size > HEAD_BYTES + TAIL_BYTES:
            file.seek(size - TAIL_BYTES)
            yield from re.split(r"[\n\r]+", file.read().decode(errors="replace"))

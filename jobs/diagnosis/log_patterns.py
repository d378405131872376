"""Find patterns in a run's logs that show why it ended.

They are messages of kernels, SLURM, MPI and libraries.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gems.runs.failure_cause import FILE_SYSTEM_ERRORS, FailureCause
from jobs.slurm.jobs import NODE_FAILURE, parse_cancellation

MAX_PER_CAUSE = 3
# of a longer log the middle is left out
HEAD_BYTES = 1 << 20
TAIL_BYTES = 4 << 20
LINE_CHARS = 400
LABEL = re.compile(r"^ *(?P<rank>\d{1,6}): ?")
NODE = r"(?P<node>[A-Za-z0-9][A-Za-z0-9._-]*)"
# A network's failures read like those of a file system or of memory: the lines that end with an
# errno's text.
NETWORK = r"\bOFI (?:call )?\w+ failed|UCX +ERROR|\bibv_\w+\b.*[Ff]ail|NCCL WARN .*failed"
FILE_ERRNO = f"(?:{'|'.join(map(str, sorted(FILE_SYSTEM_ERRORS)))})"
# Causes with a pattern that shows each; a group `node` names the node at fault. The first that
# matches a line counts.
PATTERNS = (
    (FailureCause.EXCEPTION, NETWORK),
    (FailureCause.NODE, NODE_FAILURE.pattern),
    (
        FailureCause.NODE,
        r"(?i)(?:task|batch|job) launch .*failed.*prolog|prolog (?:failure|failed|error)",
    ),
    # MPICH's own shared memory, left behind by killed ranks, reads as a lack of memory.
    (
        FailureCause.LAUNCHER,
        (
            r"MPIDI_POSIX\w*\(\d+\).*[Oo]ut of memory|unable to open shared"
            r" memory|mpich_shm_\S+.*(?:denied|exists)"
        ),
    ),
    (
        FailureCause.DEVICE_MEMORY,
        r"(?:CUDA|HIP|XPU)(?: error:)? out of memory|OutOfMemoryError|cudaErrorMemoryAllocation"
        r"|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|hipErrorOutOfMemory",
    ),
    (
        FailureCause.HOST_MEMORY,
        r"[Dd]etected \d+ oom[-_]kill event|oom[-_]kill(?:er)?[:\s]|exceeded (?:job |step )?memory"
        r" limit"
        r"|srun: error: " + NODE + r": tasks? [\d,-]+: Out Of Memory"
        r"|Out of memory: Killed process|Memory cgroup out of memory|[Kk]illed by the cgroup"
        r" out-of-memory handler"
        r"|\bMemoryError\b|std::bad_alloc|DefaultCPUAllocator: .*allocate memory|Cannot allocate"
        r" memory"
        r"|insufficient shared memory|PBS: job killed: v?mem .* exceeded limit",
    ),
    (
        FailureCause.DEVICE,
        r"(?i)uncorrectable (?:ECC|NVLink) error|uncorrectable ECC|fallen off the bus|fell off"
        r" the bus"
        r"|NVRM: Xid .*: (?:48|62|63|64|74|79|92|94|95|119|120|140),|no CUDA-capable device is"
        r" detected"
        r"|CUDA-capable devices? (?:\(s\) )?(?:is|are) busy or unavailable|GPU requires reset",
    ),
    (
        FailureCause.FILE_SYSTEM,
        # the errno of a file operation, by Python or by HDF5
        rf"\bOSError: \[Errno {FILE_ERRNO}\]|\berrno = {FILE_ERRNO}, error message",
    ),
    (
        FailureCause.WRONG_MPI,
        r"MPI sees a world of \d+|not built with SLURM's PMI support|unsupported PMI version"
        r"|PMI2?_(?:Init|Job_GetId|KVS\w*) .*fail|lib(?:mpi|pmi|pmix)\w*\.so[.\w]*: cannot open"
        r" shared object file"
        r"|(?:can not|cannot) load PMIx|Couldn't find the specified plugin name for mpi|[iI]nvalid"
        r" MPI type"
        r"|GPU_SUPPORT_ENABLED is requested, but GTL library is not linked|pmix_psquash"
        r"|OPAL ERROR: .*[Pp]mix|PMIX ERROR|cannot load MPI library",
    ),
    (
        FailureCause.LAUNCHER,
        r"execve\(\): |[Uu]nable to create step|slurmstepd: error: .*[Nn]o such file"
        r"|srun: error: (?:Unable to|Invalid|Task launch)|cannot be started|: command not found"
        r"|[Mm]odule\(s\) are unknown|Unable to locate a modulefile",
    ),
    (
        FailureCause.EXCEPTION,
        r"^(?:[A-Za-z_][A-Za-z_0-9]*\.)*(?!StalledError|RankFailedError|SystemExit)"
        r"(?:[A-Z]\w*)?(?:Error|Exception)(?:: |$)",
    ),
    (
        FailureCause.EXCEPTION,
        (
            r"NCCL error|ncclInternalError|ncclUnhandledCudaError|MPICH ERROR|Fatal error in"
            r" \w*MPI|Fatal error in internal_"
        ),
    ),
    (FailureCause.KILLED, r"\bBus error\b|Segmentation fault|Illegal instruction"),
)
COMPILED = tuple((cause, re.compile(pattern)) for cause, pattern in PATTERNS)
# failures of messages, and signals
MAY_FOLLOW = tuple(pattern for _, pattern in (COMPILED[0], *COMPILED[-2:]))
# Exceptions that a rank meets because another one has gone.
CONSEQUENCE = re.compile(
    r"mpi4py\.MPI\.Exception|\bException: .*MPI|MPI_ERR|\bOFI\b|NCCL"
    r" error|ncclRemoteError|DistBackendError"
    r"|DistNetworkError|Connection (?:reset|closed|refused)(?: by"
    r" peer)?|Connection(?:Reset|Refused|Aborted)Error"
    r"|BrokenPipeError|KeyboardInterrupt|message of a process group failed"
)


@dataclass(frozen=True, slots=True)
class Finding:
    """A source's report of a run's end, in its own words.

    `time_ns` is None if the source has no clock. `may_follow` marks a possible consequence of
    something else: a rank that waits for a dead one stalls, and a launcher kills the ranks that are
    left. `is_consequence` marks a consequence of the known cause.
    """

    cause: FailureCause
    source: str
    text: str
    time_ns: int | None = None
    rank: int | None = None
    node: str | None = None
    may_follow: bool = False
    is_consequence: bool = False


def scan_lines(lines: Iterable[str], source: str) -> list[Finding]:
    """Return the findings in a log's lines, at most MAX_PER_CAUSE of each cause, in their order."""
    found: list[Finding] = []
    counts: Counter[tuple[FailureCause, bool]] = Counter()
    for finding in filter(None, (scan_line(line, source) for line in lines)):
        key = finding.cause, finding.may_follow
        counts[key] += 1
        if counts[key] <= MAX_PER_CAUSE:
            found.append(finding)
    return found


def scan_line(line: str, source: str) -> Finding | None:
    """Return the finding in one line of a log, or None."""
    label = LABEL.match(line)
    text = line[label.end() :].strip() if label else line.strip()
    rank = int(label["rank"]) if label else None
    cancellation = parse_cancellation(text)
    if cancellation is not None:
        # srun --kill-on-bad-exit ends the step of a rank that has failed by the same message as a
        # user's scancel
        is_kill = not cancellation.reason and not cancellation.is_job
        ended_by = FailureCause.KILLED if is_kill else cancellation.cause
        if isinstance(ended_by, FailureCause):
            return Finding(
                ended_by, source, text[:LINE_CHARS], cancellation.time_ns, rank, may_follow=is_kill
            )
    for cause, pattern in COMPILED:
        if match := pattern.search(text):
            follows = pattern in MAY_FOLLOW or (
                cause is FailureCause.EXCEPTION and CONSEQUENCE.search(text) is not None
            )
            node = match.groupdict().get("node")
            return Finding(
                cause, source, text[:LINE_CHARS], rank=rank, node=node, may_follow=follows
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
        yield from re.split(
            r"[\n\r]+", file.read(HEAD_BYTES if is_long else -1).decode(errors="replace")
        )
        if is_long:
            file.seek(size - TAIL_BYTES)
            yield from re.split(r"[\n\r]+", file.read().decode(errors="replace"))

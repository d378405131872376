"""Tables of the diagnosis: log patterns of each cause of a run's end, and advice.

The first matching row counts. The patterns are messages of kernels, SLURM, MPI and libraries.
"""

from __future__ import annotations

import contextlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from gems.errors import ConfigError, DoesNotFitError, StalledError
from gems.runs.failure_cause import FILE_SYSTEM_ERRORS, FailureCause
from jobs.schedulers.slurm_client.jobs import NEVER_SATISFIED, NODE_FAILURE, parse_cancellation

NODE = r"(?P<node>[A-Za-z0-9][A-Za-z0-9._-]*)"
FILE_ERRNO = f"(?:{'|'.join(map(str, sorted(FILE_SYSTEM_ERRORS)))})"


FOLLOWS = "may follow"
# Name of the cause, pattern in a line of a log, and FOLLOWS if the line may be a consequence of
# another failure. A group `node` names the node at fault.
LOG_PATTERNS: tuple[tuple[str, ...], ...] = (
    # network failures first: they may end with an errno's text, like those of files and memory
    (
        "exception",
        r"\bOFI (?:call )?\w+ failed|UCX +ERROR|\bibv_\w+\b.*[Ff]ail|NCCL WARN .*failed",
        FOLLOWS,
    ),
    ("node failed", NODE_FAILURE.pattern),
    (
        "node failed",
        r"(?i)(?:task|batch|job) launch .*failed.*prolog|prolog (?:failure|failed|error)",
    ),
    # stale shared memory of MPICH, left by killed ranks, also reports a lack of memory
    (
        "launcher",
        r"MPIDI_POSIX\w*\(\d+\).*[Oo]ut of memory|unable to open shared memory"
        r"|mpich_shm_\S+.*(?:denied|exists)",
    ),
    (
        "out of memory on device",
        r"(?:CUDA|HIP|XPU)(?: error:)? out of memory|OutOfMemoryError|cudaErrorMemoryAllocation"
        r"|CU(?:BLAS|DNN)_STATUS_ALLOC_FAILED|hipErrorOutOfMemory",
    ),
    (
        "out of memory on host",
        r"[Dd]etected \d+ oom[-_]kill event|oom[-_]kill(?:er)?[:\s]"
        r"|exceeded (?:job |step )?memory limit"
        r"|srun: error: " + NODE + r": tasks? [\d,-]+: Out Of Memory"
        r"|Out of memory: Killed process|Memory cgroup out of memory"
        r"|[Kk]illed by the cgroup out-of-memory handler"
        r"|\bMemoryError\b|std::bad_alloc|DefaultCPUAllocator: .*allocate memory"
        r"|Cannot allocate memory|insufficient shared memory"
        r"|PBS: job killed: v?mem .* exceeded limit",
    ),
    (
        "device failed",
        r"(?i)uncorrectable (?:ECC|NVLink) error|uncorrectable ECC|fallen off the bus"
        r"|fell off the bus|NVRM: Xid .*: (?:48|62|63|64|74|79|92|94|95|119|120|140),"
        r"|no CUDA-capable device is detected"
        r"|CUDA-capable devices? (?:\(s\) )?(?:is|are) busy or unavailable|GPU requires reset",
    ),
    (
        "file system",
        # the errno of a file operation in Python or HDF5
        rf"\bOSError: \[Errno {FILE_ERRNO}\]|\berrno = {FILE_ERRNO}, error message",
    ),
    (
        "wrong MPI",
        r"MPI sees a world of \d+|not built with SLURM's PMI support|unsupported PMI version"
        r"|PMI2?_(?:Init|Job_GetId|KVS\w*) .*fail"
        r"|lib(?:mpi|pmi|pmix)\w*\.so[.\w]*: cannot open shared object file"
        r"|(?:can not|cannot) load PMIx|Couldn't find the specified plugin name for mpi"
        r"|[iI]nvalid MPI type|OPAL ERROR: .*[Pp]mix|PMIX ERROR|cannot load MPI library"
        r"|GPU_SUPPORT_ENABLED is requested, but GTL library is not linked|pmix_psquash",
    ),
    (
        "launcher",
        r"execve\(\): |[Uu]nable to create step|slurmstepd: error: .*[Nn]o such file"
        r"|srun: error: (?:Unable to|Invalid|Task launch)|cannot be started"
        r"|: command not found|[Mm]odule\(s\) are unknown|Unable to locate a modulefile",
    ),
    (
        "exception",
        r"^(?:[A-Za-z_][A-Za-z_0-9]*\.)*(?!StalledError|RankFailedError|SystemExit)"
        r"(?:[A-Z]\w*)?(?:Error|Exception)(?:: |$)",
    ),
    (
        "exception",
        r"NCCL error|ncclInternalError|ncclUnhandledCudaError|MPICH ERROR"
        r"|Fatal error in \w*MPI|Fatal error in internal_",
        FOLLOWS,
    ),
    ("killed", r"\bBus error\b|Segmentation fault|Illegal instruction", FOLLOWS),
)
# exceptions of a rank that lost its peer
CONSEQUENCE = re.compile(
    r"mpi4py\.MPI\.Exception|\bException: .*MPI|MPI_ERR|\bOFI\b|NCCL error|ncclRemoteError"
    r"|DistBackendError|DistNetworkError|Connection (?:reset|closed|refused)(?: by peer)?"
    r"|Connection(?:Reset|Refused|Aborted)Error|BrokenPipeError|KeyboardInterrupt"
    r"|message of a process group failed"
)
EXIT_CODES = {
    ConfigError.exit_code: FailureCause.CONFIGURATION,
    DoesNotFitError.exit_code: FailureCause.DOES_NOT_FIT,
    StalledError.exit_code: FailureCause.STALLED,
}
JOB_STATES = {
    "NODE_FAIL": FailureCause.NODE,
    "BOOT_FAIL": FailureCause.NODE,
    "TIMEOUT": FailureCause.TIME_LIMIT,
    "DEADLINE": FailureCause.TIME_LIMIT,
    "PREEMPTED": FailureCause.PREEMPTED,
    "CANCELLED": FailureCause.CANCELLED,
    "OUT_OF_MEMORY": FailureCause.HOST_MEMORY,
}
RUN_STATES = {
    "finished": FailureCause.FINISHED,
    "stopped": FailureCause.STOPPED,
    "missing": FailureCause.UNKNOWN,
    **dict.fromkeys(("running", "stalled", "suspended"), FailureCause.RUNNING),
    **dict.fromkeys(
        ("requeued", "prepared", "submitting", "submitted", "pending", "starting"),
        FailureCause.WAITING,
    ),
}
# Excluded as soon as a rank has begun a step; similar messages then mean that the launcher was lost.
START_CAUSES = (FailureCause.CONFIGURATION, FailureCause.LAUNCHER, FailureCause.WRONG_MPI)
ORDERS = (
    FailureCause.NODE,
    FailureCause.PREEMPTED,
    FailureCause.TIME_LIMIT,
    FailureCause.CANCELLED,
)
# Possible reasons for the kill of a rank; if a rank was killed, all other causes are consequences.
BEHIND_KILLS = (
    *ORDERS,
    FailureCause.HOST_MEMORY,
    FailureCause.DEVICE_MEMORY,
    FailureCause.DEVICE,
    FailureCause.KILLED,
)
# The causes of findings without a time, the most specific first. The scheduler's orders come last
# among what is certain: a run that hangs after its failure is ended by its time limit.
BY_SPECIFICITY = (
    FailureCause.DEVICE,
    FailureCause.HOST_MEMORY,
    FailureCause.WRONG_MPI,
    FailureCause.DEVICE_MEMORY,
    FailureCause.DOES_NOT_FIT,
    FailureCause.FILE_SYSTEM,
    FailureCause.CONFIGURATION,
    FailureCause.LAUNCHER,
    *ORDERS,
    FailureCause.EXCEPTION,
    FailureCause.KILLED,
    FailureCause.STALLED,
    FailureCause.UNKNOWN,
)
# File errors that are the fault of one node, unlike a full quota or disk.
NODE_FILE_ERRORS = re.compile(
    r"Stale|Input/output error|Transport endpoint|Remote I/O|Read-only file system"
)

MOVED = "the run folder was moved"
GONE = "the interpreter"
SETUP = "cluster.python, cluster.modules and cluster.setup"
# Name of the cause, pattern in its text, and advice; names in braces are values of `report.advise`.
ADVICE: tuple[tuple[str, ...], ...] = (
    ("out of memory on device", "", "{device_memory}"),
    ("does not fit", "", "{device_memory}"),
    (
        "out of memory on host",
        "",
        "{node_memory}",
        "{offloaded}",
        "data.prefetch_steps: fewer batches read ahead",
    ),
    ("node failed", "", "{elsewhere}"),
    ("device failed", "", "{elsewhere}"),
    ("time limit", "", "{command} cluster.minutes{minutes}{resumes}", "{checkpoints}"),
    ("preempted", "", "{again}", "{checkpoints}"),
    ("cancelled", "", "{again}", "{checkpoints}"),
    ("stopped", "", "{again}", "{checkpoints}"),
    (
        "waiting",
        NEVER_SATISFIED,
        "gems-jobs cancel {run}, then {command} +cluster.sbatch.dependency=null",
        "to wait for the end of a run, however it ends: gems-jobs submit --after RUN",
    ),
    (
        "stalled",
        "",
        "{where_it_hung}",
        "if that node is slow or its file system hangs: {command} cluster.exclude=[{node}]",
        "if the action may take that long: train.hang_timeout_s",
    ),
    (
        "file system",
        "quota",
        "free space of your quota, or runs_dir= on another file system",
        "{again}",
    ),
    ("file system", "No space", "free space there, or runs_dir= on another file system", "{again}"),
    ("file system", "", "runs_dir= on a file system that all nodes can write to; else {again}"),
    ("launcher", f"^{MOVED}", "move it back, or submit it from where it is: {command}"),
    ("launcher", f"^{GONE}", "install it there again, or submit with one that stays: {command}"),
    (
        "launcher",
        "hared memory|POSIX|mpich_shm",
        "remove what killed ranks left on those nodes: python -m gems.launch.mpich_cleanup",
        "{again}",
    ),
    ("launcher", "", f"{SETUP} must name what the nodes have"),
    (
        "wrong MPI",
        "",
        "cluster.mpi: pmi2 for MPICH, pmix for Open MPI, cray_shasta for Cray MPICH"
        " (`srun --mpi=list`)",
        "cluster.modules and cluster.setup: the MPI that mpi4py was built with must be loaded"
        " in the job",
    ),
    ("configuration", "", "change the key that is named, and submit again"),
    (
        "exception",
        "ImportError|ModuleNotFoundError",
        f"{SETUP}: the nodes' environment lacks a package",
    ),
    ("exception", "", "the traceback is in logs/ranks.log; fix what it names, and submit again"),
    (
        "killed",
        "SIGBUS",
        "a full /dev/shm or a file that has vanished ends a process so: look at that node",
        "{again}",
    ),
    (
        "killed",
        "SIGKILL",
        "if the node ran out of memory: +cluster.sbatch.mem, or fewer cluster.ranks_per_node;"
        " else somebody killed it",
        "{again}",
    ),
    (
        "killed",
        "SIGSEGV|SIGABRT|SIGILL",
        "native code failed: see the Python stack in logs/ranks.log, and the versions of torch"
        " and MPI",
        "{again}",
    ),
    ("killed", "", "{again}"),
    ("unknown", "", "read the log: gems-jobs logs {run} --lines all"),
)


MAX_PER_CAUSE = 3
# the middle of a longer log is skipped
HEAD_BYTES = 1 << 20
TAIL_BYTES = 4 << 20
LINE_CHARS = 400
LABEL = re.compile(r"^ *(?P<rank>\d{1,6}): ?")
COMPILED = [
    (FailureCause(cause), re.compile(pattern), bool(flags))
    for cause, pattern, *flags in LOG_PATTERNS
]


@dataclass(frozen=True, slots=True)
class Finding:
    """One source's report of a run's end, in its own words.

    `time_ns` is None if the source has no clock. `may_follow` marks a possible consequence of
    another failure: a rank that waits for a dead one stalls, and a launcher kills the remaining
    ranks. `is_consequence` marks a consequence of the known cause.
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
    findings: list[Finding] = []
    counts: Counter[tuple[FailureCause, bool]] = Counter()
    for finding in filter(None, (scan_line(line, source) for line in lines)):
        key = finding.cause, finding.may_follow
        counts[key] += 1
        if counts[key] <= MAX_PER_CAUSE:
            findings.append(finding)
    return findings


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
    for cause, pattern, may_follow in COMPILED:
        if match := pattern.search(text):
            follows = may_follow or (
                cause is FailureCause.EXCEPTION and CONSEQUENCE.search(text) is not None
            )
            node = match.groupdict().get("node")
            return Finding(
                cause, source, text[:LINE_CHARS], rank=rank, node=node, may_follow=follows
            )
    return None


def classify_text(text: str) -> FailureCause | None:
    """Return the specific cause that an exception's text shows, or None."""
    finding = scan_line(text, "")
    is_vague = finding is None or finding.may_follow or finding.cause is FailureCause.EXCEPTION
    return None if finding is None or is_vague else finding.cause


def read_lines(path: Path) -> Iterator[str]:
    """Yield the lines of a log, without the middle of a long one; none if it is unreadable."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        size = path.stat().st_size
        is_long = size > HEAD_BYTES + TAIL_BYTES
        yield from re.split(
            r"[\n\r]+", file.read(HEAD_BYTES if is_long else -1).decode(errors="replace")
        )
        if is_long:
            file.seek(size - TAIL_BYTES)
            yield from re.split(r"[\n\r]+", file.read().decode(errors="replace"))

"""Parse the output of launchers when a rank dies.

The launchers are MPICH's and Intel's hydra, Open MPI and srun; MPI_Abort prints its own messages.
As soon as a rank has failed, its launcher or MPI_Abort ends the others, also by signals. Deaths
that are reported after that are marked `is_cleanup`: they show how those ranks ended, and not why.
"""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace
from typing import Any

from gems.errors import SIGNAL_BASE, ConfigError, DoesNotFitError, RankFailedError, StalledError
from jobs.schedulers.slurm_client.jobs import parse_cancellation

RANK_CODES = tuple(
    error.exit_code for error in (ConfigError, DoesNotFitError, RankFailedError, StalledError)
)
OUR_LINE = "gems: the launcher ends the ranks"  # added to their log before that
OUT_OF_MEMORY = "Out Of Memory"
KILLING_SIGNALS = (
    signal.SIGKILL,
    signal.SIGTERM,
    signal.SIGBUS,
    signal.SIGSEGV,
    signal.SIGABRT,
    signal.SIGILL,
    signal.SIGFPE,
)
MEMORY_EVENT = re.compile(r"[Dd]etected \d+ oom[-_]kill event.*")
LOST_PEER = re.compile(r"Fatal error in \w+: Other MPI error")
_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}
HYDRA_TABLE = re.compile(r"^\[mpiexec@[^\]]*\] Exit codes: (?P<table>.*)")
SRUN_TASK = re.compile(r"^srun: error: (?P<node>[^\s:]+): tasks? (?P<ranks>[\d,-]+): (?P<what>.+)")
OPEN_MPI_WHO = re.compile(
    r"^(?:Process name: \[.*,(?P<exited>\d+)\]|MPI_ABORT was invoked on rank (?P<aborted>\d+) )"
)
OPEN_MPI_CODE = re.compile(r"^(?:Exit code:|Errorcode:|with errorcode)\s+(?P<code>\d+)")
# Lines that report the end of one rank; their groups are fields of Death.
DEATHS = (
    re.compile(r"^=\s+(?:RANK (?P<rank>\d+) )?PID (?P<pid>\d+) RUNNING AT (?P<node>\S+)"),
    re.compile(
        r"process rank (?P<rank>\d+) with PID (?:0|(?P<pid>\d+)) on node (?P<node>\S+) exited on"
        r"(?: signal (?P<signal>\d+))?"
    ),
    # the kernel's messages for a cgroup's limit and for the whole node
    re.compile(r"(?:Memory cgroup o|O)ut of memory: Kill(?:ed)? process (?P<pid>\d+)"),
    re.compile(r"\boom-kill:.*\bpid=(?P<pid>\d+)"),
    re.compile(
        r"^(?:\d+: )?Abort\((?P<exit_code>\d+)\) on node \d+ \(rank (?P<rank>\d+) in comm \S+\): "
        r"(?:.*application called MPI_Abort.*|(?P<reason>.*))"
    ),
)
# Lines that report how the rank of the line before ended.
AMENDMENTS = (
    re.compile(r"^=\s+EXIT (?:CODE|STATUS): (?P<exit_code>\d+)"),
    re.compile(r"^=\s+KILLED BY SIGNAL: (?P<signal>\d+)"),
    re.compile(r"^YOUR APPLICATION .*\(signal (?P<signal>\d+)\)"),
    re.compile(r"^signal (?P<signal>\d+) \("),
)


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one rank as its launcher reports it; fields that it does not report are None.

    With `is_cleanup`, another rank had failed before, and the launcher was ending the ranks that
    were left.
    """

    rank: int | None = None
    pid: int | None = None
    node: str | None = None
    signal: int | None = None
    exit_code: int | None = None
    reason: str | None = None
    is_cleanup: bool = False

    @property
    def is_kill(self) -> bool:
        """Whether a signal other than SIGTERM, or the kernel for its memory, ended the rank."""
        return self.signal not in (None, signal.SIGTERM) or self.reason == OUT_OF_MEMORY


class LauncherOutput:
    """A parser of a launcher's output, line by line; it keeps the reported deaths in order."""

    def __init__(self) -> None:
        self._deaths: list[Death] = []
        self._statuses: list[int] = []
        self._open_mpi_rank: int | None = None
        self._is_cleanup = False
        self.cancel_reason: str | None = None
        self.memory_event: str | None = None  # slurmstepd's message about the kernel's kill

    @property
    def deaths(self) -> list[Death]:
        """The deaths of ranks for which the launcher reports a signal, exit code or reason."""
        return [
            death
            for death in self._deaths
            if death.signal is not None or death.exit_code or death.reason is not None
        ]

    def death(self, rank: int) -> Death:
        """Return the end of a rank by hydra's table of wait statuses."""
        status = self._statuses[rank] if rank < len(self._statuses) else 0
        number = status & 0x7F
        return Death(rank, signal=number or None, exit_code=None if number else status >> 8 or None)

    def feed_line(self, line: str) -> None:
        """Parse one line of output."""
        line = line.strip()
        if (cancellation := parse_cancellation(line)) is not None:
            # a cancelled step without a reason means that a rank has failed
            self._is_cleanup |= cancellation.is_job or bool(cancellation.reason)
            if cancellation.reason and not cancellation.is_job:
                self.cancel_reason = cancellation.reason.lower()
        elif line.startswith(OUR_LINE):
            self._is_cleanup = True
        elif MEMORY_EVENT.search(line):
            self.memory_event = line
        elif match := SRUN_TASK.search(line):
            what = re.sub(r" \(core dumped\)$", "", match["what"]).strip()
            code = re.match(r"Exited with exit code (\d+)", what)
            killed_by = _SIGNALS.get(what)
            exit_code = int(code[1]) if code else None
            reason = None if code or killed_by else what
            ranks = _numbers(match["ranks"])
            self._add(
                *(Death(rank, None, match["node"], killed_by, exit_code, reason) for rank in ranks)
            )
        elif match := HYDRA_TABLE.search(line):
            # wait statuses in rank order; a rank that ended by exit() did so before Hydra killed
            # the others
            self._statuses = [
                int(word) for word in re.findall(r"\d+", re.sub(r"\[[^\]]*\]", " ", match["table"]))
            ]
            deaths = [self.death(rank) for rank in range(len(self._statuses))]
            self._deaths[:0] = [death for death in deaths if death.exit_code]
        elif match := OPEN_MPI_WHO.search(line):
            self._open_mpi_rank = int(match["exited"] or match["aborted"])
        elif match := OPEN_MPI_CODE.search(line):
            if self._open_mpi_rank is not None:
                self._add(Death(self._open_mpi_rank, exit_code=int(match["code"])))
        elif fields := _fields(DEATHS, line):
            is_kernel = fields.keys() == {"pid"}
            self._add(
                Death(**fields)
                if not is_kernel
                else Death(None, fields["pid"], None, 9, None, OUT_OF_MEMORY)
            )
        elif (fields := _fields(AMENDMENTS, line)) and self._deaths:
            last = self._deaths[-1]
            if last.node is not None and last.signal is None:
                self._deaths[-1] = _as_signal(replace(last, **{"exit_code": None, **fields}))

    def _add(self, *deaths: Death) -> None:
        """Add the deaths of one line.

        Deaths after a rank's MPI_Abort, or its exit with one of the toolkit's codes, are cleanup.
        """
        for death in map(_as_signal, deaths):
            # launchers send no other signals, and only the kernel kills for memory
            is_sent = (
                death.signal in (None, signal.SIGKILL, signal.SIGTERM)
                and death.reason != OUT_OF_MEMORY
            )
            self._deaths.append(replace(death, is_cleanup=self._is_cleanup and is_sent))
        codes = [death.exit_code for death in deaths if not LOST_PEER.search(death.reason or "")]
        self._is_cleanup |= any(code in RANK_CODES for code in codes)


def _as_signal(death: Death) -> Death:
    """Convert an exit code by which a shell or container reports a signal into that signal."""
    number = (death.exit_code or 0) - SIGNAL_BASE
    if death.exit_code is None or number not in KILLING_SIGNALS:
        return death
    return replace(death, signal=number, exit_code=None)


def _fields(patterns: tuple[re.Pattern[str], ...], line: str) -> dict[str, Any]:
    """Return the groups of the first pattern that matches, with numbers as int, or {}."""
    match = next((match for pattern in patterns if (match := pattern.search(line))), None)
    groups = match.groupdict() if match is not None else {}
    return {
        key: text if key in ("node", "reason") else int(text)
        for key, text in groups.items()
        if text is not None
    }


def _numbers(text: str) -> list[int]:
    """Parse SLURM's lists of numbers: 0-2,5."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers

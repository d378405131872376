"""The output of launchers when a rank dies: MPICH's and Intel's hydra, Open MPI, srun, and MPI_Abort itself."""

from __future__ import annotations

import re
import signal
from dataclasses import dataclass, replace

from jobs.slurm.messages import parse_cancellation

_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()}

HYDRA_WHO = re.compile(r"^=\s+(?:RANK (?P<rank>\d+) )?PID (?P<pid>\d+) RUNNING AT (?P<node>\S+)")
HYDRA_CODE = re.compile(r"^=\s+EXIT (?:CODE|STATUS): (?P<code>\d+)")
HYDRA_SIGNAL = re.compile(r"^(?:=\s+KILLED BY SIGNAL: (?P<old>\d+)|YOUR APPLICATION .*\(signal (?P<new>\d+)\))")
HYDRA_TABLE = re.compile(r"^\[mpiexec@[^\]]*\] Exit codes: (?P<table>.*)")
SRUN_TASK = re.compile(r"^srun: error: (?P<node>[^\s:]+): tasks? (?P<ranks>[\d,-]+): (?P<what>.+)")
OPEN_MPI_SIGNAL = re.compile(
    r"process rank (?P<rank>\d+) with PID (?P<pid>\d+) on node (?P<node>\S+) exited on(?: signal (?P<signal>\d+))?"
)
OPEN_MPI_WRAPPED = re.compile(r"^signal (?P<signal>\d+) \(")
OPEN_MPI_WHO = re.compile(r"^(?:Process name: \[.*,(?P<exited>\d+)\]|MPI_ABORT was invoked on rank (?P<aborted>\d+) )")
OPEN_MPI_CODE = re.compile(r"^(?:Exit code:|Errorcode:|with errorcode)\s+(?P<code>\d+)")
ABORT = re.compile(r"^(?:\d+: )?Abort\((?P<code>\d+)\) on node \d+ \(rank (?P<rank>\d+) in comm \S+\): (?P<what>.*)")


@dataclass(frozen=True, slots=True)
class Death:
    """The end of one rank as its launcher reports it; None for what it does not report."""

    rank: int | None = None
    pid: int | None = None
    node: str | None = None
    signal: int | None = None
    exit_code: int | None = None
    reason: str | None = None

    @property
    def is_known(self) -> bool:
        """Whether the launcher reports how the rank ended."""
        return self.signal is not None or bool(self.exit_code) or self.reason is not None


class LauncherOutput:
    """Parses a launcher's output, line by line, and keeps the deaths that it reports in their order."""

    def __init__(self) -> None:
        self._deaths: list[Death] = []
        self._statuses: list[int] = []
        self._open_mpi_rank: int | None = None
        self.cancel_reason: str | None = None

    @property
    def deaths(self) -> list[Death]:
        """The deaths of ranks that the launcher reports in full."""
        return [death for death in self._deaths if death.is_known]

    def death(self, rank: int) -> Death:
        """Return the end of a rank by hydra's table of wait statuses."""
        status = self._statuses[rank] if rank < len(self._statuses) else 0
        number = status & 0x7F
        return Death(rank, signal=number or None, exit_code=None if number else status >> 8 or None)

    def feed_line(self, line: str) -> None:
        """Parse one line of output."""
        line = line.strip()
        cancellation = parse_cancellation(line)
        if cancellation is not None:
            if cancellation.reason and not cancellation.is_job:
                self.cancel_reason = cancellation.reason.lower()
        elif found := SRUN_TASK.search(line):
            what = re.sub(r" \(core dumped\)$", "", found["what"]).strip()
            code, killed_by = re.match(r"Exited with exit code (\d+)", what), _SIGNALS.get(what)
            exit_code, reason = int(code[1]) if code else None, None if code or killed_by else what
            self._deaths += [
                Death(rank, None, found["node"], killed_by, exit_code, reason) for rank in _numbers(found["ranks"])
            ]
        elif found := HYDRA_WHO.search(line):
            self._deaths.append(Death(int(found["rank"]) if found["rank"] else None, int(found["pid"]), found["node"]))
        elif found := HYDRA_CODE.search(line):
            self._amend(exit_code=int(found["code"]))
        elif found := HYDRA_SIGNAL.search(line):
            self._amend(signal=int(found["old"] or found["new"]))
        elif found := HYDRA_TABLE.search(line):
            # Wait statuses in rank order. Hydra kills the others, so a rank that ended by exit() did so before.
            self._statuses = [int(word) for word in re.findall(r"\d+", re.sub(r"\[[^\]]*\]", " ", found["table"]))]
            deaths = [self.death(rank) for rank in range(len(self._statuses))]
            self._deaths[:0] = [death for death in deaths if death.exit_code]
        elif found := OPEN_MPI_SIGNAL.search(line):
            number = int(found["signal"]) if found["signal"] else None
            self._deaths.append(Death(int(found["rank"]), int(found["pid"]) or None, found["node"], number))
        elif found := OPEN_MPI_WRAPPED.search(line):
            self._amend(signal=int(found["signal"]))
        elif found := OPEN_MPI_WHO.search(line):
            self._open_mpi_rank = int(found["exited"] or found["aborted"])
        elif found := OPEN_MPI_CODE.search(line):
            if self._open_mpi_rank is not None:
                self._deaths.append(Death(self._open_mpi_rank, exit_code=int(found["code"])))
        elif found := ABORT.search(line):
            reason = None if "application called MPI_Abort" in found["what"] else found["what"]
            self._deaths.append(Death(int(found["rank"]), exit_code=int(found["code"]), reason=reason))

    def _amend(self, signal: int | None = None, exit_code: int | None = None) -> None:
        """Add how it ended to the last death, unless a signal is known."""
        if self._deaths and self._deaths[-1].node is not None and self._deaths[-1].signal is None:
            code = None if signal is not None else exit_code
            self._deaths[-1] = replace(self._deaths[-1], signal=signal, exit_code=code)


def _numbers(text: str) -> list[int]:
    """Parse SLURM's lists of numbers: 0-2,5."""
    numbers: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        numbers.extend(range(int(first), int(last or first) + 1))
    return numbers

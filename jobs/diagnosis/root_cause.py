"""Find the rank that ended a run, and why, by ranks' records, launcher output and heartbeats."""

from __future__ import annotations

import functools
import math
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from gems.errors import SIGNAL_BASE, ConfigError, RankFailedError, StalledError
from gems.launch.exit_watcher import read_notes
from gems.launch.local_launcher import Ended
from gems.runs.failure_cause import FailureCause
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import FINISHED, Beat, read_beats
from jobs.diagnosis.causes import CONSEQUENCE, EXIT_CODES, START_CAUSES, classify_text
from jobs.diagnosis.launcher_output import (
    LOST_PEER,
    OUT_OF_MEMORY,
    RANK_CODES,
    Death,
    LauncherOutput,
)
from jobs.status.job_record import read_or_empty
from jobs.status.run_status import utc_ns

COMPUTE = re.compile(r"\d+(?:\.\d+)?[FBIWR]\d*(?:/\d+)?")
LAUNCHER_LINE = re.compile(
    r"\[mpiexec@|srun: |slurmstepd: |=|YOUR APPLICATION|This typically|Please see the FAQ"
)
ERROR_LINE = re.compile(r"(?i)error\b|fatal|not found|no such file|cannot")
BY_LAUNCHER = "launcher"  # the value of `by` in STALLED.json if the launcher detected the stall
MPI_KEY = "cluster.mpi="


@dataclass(frozen=True, slots=True)
class Failure:
    """The failure of a run: `what` happened, the `cause` if known, and its class.

    Step -1 is outside training.
    """

    exit_code: int
    what: str
    cause: str | None = None
    rank: int | None = None
    node: str | None = None
    rank_pid: int | None = None
    step: int | None = None
    action: str | None = None
    signal: int | None = None
    cause_class: FailureCause = FailureCause.EXCEPTION

    def to_dict(self) -> dict[str, Any]:
        """Return the known fields, always with a cause."""
        fields = {
            name: value
            for name, value in asdict(self).items()
            if value is not None and name != "what"
        }
        return {**fields, "cause": self.cause or self.what, "cause_class": str(self.cause_class)}

    def describe(self) -> str:
        """Describe the failure in one line."""
        who = f"rank {self.rank}" if self.rank is not None else "a rank" if self.node else "the run"
        node = f" on node {self.node}" if self.node else ""
        cause = f": {self.cause}" if self.cause else ""
        return " ".join(
            f"{who}{node} {self.what}{describe_position(self.step, self.action)}{cause}".split()
        )


def describe_position(step: int | None, action: str | None) -> str:
    """Describe the position of a rank in a run, after a space, or "" if its step is unknown."""
    if step is None:
        return ""
    if step >= 0:
        return f" in step {step}" + (f", action {action}" if action else "")
    return (
        " before the first step"
        if action in (None, "start")
        else f" outside of the steps, in {action}"
    )


class RankEvidence:
    """The evidence that the ranks of a run and their launcher left.

    `output` and `ended` are the launcher's, from the live run or read from its log and record.
    """

    def __init__(self, folder: RunFolder, output: LauncherOutput, ended: Ended) -> None:
        self.folder = folder
        self.output = output
        self.ended = ended
        self.records = read_records(folder)
        self.beats = read_beats(folder.path)
        self.stall = read_or_empty(folder.stalled_json)

    @property
    def has_trained(self) -> bool:
        """Whether a rank has begun a step, so launcher, MPI and configuration worked."""
        return any(beat.step >= 0 for beat in self.beats.values())

    @functools.cached_property
    def failure(self) -> Failure:
        """The failure of the rank that ended the run.

        The first of these that exists: a stall of all ranks that the launcher detected; a death
        that an exit watcher saw before any rank recorded a failure of its own; a rank's record,
        unless it only shows that another rank had gone; the first death that the launcher reported
        before it ended the ranks itself, with step and action of the heartbeat; a stall, with the
        rank that the others waited for; the record of the first rank that lost another; the last
        lines of output.
        """
        ended = self.ended
        if ended.stopped_by is not None:
            return _from_signal(ended.stopped_by, self.output.cancel_reason)
        output = self.output
        records = self.records
        recorded = {record.get("rank") for record in records}
        are_stalled = any(record.get("exit_code") == StalledError.exit_code for record in records)
        own = next((record for record in records if not is_consequence(record)), None)
        if ended.returncode < 0 and not ended.gave_up and own is None and not are_stalled:
            what = f"ended: its launcher {_killed_by(-ended.returncode)}"
            return Failure(
                RankFailedError.exit_code,
                what,
                signal=-ended.returncode,
                cause_class=FailureCause.KILLED,
            )
        if self.stall.get("by") == BY_LAUNCHER:
            return self._from_stall()
        watched = first_exit(self.folder, self.beats)
        own_ns = math.inf if own is None else utc_ns(own.get("utc")) or 0
        if watched is not None and watched[0] < own_ns and watched[1] not in recorded:
            return self._from_death(output.death(watched[1]))
        if own is not None:
            return _from_record(own)
        deaths = [each for each in map(self._with_rank, output.deaths) if each.rank not in recorded]
        if (death := _first_cause(deaths, output.memory_event)) is not None:
            return self._from_death(death)
        if self.stall or are_stalled:
            return self._from_stall()
        if records or deaths:
            return _from_record(records[0]) if records else self._from_death(deaths[0])
        return self._from_output()

    def _from_output(self) -> Failure:
        ended = self.ended
        number = ended.returncode
        code = f"signal {-number}" if number < 0 else f"exit code {number}"
        last = ended.tail[-1] if ended.tail else "no rank and no launcher gave a reason"
        reason = self.output.cancel_reason or self._error_line() or last
        cause_class = classify_text(reason) or FailureCause.UNKNOWN
        if cause_class in START_CAUSES and self.has_trained:
            cause_class = FailureCause.KILLED
        return Failure(
            RankFailedError.exit_code, f"ended with {code}", reason, cause_class=cause_class
        )

    def _silent_rank(self) -> int | None:
        """Return the rank that a stalled run waited for, or None if heartbeats do not show it.

        A rank without a record of its own end goes first: it was stopped, or its node has gone.
        Otherwise it is the rank in a compute action that has been silent longest.
        """
        alive = {rank: beat for rank, beat in self.beats.items() if beat.action != FINISHED}
        recorded = {record.get("rank") for record in self.records}
        mute = [rank for rank in alive if rank not in recorded]
        is_sure = recorded and len(mute) < len(alive) and 2 * len(mute) <= len(alive)
        suspects = mute if mute and is_sure else list(alive)
        computing = [rank for rank in suspects if COMPUTE.fullmatch(alive[rank].action)]
        return min(computing or suspects, key=lambda rank: alive[rank].time_ns, default=None)

    def _from_stall(self) -> Failure:
        """Describe a stall: the silent rank, by STALLED.json or heartbeats, and the waiting rank."""
        stall = self.stall
        first = next(
            (
                record
                for record in self.records
                if record.get("exit_code") == StalledError.exit_code
            ),
            {},
        )
        report = stall or first
        # the ranks that held up all others, the likeliest first, if they are recorded
        root: dict[str, Any] = next(iter(stall.get("roots", ())), {})
        rank = root["rank"] if root else self._silent_rank()
        if rank is None:
            return _from_record(
                {"cause": "no rank moved", **report, **first, "exit_code": StalledError.exit_code}
            )
        if not root:
            root = asdict(self.beats[rank])
        cause = str(first.get("cause") or stall.get("cause") or "")
        if report.get("rank") not in (None, rank):
            waited = f" {report['waited_s']:.0f} s" if "waited_s" in report else ""
            cause = (
                f"rank {report['rank']} waited{waited} in step {report.get('step')}, action"
                f" {report.get('action')}"
            )
        return Failure(
            StalledError.exit_code,
            "stopped moving",
            cause or None,
            rank,
            root.get("node"),
            root.get("pid"),
            root.get("step"),
            root.get("action"),
            cause_class=FailureCause.STALLED,
        )

    def _from_death(self, death: Death) -> Failure:
        what = "ended"
        cause = death.reason or (self._error_line() if death.exit_code else None)
        cause_class = classify_text(cause or "") or FailureCause.EXCEPTION
        if death.is_kill and death.reason is not None:  # killed by the kernel for memory
            cause_class = FailureCause.HOST_MEMORY
        if death.signal is not None:
            what = _killed_by(death.signal)
            cause_class = FailureCause.KILLED if death.reason is None else cause_class
        elif death.exit_code:
            what = f"ended with exit code {death.exit_code}"
        beat = self.beats.get(death.rank) if death.rank is not None else None
        return Failure(
            RankFailedError.exit_code,
            what,
            cause,
            death.rank,
            death.node or (beat.node if beat else None),
            death.pid or (beat.pid if beat else None),
            beat.step if beat else None,
            beat.action if beat else None,
            death.signal,
            cause_class,
        )

    def _error_line(self) -> str | None:
        """Return the last line of the ranks' output that reports an error."""
        lines = [
            line
            for line in self.ended.tail
            if ERROR_LINE.search(line) and not LAUNCHER_LINE.match(line)
        ]
        return lines[-1] if lines else None

    def _with_rank(self, death: Death) -> Death:
        """Add the rank of a death that is known only by its process, through the heartbeats."""
        if death.rank is not None or death.pid is None:
            return death
        beats = self.beats
        same = [rank for rank, beat in beats.items() if beat.pid == death.pid]
        host = (death.node or "").partition(".")[0]
        ranks = [rank for rank in same if beats[rank].node.partition(".")[0] == host] or same
        return replace(death, rank=ranks[0]) if len(ranks) == 1 else death


def _from_signal(name: str, reason: str | None) -> Failure:
    number = int(signal.Signals[name])
    if reason is None:
        is_hangup = number == signal.SIGHUP
        reason = "its terminal was closed" if is_hangup else "cancelled, preempted or out of time"
    what = f"was stopped by {name}: {reason}"
    return Failure(SIGNAL_BASE + number, what, signal=number, cause_class=FailureCause.KILLED)


def _first_cause(deaths: Sequence[Death], memory_event: str | None) -> Death | None:
    """Return the first death that a launcher did not cause, or None.

    The kill of a rank goes before the errors that it caused in others, even if it is reported after
    them. Hydra itself sent most of the SIGKILLs that it lists by process.
    """

    def order(death: Death) -> int:
        if LOST_PEER.search(death.reason or ""):
            return 3
        is_listed = (
            death.pid is not None and death.signal == signal.SIGKILL and death.reason is None
        )
        return 2 if is_listed else 0 if death.is_kill else 1

    own = [death for death in deaths if not death.is_cleanup and death.signal != signal.SIGTERM]
    memory = [death for death in own if death.reason == OUT_OF_MEMORY and death.rank is not None]
    own = [death for death in own if death.reason != OUT_OF_MEMORY or death in memory]
    first = min(own, key=order, default=None)
    if first is None or first.signal != signal.SIGKILL:
        return first
    if any(death.rank == first.rank for death in memory):
        return replace(first, reason=OUT_OF_MEMORY)
    return replace(first, reason=memory_event) if memory_event else first


def classify_record(record: Mapping[str, Any]) -> FailureCause:
    """Return the cause in the record of a failing rank, or in status.json."""
    code = record.get("exit_code")
    text = str(record.get("cause", ""))
    recorded = record.get("cause_class")
    if recorded in tuple(FailureCause) and recorded != FailureCause.EXCEPTION:
        return FailureCause(recorded)
    if code == ConfigError.exit_code and text.startswith(MPI_KEY):
        return FailureCause.WRONG_MPI
    if code in EXIT_CODES:
        return EXIT_CODES[code]
    return (
        classify_text(f"{record['kind']}: {text}" if "kind" in record else text)
        or FailureCause.EXCEPTION
    )


def first_exit(
    folder: RunFolder, beats: Mapping[int, Beat] | None = None
) -> tuple[int, int] | None:
    """Return the time in ns and the rank of the first process that ended unfinished, or None."""
    notes = read_notes(folder.path).items()
    beats = read_beats(folder.path) if notes and beats is None else beats or {}
    return min(
        ((ns, rank) for rank, ns in notes if rank not in beats or beats[rank].action != FINISHED),
        default=None,
    )


def has_failed_rank(folder: RunFolder) -> bool:
    """Return whether a rank left a record or ended unfinished."""
    return bool(read_records(folder)) or first_exit(folder) is not None


def read_records(folder: RunFolder) -> list[dict[str, Any]]:
    """Read the records of failing ranks, the earliest first."""
    records = filter(None, map(read_or_empty, folder.path.glob("FAILED.rank*.json")))
    return sorted(records, key=lambda record: str(record.get("utc", "")))


def is_consequence(record: Mapping[str, Any]) -> bool:
    """Return whether a rank failed because of another one: it stalled, or its messages failed."""
    cause = f"{record.get('kind')}: {record.get('cause')}"
    return (
        record.get("exit_code") == StalledError.exit_code or CONSEQUENCE.search(cause) is not None
    )


def _from_record(record: Mapping[str, Any]) -> Failure:
    code = record.get("exit_code")
    known: dict[str, Any] = {key: record.get(key) for key in ("rank", "node", "step", "action")}
    cause = str(record.get("cause") or "no reason given")
    known |= {"rank_pid": record.get("pid"), "cause_class": classify_record(record)}
    return Failure(
        code if code in RANK_CODES else RankFailedError.exit_code, "failed", cause, **known
    )


def _killed_by(number: int) -> str:
    name = signal.Signals(number).name if number in set(signal.Signals) else "unknown"
    return f"was killed by signal {number} ({name})"

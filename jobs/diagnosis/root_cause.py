"""Which rank ended a run, and why: from what ranks left, what the launcher said, and the heartbeats."""

from __future__ import annotations

import contextlib
import re
import signal
from dataclasses import asdict, dataclass
from datetime import datetime
from typing import Any

from gems.errors import ConfigError, RankFailedError, StalledError
from gems.launch.exit_watcher import read_notes
from gems.launch.local_launcher import Ended
from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Beat, read_beat
from gems.utils.atomic_io import read_json
from jobs.diagnosis.launcher_output import Death, LauncherWords

FINISHED = "finished"  # what a heartbeat's clean end is called
STALLED_JSON = "STALLED.json"
COMPUTES = re.compile(r"\d+(?:\.\d+)?[FBIWR]\d*(?:/\d+)?")
SIGNAL_BASE = 128  # a shell's exit code for a signal is this and its number
OF_LAUNCHERS = re.compile(r"\[mpiexec@|srun: |slurmstepd: |=|YOUR APPLICATION|This typically|Please see the FAQ")
RANK_CODES = (ConfigError.exit_code, 3, RankFailedError.exit_code, StalledError.exit_code)


@dataclass(frozen=True, slots=True)
class Failure:
    """How a run failed: `what` happened, `cause` where one is known; step -1 is outside of training."""

    exit_code: int
    what: str
    cause: str | None = None
    rank: int | None = None
    node: str | None = None
    rank_pid: int | None = None
    step: int | None = None
    action: str | None = None
    signal: int | None = None

    def to_dict(self) -> dict[str, Any]:
        """Return the fields that are known; there is always a cause."""
        fields = {name: value for name, value in asdict(self).items() if value is not None and name != "what"}
        return {**fields, "cause": self.cause or self.what}

    def line(self) -> str:
        """Describe the failure in one line."""
        who = f"rank {self.rank}" if self.rank is not None else "a rank" if self.node else "the run"
        node = f" on node {self.node}" if self.node else ""
        cause = f": {self.cause}" if self.cause else ""
        return " ".join(f"{who}{node} {self.what}{self._where()}{cause}".split())

    def _where(self) -> str:
        if self.step is None:
            return ""
        if self.step >= 0:
            return f" in step {self.step}, action {self.action}"
        if self.action == "start":
            return " before the first step"
        return f" outside of the steps, in {self.action}"


def blame(folder: RunFolder, words: LauncherWords, ended: Ended) -> Failure:
    """Find the rank that ended the run.

    A death that a witness saw before any rank complained goes first; then what a rank wrote itself, unless it
    only tells that another rank was gone; then the first death that the launcher reported, with the heartbeat's
    step and action; then the last words of the output. Where ranks only waited too long, the one is named that they
    waited for.
    """
    if ended.stopped_by is not None:
        number = int(signal.Signals[ended.stopped_by])
        why = words.why_cancelled or "cancelled, preempted or out of time"
        return Failure(SIGNAL_BASE + number, f"was stopped by {ended.stopped_by}: {why}", signal=number)
    records, beats = read_records(folder), read_beats(folder)
    if ended.returncode < 0 and not ended.gave_up and not records:
        number = -ended.returncode
        return Failure(
            RankFailedError.exit_code,
            f"ended: its launcher was killed by signal {number} ({_signal_name(number)})",
            signal=number,
        )
    witnessed = first_witnessed(folder, beats)
    if witnessed is not None and all(witnessed[1] < _time_ns(record) for record in records):
        return _of_death(words.death_of(witnessed[0]), beats, ended)
    cause = next((record for record in records if not is_consequence(record)), None)
    if cause is not None:
        return _of_record(cause)
    death = _with_rank(words.deaths[0], beats) if words.deaths else None
    if death is not None and death.rank not in {record.get("rank") for record in records}:
        return _of_death(death, beats, ended)
    stall = read_stall(folder)
    if stall or (records and records[0].get("exit_code") == StalledError.exit_code):
        return _of_stall(stall, records, beats)
    if records:
        return _of_record(records[0])
    return _of_output(words, ended)


def first_witnessed(folder: RunFolder, beats: dict[int, Beat]) -> tuple[int, int] | None:
    """Return the rank whose process ended first without having finished, and when in ns."""
    notes = [
        (time_ns, rank)
        for rank, time_ns in read_notes(folder.path).items()
        if rank not in beats or beats[rank].action != FINISHED
    ]
    return min(notes)[::-1] if notes else None


def has_failed_rank(folder: RunFolder) -> bool:
    """Return whether a rank left a record or ended without having finished."""
    return bool(read_records(folder)) or first_witnessed(folder, read_beats(folder)) is not None


def read_records(folder: RunFolder) -> list[dict[str, Any]]:
    """Read what failing ranks left, the earliest first."""
    records = []
    for path in folder.path.glob("FAILED.rank*.json"):
        with contextlib.suppress(OSError, ValueError):
            record = read_json(path)
            whole = ("rank", "pid", "step")
            records.append({key: value for key, value in record.items() if key not in whole or isinstance(value, int)})
    return sorted(records, key=lambda record: str(record.get("utc", "")))


def read_stall(folder: RunFolder) -> dict[str, Any]:
    """Read what the first rank that found a stall left; nothing where there is none."""
    with contextlib.suppress(OSError, ValueError):
        return read_json(folder.path / STALLED_JSON)
    return {}


def silent_rank(records: list[dict[str, Any]], beats: dict[int, Beat]) -> int | None:
    """Return the rank that a stalled run waited for; None where heartbeats do not tell.

    A rank that could not even record its own end goes first: it was stopped, or its node has gone. Else it is one in
    the middle of a compute action. Of several it is the one that has been silent for longest.
    """
    alive = {rank: beat for rank, beat in beats.items() if beat.action != FINISHED}
    told = {record.get("rank") for record in records}
    mute = [rank for rank in alive if rank not in told]
    is_sure = told and len(mute) < len(alive) and 2 * len(mute) <= len(alive)
    asked = mute if mute and is_sure else list(alive)
    at_work = [rank for rank in asked if COMPUTES.fullmatch(alive[rank].action)]
    return min(at_work or asked, key=lambda rank: alive[rank].time_ns, default=None)


def is_consequence(record: dict[str, Any]) -> bool:
    """Return whether a rank failed because another one had: it stalled, or its messages failed."""
    cause = str(record.get("cause", ""))
    return (
        record.get("exit_code") == StalledError.exit_code or re.search(r"^Exception: .*MPI|MPI_ERR", cause) is not None
    )


def read_beats(folder: RunFolder) -> dict[int, Beat]:
    """Read the last mark of every rank that left one."""
    beats = {}
    for path in sorted(folder.heartbeat(0).parent.glob("rank*")):
        with contextlib.suppress(OSError, ValueError):
            beat = read_beat(path)
            if beat is not None:
                beats[int(path.name.removeprefix("rank"))] = beat
    return beats


def _of_record(record: dict[str, Any]) -> Failure:
    code = record.get("exit_code")
    return Failure(
        exit_code=code if code in RANK_CODES else RankFailedError.exit_code,
        what="failed",
        cause=str(record.get("cause") or "no reason given"),
        rank_pid=record.get("pid"),
        **{key: record.get(key) for key in ("rank", "node", "step", "action")},
    )


def _of_stall(stall: dict[str, Any], records: list[dict[str, Any]], beats: dict[int, Beat]) -> Failure:
    """Describe a stall: who was silent, and who waited. Who found it may have told; else the heartbeats do."""
    first = next((record for record in records if record.get("exit_code") == StalledError.exit_code), {})
    found = stall or first
    root = _root(stall)
    rank = root.get("rank", silent_rank(records, beats))
    if rank is None:
        return _of_record({"cause": "no rank moved", **found, **first, "exit_code": StalledError.exit_code})
    beat = beats.get(rank)
    if not root and beat is not None:
        root = {"node": beat.node, "pid": beat.pid, "step": beat.step, "action": beat.action}
    cause = str(first.get("cause") or "")
    if found.get("rank") not in (None, rank):
        waited_s = found.get("waited_s")
        waited = f" {waited_s:.0f} s" if isinstance(waited_s, int | float) else ""
        cause = f"rank {found['rank']} waited{waited} in step {found.get('step')}, action {found.get('action')}"
    return Failure(
        StalledError.exit_code, "moved no more", cause or None, rank, root.get("node"), root.get("pid"),
        root.get("step"), root.get("action"),
    )  # fmt: skip


def _root(stall: dict[str, Any]) -> dict[str, Any]:
    """Return the likeliest of the ranks that held all others up, where the one that found the stall could tell."""
    roots = stall.get("roots")
    first = roots[0] if isinstance(roots, list) and roots else None
    if not isinstance(first, dict) or not isinstance(first.get("rank"), int):
        return {}
    kinds = {"rank": int, "node": str, "pid": int, "step": int, "action": str}
    return {key: first[key] for key, kind in kinds.items() if isinstance(first.get(key), kind)}


def _of_death(death: Death, beats: dict[int, Beat], ended: Ended) -> Failure:
    if death.signal is not None:
        what = f"was killed by signal {death.signal} ({_signal_name(death.signal)})"
    elif death.exit_code:
        what = f"ended with exit code {death.exit_code}"
    else:
        what = "ended"
    beat = beats.get(death.rank) if death.rank is not None else None
    return Failure(
        RankFailedError.exit_code,
        what,
        death.reason or (_error_line(ended) if death.exit_code else None),
        death.rank,
        death.node or (beat.node if beat else None),
        death.pid or (beat.pid if beat else None),
        beat.step if beat else None,
        beat.action if beat else None,
        death.signal,
    )


def _of_output(words: LauncherWords, ended: Ended) -> Failure:
    """Describe the end of a run in which neither a rank nor the launcher named anyone."""
    code = f"signal {-ended.returncode}" if ended.returncode < 0 else f"exit code {ended.returncode}"
    said = _error_line(ended) or (ended.tail[-1] if ended.tail else "no rank and no launcher said why")
    return Failure(RankFailedError.exit_code, f"ended with {code}", words.why_cancelled or said)


def _error_line(ended: Ended) -> str | None:
    """Return the last line of the ranks' output that tells of an error."""
    telling = re.compile(r"(?i)error\b|fatal|not found|no such file|cannot")
    lines = [line for line in ended.tail if telling.search(line) and not OF_LAUNCHERS.match(line)]
    return lines[-1] if lines else None


def _time_ns(record: dict[str, Any]) -> int:
    """Return when a rank wrote its record; 0 where it does not say."""
    try:
        return int(datetime.fromisoformat(record["utc"]).timestamp() * 1e9)
    except (KeyError, TypeError, ValueError):
        return 0


def _with_rank(death: Death, beats: dict[int, Beat]) -> Death:
    """Find the rank of a death that is known by its process, through the heartbeats."""
    if death.rank is not None or death.pid is None:
        return death
    same = [rank for rank, beat in beats.items() if beat.pid == death.pid]
    here = [rank for rank in same if _short(beats[rank].node) == _short(death.node or "")]
    found = here or same
    if len(found) != 1:
        return death
    return Death(found[0], death.pid, death.node, death.signal, death.exit_code, death.reason)


def _short(node: str) -> str:
    return node.partition(".")[0]


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return "unknown"

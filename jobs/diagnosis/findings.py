"""Findings: what each piece of the evidence says of a run's end."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from gems.errors import ConfigError, DoesNotFitError, StalledError
from jobs.diagnosis.evidence import Evidence, utc_ns, whole
from jobs.diagnosis.judge import Cause, Finding
from jobs.diagnosis.log_patterns import FOLLOWS, cause_of_words
from jobs.diagnosis.root_cause import FINISHED, is_consequence

SECOND_NS = 10**9
KILL_WAIT_S = 35.0  # between SLURM's order and the end of a job that it names
NODE_WAIT_S = 300.0  # SLURM's own patience with a node that does not answer
NEAR_LIMIT_S = 90.0  # SLURM looks at time limits every half minute, and may end a job early
STATES = {
    "NODE_FAIL": Cause.NODE, "BOOT_FAIL": Cause.NODE, "TIMEOUT": Cause.TIME_LIMIT, "DEADLINE": Cause.TIME_LIMIT,
    "PREEMPTED": Cause.PREEMPTED, "CANCELLED": Cause.CANCELLED, "OUT_OF_MEMORY": Cause.HOST_MEMORY,
}  # fmt: skip
LAUNCH_REASONS = ("JobLaunchFailure", "launch failed requeued held", "launch_failed_requeued_held")
PROLOG = "Prolog"
CODES = {ConfigError.exit_code: Cause.CONFIGURATION, DoesNotFitError.exit_code: Cause.DOES_NOT_FIT}
BY_OTHERS = (9, 15)  # a launcher, a scheduler or a user ends ranks so; other signals a process brings on itself
MPI_KEY = "cluster.mpi="


def findings_of(evidence: Evidence) -> list[Finding]:
    """Return what each source says of the end of a run that has ended."""
    found = [
        *_of_records(evidence),
        *_of_job(evidence),
        *_of_orders(evidence),
        *_of_failure(evidence),
        *_of_silence(evidence),
        *_of_status(evidence),
    ]
    has_record = any(finding.source.startswith("FAILED") for finding in found)
    for sign in evidence.signs:
        if sign.cause is Cause.EXCEPTION:
            follows = FOLLOWS.search(sign.text) is not None and evidence.failure.signal is not None
            if not has_record and not follows:  # else it is the traceback of a record, or tells that another was gone
                found.append(_weak(sign))
        else:
            found.append(sign)
    return found


def cause_of_record(record: Mapping[str, Any]) -> Cause:
    """Return the class of what a failing rank recorded."""
    code, text = record.get("exit_code"), str(record.get("cause", ""))
    told = record.get("cause_class")
    if told in tuple(Cause) and told != Cause.EXCEPTION:
        return Cause(told)
    if code == StalledError.exit_code:
        return Cause.STALLED
    if code == ConfigError.exit_code and text.startswith(MPI_KEY):
        return Cause.WRONG_MPI
    if isinstance(code, int) and code in CODES:
        return CODES[code]
    return cause_of_words(f"{record.get('kind', '')}: {text}") or Cause.EXCEPTION


def _of_records(evidence: Evidence) -> Iterator[Finding]:
    for record in evidence.records:
        cause = cause_of_record(record)
        if cause is Cause.STALLED:
            continue  # who stalled is not who waited: see the failure
        rank = whole(record.get("rank"))
        text = " ".join(str(record.get("cause") or "no reason given").split())
        if is_consequence(dict(record)) and evidence.failure.signal is not None:
            continue  # its messages failed because another rank was killed: see the failure
        yield Finding(
            cause,
            f"FAILED.rank{rank:04d}.json" if rank is not None else "FAILED.rank*.json",
            text,
            utc_ns(record.get("utc")),
            rank,
            _text(record.get("node")),
            may_follow=is_consequence(dict(record)) or FOLLOWS.search(text) is not None,
        )


def _of_job(evidence: Evidence) -> Iterator[Finding]:
    job = evidence.job
    if job is None:
        return
    end_ns = None if job.end_utc is None else int(job.end_utc.timestamp()) * SECOND_NS
    for state in dict.fromkeys((job.state, *job.step_states)):
        cause = STATES.get(state)
        if cause is None or (state != job.state and cause is not Cause.HOST_MEMORY):
            continue  # steps are cancelled with their job, whatever has ended it
        waited_s = NODE_WAIT_S if cause is Cause.NODE else KILL_WAIT_S
        time_ns = None if end_ns is None or cause is Cause.HOST_MEMORY else end_ns - int(waited_s * SECOND_NS)
        yield Finding(cause, job.source, job.line(), time_ns)
    if PROLOG in job.reason:
        yield Finding(Cause.NODE, job.source, job.line(), end_ns)
    elif job.reason in LAUNCH_REASONS:
        yield Finding(Cause.LAUNCHER, job.source, job.line(), end_ns)


def _of_orders(evidence: Evidence) -> Iterator[Finding]:
    if evidence.cancelled:
        text = f"cancelled by user {evidence.cancelled.get('uid', '?')} on {evidence.cancelled.get('host', '?')}"
        yield Finding(Cause.CANCELLED, evidence.folder.cancelled_json.name, text, utc_ns(evidence.cancelled.get("utc")))
    status, spec = evidence.status, evidence.spec
    began, ended = utc_ns(status.get("started_utc")), utc_ns(status.get("updated_utc"))
    is_stopped = status.get("signal") == 15 and evidence.is_batch
    if not is_stopped or spec is None or began is None or ended is None or evidence.cancelled:
        return
    ran_s, limit_s = (ended - began) / SECOND_NS, 60.0 * spec.cluster.minutes
    if ran_s > limit_s - NEAR_LIMIT_S and ran_s > limit_s / 2:
        text = f"stopped after {ran_s / 60:.1f} of cluster.minutes={spec.cluster.minutes} minutes"
        yield Finding(Cause.TIME_LIMIT, "status.json", text, ended)


def _of_failure(evidence: Evidence) -> Iterator[Finding]:
    """Yield what the launcher's words and the heartbeats say of the first rank that ended."""
    failure = evidence.failure
    if failure.rank is None and failure.node is None:
        return
    text = f"{failure.what}: {failure.cause}" if failure.cause else failure.what
    if failure.exit_code == StalledError.exit_code:
        source = "STALLED.json" if evidence.stall else "heartbeats"
        yield Finding(
            Cause.STALLED, source, text, utc_ns(evidence.stall.get("utc")) or _first_ns(evidence), failure.rank,
            failure.node,
        )  # fmt: skip
    elif failure.signal is not None:
        yield Finding(
            Cause.KILLED, "logs/ranks.log", text, None, failure.rank, failure.node,
            may_follow=failure.signal in BY_OTHERS,
        )  # fmt: skip
    elif not evidence.records:
        cause = cause_of_words(failure.cause or "") or Cause.EXCEPTION
        yield Finding(
            cause, "logs/ranks.log", text, None, failure.rank, failure.node,
            may_follow=cause is Cause.EXCEPTION,
        )  # fmt: skip


def _of_silence(evidence: Evidence) -> Iterator[Finding]:
    """Yield the node all of whose ranks ended without a word, where the others only tell that their messages failed."""
    records = evidence.records
    if not evidence.is_batch or not records or evidence.failure.signal is not None:
        return
    if evidence.stall or any(record.get("exit_code") == StalledError.exit_code for record in records):
        return
    if not all(is_consequence(dict(record)) for record in records):
        return
    speaking = {_text(record.get("node")) for record in records}
    ranks_of: dict[str, list[int]] = {}
    for rank, beat in evidence.beats.items():
        ranks_of.setdefault(beat.node, []).append(rank)
        if beat.action == FINISHED:
            speaking.add(beat.node)
    silent = {node: ranks for node, ranks in ranks_of.items() if node not in speaking}
    if len(silent) == 1:
        ((node, ranks),) = silent.items()
        text = "no rank of this node left a word, and those of the others lost their messages"
        yield Finding(Cause.KILLED, "heartbeats", text, None, min(ranks), node)


def _of_status(evidence: Evidence) -> Iterator[Finding]:
    """Yield what the launching process noted; of a failed rank the other sources tell more."""
    condition, status = evidence.condition, evidence.status
    code, text = status.get("exit_code"), condition.facts.cause
    if condition.state == "failed" and text and status.get("rank") is None:
        cause = CODES.get(code) if isinstance(code, int) else None
        if text.startswith(MPI_KEY):
            cause = Cause.WRONG_MPI
        cause = cause or cause_of_words(text)
        is_of_class = cause is not None
        number = whole(status.get("signal"))
        cause = cause or (Cause.KILLED if number is not None else Cause.UNKNOWN)
        yield Finding(cause, "status.json", text, utc_ns(status.get("updated_utc")), may_follow=not is_of_class)
    elif condition.state == "cancelled":
        yield Finding(Cause.CANCELLED, condition.source, condition.note or text, utc_ns(status.get("updated_utc")))
    elif condition.state == "lost":
        yield Finding(Cause.KILLED, condition.source, condition.note, may_follow=True)


def _first_ns(evidence: Evidence) -> int | None:
    times = [time for record in evidence.records if (time := utc_ns(record.get("utc"))) is not None]
    return min(times, default=None)


def _weak(sign: Finding) -> Finding:
    return Finding(sign.cause, sign.source, sign.text, sign.time_ns, sign.rank, sign.node, may_follow=True)


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None

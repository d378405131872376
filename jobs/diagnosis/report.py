"""The diagnosis of one run: cause, first failing rank, where and when, what it leaves, and what to change."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from gems.errors import StalledError
from gems.runs.folder import RunFolder
from gems.utils.tables import printable
from jobs.diagnosis.evidence import Evidence, gather, read_schedule, whole
from jobs.diagnosis.judge import NOT_FAILED, Cause, Finding, judge
from jobs.diagnosis.findings import findings_of
from jobs.diagnosis.remedies import advice_of, blames_node

SCHEMA = "gems.diagnosis/1"
STAGE = re.compile(r"(\d+)(?:\.\d+)?[A-Z]")
MAX_EVIDENCE = 12
STATES = {"finished": Cause.FINISHED, "stopped": Cause.STOPPED, "requeued": Cause.WAITING, "missing": Cause.UNKNOWN}
WAITING = ("prepared", "submitted", "pending", "starting")


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What has become of a run; None where it is not known.

    `text` is the line of the source that tells the cause, `stages` those of the rank's in its pipeline, `trace_steps` the
    whole steps in the trace, `resume_step` the step before which the newest checkpoint stands, `blamed_node` the
    node that is better left out.
    """

    folder: RunFolder
    cause: Cause
    state: str
    text: str
    source: str
    rank: int | None = None
    node: str | None = None
    stages: tuple[int, ...] = ()
    step: int | None = None
    action: str | None = None
    rss_bytes: int | None = None
    device_bytes: int | None = None
    waits_for: str | None = None
    trace_steps: int | None = None
    resume_step: int | None = None
    job_id: str | None = None
    blamed_node: str | None = None
    advice: tuple[str, ...] = ()
    evidence: tuple[Finding, ...] = ()
    not_asked: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether the run ended otherwise than it should have."""
        return self.cause not in NOT_FAILED

    def to_dict(self) -> dict[str, Any]:
        """Return all fields for a program, and the paragraph."""
        return {
            "schema": SCHEMA, "run": self.folder.path.name, "run_folder": str(self.folder.path), "state": self.state,
            "cause": str(self.cause), "text": self.text, "source": self.source, "rank": self.rank, "node": self.node,
            "stages": list(self.stages), "step": self.step, "action": self.action, "rss_bytes": self.rss_bytes,
            "device_bytes": self.device_bytes, "waits_for": self.waits_for, "trace_steps": self.trace_steps,
            "resume_step": self.resume_step, "job_id": self.job_id, "blamed_node": self.blamed_node,
            "advice": list(self.advice),
            "evidence": [{"source": each.source, "cause": str(each.cause), "text": each.text} for each in self.evidence],
            "not_asked": list(self.not_asked), "paragraph": self.paragraph(),
        }  # fmt: skip

    def where(self) -> str:
        """Describe rank, node and stages: rank 3 on node n2, stage 3."""
        words = f"rank {self.rank}" if self.rank is not None else ""
        if self.node is not None:
            words += f"{' on ' if words else ''}node {self.node}"
        if self.stages:
            words += f" (stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))})"
        return words

    def line(self) -> str:
        """Describe the diagnosis in one short line, without the run's name."""
        where = f", {self.where()}" if self.where() else ""
        return printable(f"{self.cause}{where}: {self.text}")

    def paragraph(self) -> str:
        """Describe the whole in one paragraph."""
        parts = [f"{self.folder.path.name}: {self.cause}."]
        if where := self.where():
            parts.append(f"{where[0].upper()}{where[1:]}{self._when()}: {self._quoted()}.")
        elif self.text:
            parts.append(f"{self._quoted()}.")
        held = [
            f"{size / 2**30:.2f} GiB {name}"
            for name, size in (("of host memory", self.rss_bytes), ("on the device", self.device_bytes))
            if size is not None
        ]
        if held and self.has_failed:
            parts.append(f"It held {' and '.join(held)}.")
        if self.waits_for:
            parts.append(f"{self.waits_for.rstrip('.')}.")
        parts += self._left()
        if self.advice:
            parts.append(f"To change: {'; '.join(self.advice)}.")
        return printable(" ".join(parts))

    def _when(self) -> str:
        if self.step is None:
            return ""
        if self.step >= 0:
            return f" in step {self.step}" + (f", action {self.action}" if self.action else "")
        return " before the first step" if self.action in (None, "start") else f", in {self.action}"

    def _quoted(self) -> str:
        return f"{self.text.rstrip('. ')} [{self.source}]"

    def _left(self) -> list[str]:
        if not self.has_failed and self.cause is not Cause.STOPPED:
            return []
        parts = []
        if self.trace_steps is not None:
            parts.append(f"The trace reads, with {self.trace_steps} whole step{'' if self.trace_steps == 1 else 's'}.")
        if self.resume_step is not None:
            parts.append(f"The newest checkpoint stands before step {self.resume_step}.")
        return parts


def diagnose_run(folder: RunFolder, *, with_trace: bool = True) -> Diagnosis:
    """Find out why a run ended, from all that is there; never raises for what is missing or damaged."""
    return conclude(gather(folder, with_trace=with_trace))


def conclude(evidence: Evidence) -> Diagnosis:
    """Judge the evidence."""
    state = evidence.condition.state
    found = findings_of(evidence)
    cause = _standing(evidence)
    if cause is not None:
        note = evidence.condition.note or str(evidence.stop.get("reason") or state)
        told = Finding(cause, evidence.condition.source, note)
        return _diagnosis(evidence, told, () if cause in (Cause.FINISHED, Cause.WAITING) else tuple(found))
    told = judge(found) or Finding(Cause.UNKNOWN, evidence.condition.source, _last_words(evidence))
    # Of those that say the same, one that a clock and a rank stand in says it best: not the order of a log's lines.
    same = [each for each in found if each.cause is told.cause]
    recorded = [each for each in same if each.source.startswith("FAILED") and not each.may_follow]
    named = next((each for each in same if each.rank is not None), None)
    if told.time_ns is None and recorded:
        told = min(recorded, key=lambda each: each.time_ns or 0)
    elif told.rank is None and named is not None and told.cause is not Cause.CANCELLED:
        told = replace(told, rank=named.rank, node=told.node or named.node)
    node = told.node or next((each.node for each in same if each.node is not None), None)
    told = replace(told, node=node)
    return _diagnosis(evidence, told, tuple(found))


def _standing(evidence: Evidence) -> Cause | None:
    """Return the class of a run that has not failed; None for one that has."""
    condition = evidence.condition
    if condition.state in ("running", "stalled"):
        return Cause.RUNNING
    if condition.state in WAITING:
        return Cause.WAITING
    return STATES.get(condition.state)


def _diagnosis(evidence: Evidence, told: Finding, found: tuple[Finding, ...]) -> Diagnosis:
    rank, node = told.rank, told.node
    failure, has_failed = evidence.failure, told.cause not in NOT_FAILED
    if has_failed and rank is None and told.cause in (Cause.HOST_MEMORY, Cause.KILLED):
        rank, node = failure.rank, node or failure.node  # the one that died of it
    record: Mapping[str, Any] = next(
        (each for each in evidence.records if rank is not None and each.get("rank") == rank), {}
    )
    beat = evidence.beats.get(rank) if rank is not None else None
    step = whole(record.get("step"))
    step = beat.step if step is None and beat is not None else step
    action = _text(record.get("action")) or (beat.action if beat is not None else None)
    node = node or _text(record.get("node")) or (beat.node if beat is not None else None)
    job_rss = evidence.job.max_rss_bytes if evidence.job and told.cause is Cause.HOST_MEMORY else None
    blamed = node if node and evidence.is_batch and blames_node(told.cause, told.text) else None
    return Diagnosis(
        folder=evidence.folder,
        cause=told.cause,
        state=evidence.condition.state,
        text=" ".join(told.text.split()),
        source=told.source,
        rank=rank,
        node=node,
        stages=_stages(evidence, rank, record, action),
        step=step,
        action=action,
        rss_bytes=whole(record.get("rss_bytes")) or job_rss,
        device_bytes=whole(record.get("device_bytes")),
        waits_for=_waits(evidence) if told.cause is Cause.STALLED else None,
        trace_steps=evidence.trace_steps,
        resume_step=evidence.resume_step,
        job_id=evidence.condition.facts.job_id,
        blamed_node=blamed,
        advice=advice_of(told.cause, told.text, node, evidence),
        evidence=_evidence(evidence, told, found),
        not_asked=evidence.troubles,
    )


def _stages(evidence: Evidence, rank: int | None, record: Mapping[str, Any], action: str | None) -> tuple[int, ...]:
    """Return the stage that the rank was in, else all that it holds."""
    if rank is None:
        return ()
    named = STAGE.match(action or "")
    stage = whole(record.get("stage"))
    if stage is not None or named is not None:
        return (stage if stage is not None else int(named[1]) if named else 0,)
    schedule = read_schedule(evidence.folder)
    if schedule is None:
        return ()
    held = schedule.placement.stages_on(rank % schedule.num_ranks)
    return tuple(sorted({stage for _, stage in held}))


def _waits(evidence: Evidence) -> str | None:
    """Return who waited for whom, in the words of the first rank that knew."""
    first = (evidence.stall, *(each for each in evidence.records if each.get("exit_code") == StalledError.exit_code))
    return next((words for each in first if (words := _text(each.get("waits_for")))), None)


def _evidence(evidence: Evidence, told: Finding, found: tuple[Finding, ...]) -> tuple[Finding, ...]:
    """Return what was found, the telling one first, and SLURM's record as it is."""
    rows = [told, *found]
    if evidence.job is not None:
        rows.append(Finding(Cause.UNKNOWN, evidence.job.source, evidence.job.line()))
    rows += [
        Finding(Cause.STOPPED, name, " ".join(f"{key}={value}" for key, value in document.items()))
        for name, document in (("stop.json", evidence.stop), ("stopped.json", evidence.stopped))
        if document
    ]
    kept = {(each.source, each.text): each for each in reversed(rows)}
    return tuple(reversed(kept.values()))[:MAX_EVIDENCE]


def _last_words(evidence: Evidence) -> str:
    return evidence.condition.note or evidence.failure.line()


def _text(value: object) -> str | None:
    return " ".join(value.split()) if isinstance(value, str) and value.strip() else None

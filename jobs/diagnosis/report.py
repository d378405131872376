"""Diagnose a run: cause, first failing rank with its position, what is left, and advice."""

from __future__ import annotations

import contextlib
import math
import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from datetime import UTC, datetime
from typing import Any

from gems.errors import ConfigError, StalledError
from gems.runs.failure_cause import FailureCause, device_memory_remedies
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import write_json
from gems.utils.tables import printable
from gems.utils.units import GIB, counted, now_utc
from jobs.batch.output import report
from jobs.diagnosis.causes import (
    ADVICE,
    BY_SPECIFICITY,
    NODE_FILE_ERRORS,
    ORDERS,
    RUN_STATES,
    Finding,
)
from jobs.diagnosis.evidence import Evidence
from jobs.diagnosis.node_blocklist import LIFE, MIN_FAILURES, NodeBlocklist
from jobs.diagnosis.root_cause import describe_position, is_consequence
from jobs.status.run_status import read_spec

SCHEMA = "gems.diagnosis/1"
DIAGNOSIS_JSON = "diagnosis.json"
UNBLOCK = "--unblock"
STAGE = re.compile(r"(\d+)(?:\.\d+)?[A-Z]")
MAX_EVIDENCE = 12
SHOWN = ("source", "cause", "text", "is_consequence")  # of a finding
MAX_CONSEQUENCES = 3
CONSEQUENCE_CHARS = 120
CHECKPOINTS = "train.checkpoint_s: so that less is lost the next time"
OFFLOADED = "machine.host_bytes: the host memory that offloaded activations of a node may take"


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The fate of a run; unknown fields are None.

    Attributes:
        text: The line of the source that names the cause.
        stages: The stages of the rank in its pipeline.
        memory: The allocator's state, own count and predicted peak of a rank out of memory.
        consequences: The ranks that failed because of the cause.
        trace_steps: The complete steps in the trace.
        resume_step: The step at which the newest checkpoint resumes.
        blamed_node: The node to exclude.
    """

    folder: RunFolder
    cause: FailureCause
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
    memory: str | None = None
    consequences: tuple[str, ...] = ()
    waits_for: str | None = None
    trace_steps: int | None = None
    resume_step: int | None = None
    job_id: str | None = None
    blamed_node: str | None = None
    advice: tuple[str, ...] = ()
    evidence: tuple[Finding, ...] = ()
    query_errors: tuple[str, ...] = ()

    @property
    def has_failed(self) -> bool:
        """Whether the run ended in failure."""
        return self.cause.is_failure

    def to_dict(self) -> dict[str, Any]:
        """Return all fields for a program, and the paragraph."""
        return {
            "schema": SCHEMA,
            "run": self.folder.path.name,
            "run_folder": str(self.folder.path),
            **{
                item.name: getattr(self, item.name)
                for item in fields(self)
                if item.name != "folder"
            },
            "evidence": [{name: getattr(item, name) for name in SHOWN} for item in self.evidence],
            "paragraph": self.paragraph(),
        }

    def where(self) -> str:
        """Describe rank, node and stages: rank 3 on node n2 (stage 3)."""
        rank = f"rank {self.rank}" if self.rank is not None else ""
        node = f"node {self.node}" if self.node is not None else ""
        words = " on ".join(filter(None, (rank, node)))
        if self.stages:
            words += (
                f" (stage{'s' if len(self.stages) > 1 else ''} {', '.join(map(str, self.stages))})"
            )
        return words

    def line(self) -> str:
        """Describe the diagnosis in one short line, without the run's name."""
        where = f", {self.where()}" if self.where() else ""
        return printable(f"{self.cause}{where}: {self.text}")

    def paragraph(self) -> str:
        """Describe the whole in one paragraph."""
        quoted = f"{self.text.rstrip('. ')} [{self.source}]"
        parts = [f"{self.folder.path.name}: {self.cause}."]
        if where := self.where():
            position = describe_position(self.step, self.action)
            parts.append(f"{where[0].upper()}{where[1:]}{position}: {quoted}.")
        elif self.text:
            parts.append(f"{quoted}.")
        sizes = (("of host memory", self.rss_bytes), ("on the device", self.device_bytes))
        held = [f"{size / GIB:.2f} GiB {name}" for name, size in sizes if size is not None]
        if self.memory:
            parts.append(f"{self.memory[0].upper()}{self.memory[1:].rstrip('.')}.")
        elif held and self.has_failed:
            parts.append(f"It held {' and '.join(held)}.")
        if self.waits_for:
            parts.append(f"{self.waits_for.rstrip('.')}.")
        if self.consequences:
            shown = self.consequences[:MAX_CONSEQUENCES]
            more = len(self.consequences) - MAX_CONSEQUENCES
            parts.append(
                f"A consequence only: {'; '.join(shown)}{f'; {more} more' if more > 0 else ''}."
            )
        if self.has_failed or self.cause is FailureCause.STOPPED:
            if self.trace_steps is not None:
                parts.append(
                    f"The trace is readable and holds {counted(self.trace_steps, 'complete step')}."
                )
            if self.resume_step is not None:
                parts.append(f"The newest checkpoint resumes at step {self.resume_step}.")
        if self.advice:
            parts.append(f"To change: {'; '.join(self.advice)}.")
        return printable(" ".join(parts))


def diagnose_run(folder: RunFolder, *, with_trace: bool = True) -> Diagnosis:
    """Find out why a run ended, from all available evidence.

    Missing or damaged evidence never raises an error.
    """
    evidence = Evidence(folder, with_trace=with_trace)
    run = evidence.run
    findings = evidence.findings()
    if (cause := RUN_STATES.get(run.state)) is not None:
        finding = Finding(
            cause, run.source, run.note or str(evidence.stop.get("reason") or run.state)
        )
        is_open = cause in (FailureCause.FINISHED, FailureCause.WAITING)
        return _diagnosis(evidence, finding, [] if is_open else findings)
    decisive = judge(findings) or Finding(
        FailureCause.UNKNOWN, run.source, run.note or evidence.failure.describe()
    )
    # among findings with the same cause, prefer one with a time and a rank: the lines of a log are
    # not in order of time
    same = [finding for finding in findings if finding.cause is decisive.cause]
    recorded = [
        finding
        for finding in same
        if finding.source.startswith("FAILED") and not finding.may_follow
    ]
    with_rank = next((finding for finding in same if finding.rank is not None), None)
    if decisive.time_ns is None and recorded:
        decisive = min(recorded, key=lambda finding: finding.time_ns or 0)
    elif (
        decisive.rank is None
        and with_rank is not None
        and decisive.cause is not FailureCause.CANCELLED
    ):
        decisive = replace(decisive, rank=with_rank.rank, node=decisive.node or with_rank.node)
    nodes = (finding.node for finding in same if finding.node is not None)
    node = decisive.node or next(nodes, None)
    return _diagnosis(evidence, replace(decisive, node=node), findings)


def judge(findings: Iterable[Finding]) -> Finding | None:
    """Return the finding that shows the cause, or None.

    A consequence of the kill of a rank counts only if there is no other finding, and a possible
    consequence goes last: a rank that the kernel killed for its memory is also reported as killed
    by signal 9. Among the rest the earliest goes first. Faults without a time go before findings
    with one, and the scheduler's orders without a time go after them.
    """
    every = list(findings)
    candidates = [finding for finding in every if not finding.is_consequence] or every
    # SLURM reports a lost node minutes after the ranks began to wait
    if any(finding.cause is FailureCause.NODE for finding in candidates):
        candidates = [
            finding for finding in candidates if finding.cause is not FailureCause.STALLED
        ]

    certain = [finding for finding in candidates if not finding.may_follow]

    def order(finding: Finding) -> tuple[float, int]:
        cause = finding.cause
        time_ns = finding.time_ns
        untimed = math.inf if cause in ORDERS else -math.inf
        time = (
            0 if not certain else untimed if time_ns is None else time_ns
        )  # consequences have no order
        return time, BY_SPECIFICITY.index(cause) if cause in BY_SPECIFICITY else len(BY_SPECIFICITY)

    return min(certain or candidates, key=order, default=None)


def record_diagnosis(diagnosis: Diagnosis) -> None:
    """Write the diagnosis of an ended run to its folder, and the node at fault to the blocklist.

    If they cannot be written, only print a warning.
    """
    folder = diagnosis.folder
    node = diagnosis.blamed_node
    if diagnosis.has_failed or diagnosis.cause is FailureCause.STOPPED:
        try:
            write_json(folder.path / DIAGNOSIS_JSON, {**diagnosis.to_dict(), "utc": now_utc()})
        except OSError as error:
            report(
                f"{DIAGNOSIS_JSON} is not written: {folder.path} cannot be written"
                f" ({error.strerror})"
            )
    spec = read_spec(folder) if node is not None else None
    if node is None or spec is None:
        return
    nodes = NodeBlocklist(folder.path.parent)
    times = [finding.time_ns for finding in diagnosis.evidence if finding.time_ns is not None]
    utc = (
        datetime.fromtimestamp(min(times) / 1e9, UTC).isoformat(timespec="seconds")
        if times
        else now_utc()
    )
    # by attempt: a failure counts once, even if it is diagnosed several times
    attempt = f"{folder.path.name} attempt {folder.attempt}"
    try:
        entry = nodes.add(
            spec.cluster.name, node, f"{diagnosis.cause}: {diagnosis.text}"[:200], attempt, utc
        )
    except OSError as error:
        report(f"node {node} is not noted: {nodes.path} cannot be written ({error.strerror})")
        return
    if entry is not None:
        excludes = (
            f"`jobs resubmit` excludes it for {LIFE.days} days ({UNBLOCK} {entry.node} undoes that)"
        )
        if not entry.is_blocked:
            excludes = f"`jobs resubmit` excludes it after {MIN_FAILURES} failures"
        report(f"{entry.describe()}; {excludes}")


def _diagnosis(evidence: Evidence, finding: Finding, findings: list[Finding]) -> Diagnosis:
    cause = finding.cause
    rank = finding.rank
    node = finding.node
    job = evidence.job
    if rank is None and cause in (FailureCause.HOST_MEMORY, FailureCause.KILLED):
        rank = evidence.failure.rank
        node = node or evidence.failure.node
    records = (record for record in evidence.records if record.get("rank") == rank)
    record = {} if rank is None else next(records, {})
    beat = evidence.beats.get(rank) if rank is not None else None
    step = record.get("step")
    action = record.get("action") or (beat.action if beat is not None else None)
    node = node or record.get("node") or (beat.node if beat is not None else None)
    rss_bytes = record.get("rss_bytes")
    if rss_bytes is None and job is not None and cause is FailureCause.HOST_MEMORY:
        rss_bytes = job.max_rss_bytes
    is_blamed = evidence.is_batch and _is_node_fault(finding, findings)
    return Diagnosis(
        evidence.folder,
        cause,
        evidence.run.state,
        " ".join(finding.text.split()),
        finding.source,
        rank,
        node,
        _stages(evidence, rank, record, action),
        beat.step if step is None and beat is not None else step,
        action,
        rss_bytes,
        record.get("device_bytes"),
        _memory(record),
        _consequences(evidence, rank),
        _waits_for(evidence) if cause is FailureCause.STALLED else None,
        evidence.trace_steps,
        evidence.resume_step,
        job_id=evidence.run.job_id,
        blamed_node=(node or None) if is_blamed else None,
        advice=advise(cause, finding.text, node, evidence),
        evidence=_listed(evidence, [finding, *findings]),
        query_errors=evidence.errors,
    )


def _waits_for(evidence: Evidence) -> str | None:
    """Return the first record of the ranks that waited for others."""
    stalled = (
        record for record in evidence.records if record.get("exit_code") == StalledError.exit_code
    )
    records = (evidence.stall, *stalled)
    return next(filter(None, (record.get("waits_for") for record in records)), None)


def _is_node_fault(finding: Finding, findings: Iterable[Finding]) -> bool:
    """Return whether the node is at fault; file errors on several nodes are no node's fault."""
    if finding.cause in (FailureCause.NODE, FailureCause.DEVICE):
        return True
    if finding.cause is not FailureCause.FILE_SYSTEM or not NODE_FILE_ERRORS.search(finding.text):
        return False
    return len({other.node for other in findings if other.cause is finding.cause} - {None}) == 1


def _listed(evidence: Evidence, findings: list[Finding]) -> tuple[Finding, ...]:
    """Return the distinct findings to show, with the job's state and the stop requests."""
    if (job := evidence.job) is not None:
        findings.append(Finding(FailureCause.UNKNOWN, job.source, job.describe()))
    for name, document in (("stop.json", evidence.stop), ("stopped.json", evidence.stopped)):
        if document:
            words = " ".join(f"{key}={value}" for key, value in document.items())
            findings.append(Finding(FailureCause.STOPPED, name, words))
    unique = {(finding.source, finding.text): finding for finding in reversed(findings)}
    return tuple(reversed(unique.values()))[:MAX_EVIDENCE]


def _memory(record: Mapping[str, Any]) -> str | None:
    text: str | None = (record.get("memory") or {}).get("text")
    return text


def _consequences(evidence: Evidence, rank: int | None) -> tuple[str, ...]:
    """Describe the ranks that failed because `rank` had, by their records."""
    described = []
    for record in evidence.records if rank is not None else ():
        if record.get("rank") not in (rank, None) and is_consequence(record):
            cause = record.get("cause") or "no reason given"
            where = f"rank {record['rank']} on node {record.get('node')}"
            described.append(
                f"{where} failed with"
                f" {textwrap.shorten(cause, CONSEQUENCE_CHARS, placeholder=' ...')}"
            )
    return tuple(described)


def _stages(
    evidence: Evidence, rank: int | None, record: Mapping[str, Any], action: str | None
) -> tuple[int, ...]:
    """Return the stage of the rank's action, or else all its stages."""
    stage = record.get("stage")
    named = STAGE.match(action or "")
    if stage is None and named is not None:
        stage = int(named[1])
    if rank is None or stage is not None:
        return () if rank is None or stage is None else (stage,)
    with contextlib.suppress(ConfigError, KeyError, TypeError, IndexError):
        schedule = evidence.folder.read_schedule()
        return tuple(
            sorted({stage for _, stage in schedule.placement.stages_on(rank % schedule.num_ranks)})
        )
    return ()


def advise(
    cause: FailureCause, words: str, node: str | None, evidence: Evidence
) -> tuple[str, ...]:
    """Return the changes to make, most promising first; none for a run that has not failed."""
    run = evidence.folder.path.name
    step = evidence.resume_step
    spec = evidence.spec
    command = f"gems-jobs resubmit {run}"
    resumes = "" if step is None else f" resumes at step {step}"
    again = command + resumes
    has_stacks = evidence.folder.stacks(0).parent.is_dir()
    values = {
        "run": run,
        "command": command,
        "resumes": resumes,
        "again": again,
        "node": node or "NODE",
        "elsewhere": (
            f"exclude node {node}: {command} cluster.exclude=[{node}]{resumes}" if node else again
        ),
        "checkpoints": CHECKPOINTS if step is None else "",
        "minutes": f"={2 * spec.cluster.minutes}" if spec is not None else "",
        "where_it_hung": "read the stacks in stacks/" if has_stacks else "look at that rank's node",
        "device_memory": _device_memory(evidence),
        "node_memory": (
            "+cluster.sbatch.mem: ask for more of the node's memory"
            if spec is None or spec.cluster.supports_mem_option
            else "cluster.ranks_per_node: fewer ranks share a node's memory"
        ),
        "offloaded": OFFLOADED if spec is None or not spec.memory.keeps else "",
    }
    lines = next((row[2:] for row in ADVICE if row[0] == cause and re.search(row[1], words)), ())
    # a value may be several lines, or none
    return tuple(filter(None, "\n".join(lines).format_map(values).split("\n")))


def _device_memory(evidence: Evidence) -> str:
    """Return the advice of the rank that ran out of memory, or else for the configuration."""
    spec = evidence.spec
    sections = (None, None) if spec is None else (spec.memory, spec.parallel)
    by_ranks = ((record.get("memory") or {}).get("advice") for record in evidence.records)
    return "\n".join(next(filter(None, by_ranks), device_memory_remedies(*sections)))

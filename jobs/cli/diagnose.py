"""`python -m jobs diagnose`: why a run ended, in one paragraph; of a study's failed points, one line each."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gems.cli.framework import Options, print_json
from gems.errors import ConfigError, one_of
from gems.runs.folder import RunFolder
from gems.utils.atomic_io import write_json
from gems.utils.tables import printable
from jobs.diagnosis.evidence import read_spec
from jobs.diagnosis.judge import Cause
from jobs.diagnosis.report import Diagnosis, diagnose_run
from jobs.diagnosis.node_blocklist import LIFE, BadNodes
from jobs.status.lookup import RUNS_DIR, catalogue
from jobs.status.study_record import StudyRecord

FORGET = "--forget"
DIAGNOSIS_JSON = "diagnosis.json"
NOT_TOLD = 1


def diagnose(words: Sequence[str], options: Options) -> int:
    """Run `python -m jobs diagnose RUN_OR_STUDY ...`, or with --forget NODE takes a node off the list of bad ones.

    What is found goes to diagnosis.json in the run folder, where that can be written. Gives 0 where the cause is known, 1
    where one is not.

    Raises:
        ConfigError: no such run or study, or a node that is not on the list.
    """
    node = options.chosen.get(FORGET)
    if node is not None:
        return _forget(words, node, options)
    if all(word.startswith(RUNS_DIR) for word in words):
        raise ConfigError("diagnose", "none", "name a run or a study", "python -m jobs diagnose RUN_OR_STUDY")
    found = catalogue(words, allows_several=False)
    told = [_diagnosed(folder, with_trace=True) for folder in found.runs]
    studies = [(study, _points(study)) for study in found.studies]
    if options.json:
        _show_json(told, studies)
    else:
        print("\n\n".join([*(one.paragraph() for one in told), *(_table(*study) for study in studies)]))
        for one in told:
            _say_asides(one)
    every = [*told, *(point for _, points in studies for _, point in points)]
    return NOT_TOLD if any(one.cause is Cause.UNKNOWN for one in every) else 0


def remember(told: Diagnosis) -> None:
    """Keep a diagnosis of a run that has ended in its folder, and the node that is to blame in the list of bad ones.

    Where that cannot be written it is said on stderr, and nothing is lost but the file.
    """
    if told.has_failed or told.cause is Cause.STOPPED:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        try:
            write_json(told.folder.path / DIAGNOSIS_JSON, {**told.to_dict(), "utc": now})
        except OSError as error:
            _say(f"{DIAGNOSIS_JSON} is not kept: {told.folder.path} cannot be written ({error.strerror})")
    spec = read_spec(told.folder) if told.blamed_node is not None else None
    if told.blamed_node is None or spec is None:
        return
    nodes = BadNodes(told.folder.path.parent)
    try:
        entry = nodes.add(
            spec.cluster.name, told.blamed_node, f"{told.cause}: {told.text}"[:200], _attempt(told.folder), _utc(told)
        )  # fmt: skip
    except OSError as error:
        _say(f"node {told.blamed_node} is not noted: {nodes.path} cannot be written ({error.strerror})")
        return
    if entry is not None:
        _say(
            f"{entry.line()}; `jobs resubmit` leaves it out for {LIFE.days} days ({FORGET} {entry.node} takes it back)"
        )


def _diagnosed(folder: RunFolder, *, with_trace: bool) -> Diagnosis:
    told = diagnose_run(folder, with_trace=with_trace)
    remember(told)
    return told


def _points(study: StudyRecord) -> list[tuple[str, Diagnosis]]:
    """Return the points of a study that have failed, those of one cause together."""
    told = [(label, diagnose_run(folder, with_trace=False)) for label, folder in study.points() if folder.path.is_dir()]
    failed = [(label, one) for label, one in told if one.has_failed]
    for _, one in failed:
        remember(one)
    return sorted(failed, key=lambda row: row[1].cause)


def _table(study: StudyRecord, points: Sequence[tuple[str, Diagnosis]]) -> str:
    if not points:
        return f"study {study.name}: no point has failed"
    lines = [f"study {study.name}: {len(points)} point{'s have' if len(points) > 1 else ' has'} failed"]
    for cause in dict.fromkeys(one.cause for _, one in points):
        same = [(label, one) for label, one in points if one.cause is cause]
        lines.append(f"{cause} ({len(same)})")
        lines += [
            printable(f"  {label}, {one.folder.path.name}: {one.where() or 'the run'}: {one.text}")
            for label, one in same
        ]
        lines.append(printable(f"  to change: {'; '.join(same[0][1].advice)}"))
    return "\n".join(lines)


def _show_json(told: Sequence[Diagnosis], studies: Sequence[tuple[StudyRecord, list[tuple[str, Diagnosis]]]]) -> None:
    if len(told) == 1 and not studies:
        print_json(told[0].to_dict())
        return
    document: dict[str, Any] = {"runs": [one.to_dict() for one in told]}
    document["studies"] = [
        {"study": study.name, "failed": [{"point": label, **one.to_dict()} for label, one in points]}
        for study, points in studies
    ]
    print_json(document)


def _say_asides(told: Diagnosis) -> None:
    for trouble in told.not_asked:
        _say(f"no answer: {trouble}")


def _forget(words: Sequence[str], node: str, options: Options) -> int:
    runs_dir = next((word.removeprefix(RUNS_DIR) for word in reversed(words) if word.startswith(RUNS_DIR)), "runs")
    others = [word for word in words if not word.startswith(RUNS_DIR)]
    if others:
        raise ConfigError("diagnose", others[0], f"does not go with {FORGET}", f"{FORGET} NODE [runs_dir=FOLDER]")
    nodes = BadNodes(Path(runs_dir).resolve())
    known = [entry.node for entry in nodes.entries()]
    try:
        gone = nodes.forget(node)
    except OSError as error:
        raise ConfigError("runs_dir", runs_dir, f"cannot be written ({error.strerror})") from error
    if not gone:
        raise ConfigError(FORGET, node, one_of(known) if known else f"no bad node is noted in {nodes.path}")
    if options.json:
        print_json({"forgotten": [entry.node for entry in gone], "left": [e.node for e in nodes.entries()]})
    else:
        print("\n".join(f"forgotten: {entry.line()}" for entry in gone))
    return 0


def _attempt(folder: RunFolder) -> str:
    """Name the attempt that the folder holds: one failure counts once, however often it is looked at."""
    attempts = folder.path / "attempts"
    number = 1 + sum(1 for _ in attempts.iterdir()) if attempts.is_dir() else 1
    return f"{folder.path.name} attempt {number}"


def _utc(told: Diagnosis) -> str:
    times = [each.time_ns for each in told.evidence if each.time_ns is not None]
    when = datetime.fromtimestamp(min(times) / 1e9, UTC) if times else datetime.now(UTC)
    return when.isoformat(timespec="seconds")


def _say(text: str) -> None:
    print(printable(f"jobs: {text}"), file=sys.stderr)

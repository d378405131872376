"""`gems-jobs diagnose`: why runs ended, in a paragraph each, or a line for points of a study."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from gems.cli.framework import Options, print_json
from gems.errors import ConfigError, one_of
from gems.runs.failure_cause import FailureCause
from gems.utils.tables import printable
from jobs.batch.output import report
from jobs.diagnosis.node_blocklist import NodeBlocklist
from jobs.diagnosis.report import UNBLOCK, Diagnosis, diagnose_run, record_diagnosis
from jobs.status.lookup import find_named, split_runs_dir

UNKNOWN_CAUSE = 1


def diagnose(words: Sequence[str], options: Options) -> int:
    """Run `gems-jobs diagnose RUN_OR_STUDY ...`.

    With --unblock NODE, remove a node from the blocklist instead. Diagnoses are written to
    diagnosis.json in the run folders. Return 0 if every cause is known, else 1.

    Raises:
        ConfigError: A run or study does not exist, or the node is not on the list.
    """
    if UNBLOCK in options.chosen:
        return _unblock(words, options.chosen[UNBLOCK], options)
    catalogue = find_named(words, "diagnose")
    diagnoses = [diagnose_run(folder) for folder in catalogue.runs]
    studies = []
    for study in catalogue.studies:
        points = [(label, folder) for label, folder in study.points() if folder.path.is_dir()]
        rows = [(label, diagnose_run(folder, with_trace=False)) for label, folder in points]
        failed = sorted((row for row in rows if row[1].has_failed), key=lambda row: row[1].cause)
        studies.append((study.name, failed))
    every = [*diagnoses, *(point for _, points in studies for _, point in points)]
    for diagnosis in every:
        record_diagnosis(diagnosis)
    if not options.json:
        described = [_describe(name, points) for name, points in studies]
        print("\n\n".join([*(diagnosis.paragraph() for diagnosis in diagnoses), *described]))
        for error in (error for diagnosis in diagnoses for error in diagnosis.query_errors):
            report(f"no answer: {error}")
    elif len(diagnoses) == 1 and not studies:
        print_json(diagnoses[0].to_dict())
    else:
        listed = [
            {
                "study": name,
                "failed": [{"point": label, **point.to_dict()} for label, point in points],
            }
            for name, points in studies
        ]
        runs = [diagnosis.to_dict() for diagnosis in diagnoses]
        print_json({"runs": runs, "studies": listed})
    is_unknown = any(diagnosis.cause is FailureCause.UNKNOWN for diagnosis in every)
    return UNKNOWN_CAUSE if is_unknown else 0


def _describe(study: str, points: Sequence[tuple[str, Diagnosis]]) -> str:
    if not points:
        return f"study {study}: no point has failed"
    lines = [f"study {study}: {len(points)} point{'s have' if len(points) > 1 else ' has'} failed"]
    for cause, rows in itertools.groupby(points, key=lambda row: row[1].cause):
        same = list(rows)
        lines.append(f"{cause} ({len(same)})")
        lines += [
            f"  {label}, {point.folder.path.name}: {point.where() or 'the run'}: {point.text}"
            for label, point in same
        ]
        lines.append(f"  to change: {'; '.join(same[0][1].advice)}")
    return "\n".join(map(printable, lines))


def _unblock(words: Sequence[str], node: str, options: Options) -> int:
    runs_dir, others = split_runs_dir(words)
    if others:
        raise ConfigError(
            "diagnose",
            others[0],
            f"does not go with {UNBLOCK}",
            f"{UNBLOCK} NODE [runs_dir=FOLDER]",
        )
    nodes = NodeBlocklist(runs_dir)
    known = [entry.node for entry in nodes.entries()]
    try:
        removed = nodes.remove(node)
    except OSError as error:
        raise ConfigError("runs_dir", runs_dir, f"cannot be written ({error.strerror})") from error
    if not removed:
        raise ConfigError(
            UNBLOCK, node, one_of(known) if known else f"no node is blocked in {nodes.path}"
        )
    if options.json:
        print_json(
            {
                "unblocked": [entry.node for entry in removed],
                "left": [e.node for e in nodes.entries()],
            }
        )
    else:
        print("\n".join(f"unblocked: {entry.describe()}" for entry in removed))
    return 0

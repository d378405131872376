"""The command `gems-analysis VERB`: tables and pictures from trace files."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from gems.cli import framework
from gems.cli.framework import Verb

_PICTURE = {"--out FILE": "the picture, a .png, .pdf or .svg"}
_LOOKUP = {"--runs-dir FOLDER": "where to look up the names of runs (default runs)"}


def _verb(
    name: str,
    sentence: str,
    operands: str,
    notes: Mapping[str, str] = MappingProxyType({}),
    formats: tuple[str, ...] = (),
) -> Verb:
    """Describe a verb; options with a value are the notes of two words, flags those of one."""
    valued = [option.split()[0] for option in notes if " " in option]
    return Verb(
        f"analysis.cli.verbs:{name}",
        sentence,
        tuple(option for option in notes if " " not in option),
        {option: formats if option == "--format" else () for option in valued},
        takes_words=True,
        operands=operands,
        notes=notes,
    )


VERBS = {
    "timeline": _verb(
        "timeline",
        "draw one step, rank x time",
        "PATH",
        {
            "--step N": "the step (default: the last whole one after warm-up)",
            "--out FILE": "a .png, .pdf or .svg (default: timeline.png beside the trace)",
        },
    ),
    "summary": _verb("summary", "print the closing table of a run", "PATH"),
    "collect": _verb(
        "collect", "merge a run's parts into trace.h5, draw it, and print the table", "PATH"
    ),
    "draw": _verb(
        "draw",
        "draw a schedule, rank x time: .json of `gems schedule --json` or torch's .csv, to a"
        " .svg, .png or .pdf",
        "SCHEDULE OUT",
    ),
    "partition": _verb(
        "partition", "draw the answer of `gems partition --json` with its layers", "FILE", _PICTURE
    ),
    "memory": _verb(
        "memory",
        "draw the answer of `gems memory --json`, bytes over time by policy",
        "FILE",
        _PICTURE,
    ),
    "placement": _verb(
        "placement",
        "draw the answer of `gems place --json`, operators on devices over time",
        "FILE",
        _PICTURE,
    ),
    "scaling": _verb(
        "scaling",
        "draw images/s and efficiency over ranks, and write them as CSV; or fit published step"
        " times",
        "[RUN ...]",
        {
            "--out FOLDER": "output folder (default: the one that holds the first run)",
            "--table FILE": "fit the step times of a CSV instead of runs",
            "--series NAME": "series of the table, or a part of the names",
            "--fit-to P": "fit rows of up to P accelerators",
        },
    ),
    "outside": _verb(
        "outside",
        "simulate pipelines that others measured, from a data sheet and one of their rows",
        "",
        {
            "--table FILE": "CSV of pipelines, with the columns of"
            " scripts/data/pipelines_of_others.csv",
            "--calibrate ROW": "id of the one row whose measured step is read",
        },
    ),
    "attribution": _verb(
        "attribution",
        "show where the time of a step goes",
        "PATH",
        {
            "--ranks": "show a row for each rank too",
            "--out FILE": "the waterfall, a .png, .pdf or .svg, with a .csv beside it",
        },
    ),
    "hybrid": _verb("hybrid", "draw the answer of `gems plan --hybrid --json`", "FILE", _PICTURE),
    "report": _verb(
        "report",
        "write one HTML page about runs, which needs no network",
        "RUN ...",
        {
            "--out FILE": "the page (default: in the folder of the run or study)",
            **_LOOKUP,
            "--proposal": "add a section for a proposal of compute time, and proposal.csv beside"
            " the page",
            "--num-runs N": "number of proposed runs (default 1)",
            "--num-steps N": "steps of a proposed run (default: the study once more)",
            "--gpus N": "GPUs of a proposed run (default: the most of the study)",
        },
    ),
    "export": _verb(
        "export",
        "write events for Perfetto or as a table, or the step times of several runs for Extra-P",
        "RUN ...",
        {
            "--format FORMAT": "perfetto, csv or extrap",
            "--out FILE": "default perfetto.json, events.csv or extrap.jsonl",
            **_LOOKUP,
        },
        ("perfetto", "csv", "extrap"),
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0, or 2 with one line on stderr for invalid input."""
    return framework.main("analysis", VERBS, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())

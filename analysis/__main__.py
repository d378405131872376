"""The command `gems-analysis VERB`: figures and pictures from trace files."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from gems.cli import framework
from gems.cli.framework import Verb

_OUT = ("--out",)
_PICTURE = "--out FILE (.png, .pdf or .svg)"


def _verb(
    name: str, about: str, options: Sequence[str] = (), flags: Sequence[str] = (), form: str = ""
) -> Verb:
    choices: dict[str, tuple[str, ...]] = dict.fromkeys(options, ())
    if form:
        choices["--format"] = tuple(form.split("|"))
    return Verb(f"analysis.cli.verbs:{name}", about, tuple(flags), choices, takes_words=True)


VERBS = {
    "timeline": _verb(
        "timeline",
        "draws one step, rank x time: timeline PATH [--step N: default the last whole one after"
        f" warm-up] [{_PICTURE}: default timeline.png beside the trace]; PATH is a run folder or"
        " trace file",
        ("--step", "--out"),
    ),
    "summary": _verb("summary", "prints the closing table of a run: summary PATH"),
    "collect": _verb(
        "collect", "merges a run's parts into trace.h5, draws it, prints the table: collect PATH"
    ),
    "draw": _verb(
        "draw",
        "draws a schedule's file, .json of `gems schedule --json` or torch's .csv, rank x time:"
        " draw SCHEDULE OUT, a .svg, .png or .pdf",
    ),
    "partition": _verb(
        "partition",
        f"draws an answer of `gems partition --json` with its layers: partition FILE [{_PICTURE}]",
        _OUT,
    ),
    "memory": _verb(
        "memory",
        f"draws an answer of `gems memory`, bytes over time by policy: memory FILE [{_PICTURE}]",
        _OUT,
    ),
    "placement": _verb(
        "placement",
        "draws an answer of `gems place --json`, operators on devices over time: placement FILE"
        f" [{_PICTURE}]",
        _OUT,
    ),
    "scaling": _verb(
        "scaling",
        "draws images/s and efficiency over ranks, and writes them as CSV: scaling RUN ... [--out"
        " FOLDER: default the one that holds the first run]; or fits published step times: scaling"
        " --table FILE, a CSV [--series NAME, or a part of the names] [--fit-to P: rows of up to P"
        " accelerators]",
        ("--out", "--table", "--series", "--fit-to"),
    ),
    "attribution": _verb(
        "attribution",
        "shows where the time of a step goes: attribution PATH [--ranks: a row for each rank too]"
        f" [{_PICTURE}: the waterfall, with a .csv beside it]",
        _OUT,
        ("--ranks",),
    ),
    "hybrid": _verb(
        "hybrid", f"draws an answer of `gems plan --hybrid --json`: hybrid FILE [{_PICTURE}]", _OUT
    ),
    "report": _verb(
        "report",
        "writes one HTML page about runs, which needs no network: report RUN ... [--runs-dir"
        " FOLDER: where names are looked up] [--out FILE: default in the folder of the run or"
        " study] [--proposal: with a section for a proposal of compute time, and proposal.csv"
        " beside the page, of --num-runs N (1) runs of --num-steps N (the study once more) on"
        " --gpus N (the most of the study)]",
        ("--out", "--runs-dir", "--num-steps", "--num-runs", "--gpus"),
        ("--proposal",),
    ),
    "export": _verb(
        "export",
        "writes events for Perfetto or a table, or the step times of several runs for Extra-P:"
        " export RUN ... --format perfetto|csv|extrap [--runs-dir FOLDER: where names are looked"
        " up] [--out FILE: default perfetto.json, events.csv or extrap.jsonl]",
        ("--out", "--runs-dir"),
        form="perfetto|csv|extrap",
    ),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0, or 2 with one line on stderr for invalid input."""
    return framework.main("analysis", VERBS, sys.argv[1:] if argv is None else argv)


if __name__ == "__main__":
    sys.exit(main())

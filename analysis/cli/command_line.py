"""The command line of `python -m analysis`: its verbs and what each takes."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import NoReturn

from gems.errors import ConfigError

PROGRAM = "python -m analysis"


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line as the toolkit's one line, not as usage and error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("arguments", self.prog, message, f"see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs; its errors are a ConfigError."""
    top = _Parser(prog=PROGRAM, description="Figures and pictures from trace files.")
    verbs = top.add_subparsers(dest="verb", required=True)
    timeline = verbs.add_parser("timeline", help="draw one step, rank x time, to a file")
    timeline.add_argument("--step", type=int, help="optimizer step; default the last whole one after warm-up")
    timeline.add_argument("--out", type=Path, help=".png, .pdf or .svg; default timeline.png beside the trace")
    summary = verbs.add_parser("summary", help="print the closing table of a run")
    scaling = verbs.add_parser("scaling", help="draw images/s and efficiency over ranks, and write them as CSV")
    scaling.add_argument("paths", type=Path, nargs="+", metavar="RUN", help="run folder or trace.h5")
    scaling.add_argument("--out", type=Path, help="folder to write to; default the one that holds the first run")
    scaling.add_argument(
        "--fit", default="all", metavar="LAW",
        help="law of scaling: amdahl, gustafson, usl, pmnf, all (the default; the best is drawn) or none",
    )  # fmt: skip
    scaling.add_argument("--json", action="store_true", help="one object on stdout")
    draw = verbs.add_parser("draw", help="draw a schedule's file, rank x time, to a picture")
    draw.add_argument(
        "schedule", type=Path, metavar="SCHEDULE", help=".json of `gems schedule --json`, or torch's .csv"
    )
    draw.add_argument("out", type=Path, metavar="OUT", help=".svg, .png or .pdf")
    draw.add_argument("--json", action="store_true", help="one object on stdout")
    partition = verbs.add_parser("partition", help="draw an answer of `gems partition --json` with its layers")
    partition.add_argument("partition", type=Path, metavar="PARTITION", help="the file that gems partition writes")
    partition.add_argument("--out", type=Path, default=Path("partition.png"), help=".png, .pdf or .svg")
    memory = verbs.add_parser("memory", help="draw an answer of `gems memory`: bytes over time by policy")
    memory.add_argument("memory", type=Path, metavar="MEMORY", help="the file that gems memory writes")
    memory.add_argument("--out", type=Path, default=Path("memory.png"), help=".png, .pdf or .svg")
    placement = verbs.add_parser(
        "placement", help="draw an answer of `gems place --json`: operators on devices over time"
    )
    placement.add_argument("placement", type=Path, metavar="PLACEMENT", help="the file that gems place writes")
    placement.add_argument("--out", type=Path, default=Path("placement.png"), help=".png, .pdf or .svg")
    collect = verbs.add_parser("collect", help="merge a run's parts into trace.h5, draw it, print the table")
    attribution = verbs.add_parser("attribution", help="say where the time of a step goes, and draw it")
    attribution.add_argument("--out", type=Path, help=".png, .pdf or .svg of the waterfall, with a .csv beside it")
    attribution.add_argument("--ranks", action="store_true", help="a row a rank too")
    vdnn = verbs.add_parser("vdnn", help="simulate the vDNN paper's studies, beside its figures")
    vdnn.add_argument("--json", action="store_true", help="one object on stdout")
    hybrid = verbs.add_parser(
        "hybrid", help="recompute the projections of Pal et al. from their inputs, or draw a plan"
    )
    hybrid.add_argument(
        "answer", type=Path, nargs="?", metavar="ANSWER", help="a file of `gems plan --hybrid --json`, to draw"
    )
    hybrid.add_argument("--json", action="store_true", help="one object on stdout")
    hybrid.add_argument("--out", type=Path, help="picture: .png, .pdf or .svg")
    report = verbs.add_parser("report", help="write one HTML page about runs, which needs no network")
    report.add_argument("runs", nargs="+", metavar="RUN", help="run folder, trace file, or name of a run or study")
    report.add_argument("--out", type=Path, help=".html; default report.html in the folder of the run or study")
    report.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where names are looked for")
    report.add_argument("--json", action="store_true", help="one object on stdout")
    export = verbs.add_parser("export", help="write events for Perfetto or a table, or step times for Extra-P")
    export.add_argument("runs", nargs="+", metavar="RUN", help="as for report; several for extrap alone")
    export.add_argument("--format", choices=("perfetto", "csv", "extrap"), required=True)
    export.add_argument("--out", type=Path, help="file to write; default perfetto.json, events.csv or extrap.jsonl")
    export.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where names are looked for")
    export.add_argument("--json", action="store_true", help="one object on stdout")
    for verb in (timeline, summary, collect, attribution):
        verb.add_argument("path", type=Path, metavar="PATH", help="run folder or trace file")
        verb.add_argument("--json", action="store_true", help="one object on stdout")
    return top

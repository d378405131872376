"""The command `python -m analysis VERB`: figures and pictures from trace files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from analysis.load import Loaded, load_trace
from gems.errors import ConfigError, GemsError, of_the_system, one_of

PROGRAM = "python -m analysis"


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line as the toolkit's one line, not as usage and error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("arguments", self.prog, message, f"see {self.prog} --help")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one verb and gives the exit code: 0, or 2 with one line on stderr for bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        first = arguments[0] if arguments else "none"
        if first not in (*VERBS, "-h", "--help"):
            raise ConfigError("command", first, one_of(VERBS), f"see {PROGRAM} --help")
        options = _parser().parse_args(arguments)
        VERBS[options.verb](options)
    except GemsError as error:
        print("analysis:", " ".join(str(error).split()), file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (OSError, RecursionError) as error:
        print("analysis:", of_the_system(error), file=sys.stderr)
        return ConfigError.exit_code
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog=PROGRAM, description="Figures and pictures from trace files.")
    verbs = parser.add_subparsers(dest="verb", required=True)
    timeline = verbs.add_parser("timeline", help="draw one step, rank x time, to a file")
    timeline.add_argument("--step", type=int, help="optimizer step; default the last whole one after warm-up")
    timeline.add_argument(
        "--out", type=Path, help=".png, .pdf or .svg; default timeline.png beside the trace"
    )
    summary = verbs.add_parser("summary", help="print the closing table of a run")
    scaling = verbs.add_parser(
        "scaling", help="draw images/s and efficiency over ranks, and write them as CSV"
    )
    scaling.add_argument("paths", type=Path, nargs="+", metavar="RUN", help="run folder or trace.h5")
    scaling.add_argument(
        "--out", type=Path, help="folder to write to; default the one that holds the first run"
    )
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
    partition = verbs.add_parser(
        "partition", help="draw an answer of `gems partition --json` with its layers"
    )
    partition.add_argument(
        "partition", type=Path, metavar="PARTITION", help="the file that gems partition writes"
    )
    partition.add_argument("--out", type=Path, default=Path("partition.png"), help=".png, .pdf or .svg")
    memory = verbs.add_parser("memory", help="draw an answer of `gems memory`: bytes over time by policy")
    memory.add_argument("memory", type=Path, metavar="MEMORY", help="the file that gems memory writes")
    memory.add_argument("--out", type=Path, default=Path("memory.png"), help=".png, .pdf or .svg")
    placement = verbs.add_parser(
        "placement", help="draw an answer of `gems place --json`: operators on devices over time"
    )
    placement.add_argument(
        "placement", type=Path, metavar="PLACEMENT", help="the file that gems place writes"
    )
    placement.add_argument("--out", type=Path, default=Path("placement.png"), help=".png, .pdf or .svg")
    collect = verbs.add_parser("collect", help="merge a run's parts into trace.h5, draw it, print the table")
    attribution = verbs.add_parser("attribution", help="say where the time of a step goes, and draw it")
    attribution.add_argument(
        "--out", type=Path, help=".png, .pdf or .svg of the waterfall, with a .csv beside it"
    )
    attribution.add_argument("--ranks", action="store_true", help="a row a rank too")
    vdnn = verbs.add_parser("vdnn", help="simulate the vDNN paper's studies, beside its figures")
    vdnn.add_argument("--json", action="store_true", help="one object on stdout")
    hybrid = verbs.add_parser(
        "hybrid", help="recompute the projections of Pal et al. from their inputs, or draw a plan"
    )
    hybrid.add_argument(
        "answer",
        type=Path,
        nargs="?",
        metavar="ANSWER",
        help="a file of `gems plan --hybrid --json`, to draw",
    )
    hybrid.add_argument("--json", action="store_true", help="one object on stdout")
    hybrid.add_argument("--out", type=Path, help="picture: .png, .pdf or .svg")
    report = verbs.add_parser("report", help="write one HTML page about runs, which needs no network")
    report.add_argument(
        "runs", nargs="+", metavar="RUN", help="run folder, trace file, or name of a run or study"
    )
    report.add_argument(
        "--out", type=Path, help=".html; default report.html in the folder of the run or study"
    )
    report.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where names are looked for")
    report.add_argument("--json", action="store_true", help="one object on stdout")
    export = verbs.add_parser(
        "export", help="write events for Perfetto or a table, or step times for Extra-P"
    )
    export.add_argument("runs", nargs="+", metavar="RUN", help="as for report; several for extrap alone")
    export.add_argument("--format", choices=("perfetto", "csv", "extrap"), required=True)
    export.add_argument(
        "--out", type=Path, help="file to write; default perfetto.json, events.csv or extrap.jsonl"
    )
    export.add_argument("--runs-dir", type=Path, default=Path("runs"), help="where names are looked for")
    export.add_argument("--json", action="store_true", help="one object on stdout")
    for verb in (timeline, summary, collect, attribution):
        verb.add_argument("path", type=Path, metavar="PATH", help="run folder or trace file")
        verb.add_argument("--json", action="store_true", help="one object on stdout")
    return parser


def _load(path: Path) -> Loaded:
    loaded = load_trace(path)
    for note in loaded.notes:
        print("analysis:", note, file=sys.stderr)
    return loaded


def _timeline(options: argparse.Namespace) -> None:
    from analysis.step_window import step_window
    from analysis.timeline import draw_timeline

    loaded = _load(options.path)
    out = options.out or _default_out(options.path)
    window = step_window(loaded.trace, options.step)
    draw_timeline(loaded.trace, out, window.step)
    answer = {
        "timeline": str(out),
        "source": loaded.trace.source,
        "step": window.step,
        "is_whole": window.is_whole,
        "span_s": window.span_s,
        "bubble": window.bubble,
    }
    print(json.dumps(answer) if options.json else out)


def _default_out(path: Path) -> Path:
    """Names the picture of a run folder or its trace.h5 timeline.png, another trace's after that file."""
    if path.is_dir():
        return path / "timeline.png"
    return path.with_name("timeline.png" if path.name == "trace.h5" else f"{path.stem}-timeline.png")


def _summary(options: argparse.Namespace) -> None:
    from analysis.metrics import metrics_of
    from analysis.tables import summary_dict, summary_table

    loaded = _load(options.path)
    metrics = metrics_of(loaded.trace)
    paths = [str(path) for path in loaded.paths]
    if options.json:
        answer = {**summary_dict(metrics, loaded.trace), "paths": paths, "notes": list(loaded.notes)}
        print(json.dumps(answer, allow_nan=False))
        return
    shown = paths[0] if len(paths) == 1 else f"{len(paths)} parts in {loaded.paths[0].parent}"
    print(summary_table(metrics, loaded.trace, {"trace": shown}))


def _collect(options: argparse.Namespace) -> None:
    from analysis.collect import collect
    from analysis.tables import summary_dict, summary_table

    collected = collect(options.path)
    loaded = collected.loaded
    for note in loaded.notes[1:]:
        print("analysis:", note, file=sys.stderr)
    if options.json:
        answer = {
            **summary_dict(collected.metrics, loaded.trace),
            **collected.files,
            "notes": list(loaded.notes),
        }
        print(json.dumps(answer, allow_nan=False))
        return
    print(summary_table(collected.metrics, loaded.trace, collected.files))


def _attribution(options: argparse.Namespace) -> None:
    from analysis.attribution import attribution_of
    from analysis.attribution.table import attribution_dict, attribution_table
    from analysis.waterfall import draw_waterfall

    found = attribution_of(_load(options.path).trace)
    files = [] if options.out is None else [str(options.out), str(draw_waterfall(found, options.out))]
    if options.json:
        print(json.dumps({**attribution_dict(found), "files": files}, allow_nan=False))
        return
    print(attribution_table(found, options.ranks))
    if files:
        print(*files, sep="\n")


def _scaling(options: argparse.Namespace) -> None:
    from analysis.scaling import study_answer, study_report, write_study

    study = write_study(options.paths, options.out or options.paths[0].resolve().parent, options.fit)
    if options.json:
        print(json.dumps(study_answer(study), allow_nan=False))
        return
    print(study_report(study))
    print(*study.pictures, *study.tables, sep="\n")


def _draw(options: argparse.Namespace) -> None:
    from analysis.draw import draw_schedule

    played = draw_schedule(options.schedule, options.out)
    answer = {
        "drawing": str(options.out),
        "span_units": played.span,
        "efficiency": played.efficiency,
        "peak_units": list(played.peak),
    }
    print(json.dumps(answer) if options.json else options.out)


def _partition(options: argparse.Namespace) -> None:
    from analysis.partition_picture import draw_partition

    draw_partition(options.partition, options.out)
    print(options.out)


def _memory(options: argparse.Namespace) -> None:
    from analysis.memory_picture import draw_memory_plans

    draw_memory_plans(options.memory, options.out)
    print(options.out)


def _report(options: argparse.Namespace) -> None:
    from analysis.report import build_report
    from analysis.report.find import default_out, find_runs

    runs = find_runs(options.runs, options.runs_dir)
    made = build_report(runs, options.out or default_out(options.runs, runs, options.runs_dir))
    for note in made.notes:
        print("analysis:", note, file=sys.stderr)
    print(json.dumps(made.to_json(), allow_nan=False) if options.json else made.path)


def _export(options: argparse.Namespace) -> None:
    from analysis.export import export_runs
    from analysis.report.find import find_runs

    made = export_runs(find_runs(options.runs, options.runs_dir), options.format, options.out)
    print(json.dumps(made.to_json(), allow_nan=False) if options.json else made.path)


def _placement(options: argparse.Namespace) -> None:
    from analysis.placement_picture import draw_placement

    draw_placement(options.placement, options.out)
    print(options.out)


def _vdnn(options: argparse.Namespace) -> None:
    from analysis.vdnn import answer, rows_of, studies, table

    made, machine = studies()
    rows = rows_of(made, machine)
    print(json.dumps(answer(rows, made, machine), allow_nan=False) if options.json else table(rows))


def _hybrid(options: argparse.Namespace) -> None:
    from analysis.hybrid import answer, projections, table
    from analysis.hybrid_picture import draw_answer, draw_projections

    if options.answer is not None:
        out = options.out or options.answer.with_suffix(".png")
        draw_answer(options.answer, out)
        print(json.dumps({"picture": str(out)}) if options.json else out)
        return
    found = projections()
    made = {} if options.out is None else {"picture": str(options.out)}
    if options.out is not None:
        draw_projections(found, options.out)
    if options.json:
        print(json.dumps(answer(found) | made, allow_nan=False))
        return
    print(table(found), *made.values(), sep="\n")


VERBS: dict[str, Callable[[argparse.Namespace], None]] = {
    "timeline": _timeline,
    "summary": _summary,
    "collect": _collect,
    "draw": _draw,
    "partition": _partition,
    "memory": _memory,
    "placement": _placement,
    "scaling": _scaling,
    "attribution": _attribution,
    "vdnn": _vdnn,
    "hybrid": _hybrid,
    "report": _report,
    "export": _export,
}

if __name__ == "__main__":
    sys.exit(main())

"""The verbs of `gems-analysis`: what each takes, and the functions that it puts together.

Modules are imported by the verb that needs them, so that a verb without pictures does not load
matplotlib.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from analysis.io.load import Loaded, load_trace
from gems.errors import ConfigError

PROGRAM = "gems-analysis"
Options = argparse.Namespace
PICTURE_HELP = ".png, .pdf or .svg"
# Verbs that draw an answer of `gems ... --json`: the figure in `analysis.plots.answers`, the
# command, the help.
DRAWN_ANSWERS = {
    "partition": (
        "partition_figure",
        "gems partition",
        "draw an answer of `gems partition --json` with its layers",
    ),
    "memory": (
        "memory_plans_figure",
        "gems memory",
        "draw an answer of `gems memory`: bytes over time by policy",
    ),
    "hybrid": (
        "hybrid_figure",
        "gems plan --hybrid",
        "draw an answer of `gems plan --hybrid --json`",
    ),
    "placement": (
        "placement_figure",
        "gems place",
        "draw an answer of `gems place --json`: operators on devices over time",
    ),
}


class _Parser(argparse.ArgumentParser):
    """Reports a bad command line as the toolkit's one line, not as usage and error."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError("arguments", self.prog, message, f"see {self.prog} --help")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all verbs; its errors are a ConfigError."""
    top = _Parser(prog=PROGRAM, description="Figures and pictures from trace files.")
    verbs = top.add_subparsers(dest="verb", required=True)

    def verb(
        name: str, about: str, out: str = "", *, default: Path | None = None
    ) -> argparse.ArgumentParser:
        made = verbs.add_parser(name, help=about)
        if name not in DRAWN_ANSWERS:
            made.add_argument("--json", action="store_true", help="one object on stdout")
        if out:
            made.add_argument("--out", type=Path, default=default, help=out)
        return made

    about_out = f"{PICTURE_HELP}; default timeline.png beside the trace"
    timeline = verb("timeline", "draw one step, rank x time, to a file", about_out)
    timeline.add_argument(
        "--step", type=int, help="optimizer step; default the last whole one after warm-up"
    )
    summary = verb("summary", "print the closing table of a run")
    about_out = "folder to write to; default the one that holds the first run"
    scaling = verb(
        "scaling", "draw images/s and efficiency over ranks, and write them as CSV", about_out
    )
    scaling.add_argument(
        "paths", type=Path, nargs="*", metavar="RUN", help="run folder or trace.h5"
    )
    about_table = "CSV of published step times: fit them in place of runs"
    scaling.add_argument("--table", type=Path, metavar="FILE", help=about_table)
    scaling.add_argument(
        "--series",
        metavar="NAME",
        help="series of the table, or a part of their names; default all",
    )
    scaling.add_argument(
        "--fit-to", type=int, metavar="P", help="fit rows of up to P accelerators; default all"
    )
    draw = verb("draw", "draw a schedule's file, rank x time, to a picture")
    about_file = ".json of `gems schedule --json`, or torch's .csv"
    draw.add_argument("schedule", type=Path, metavar="SCHEDULE", help=about_file)
    draw.add_argument("out", type=Path, metavar="OUT", help=".svg, .png or .pdf")
    for name, (_, command, about) in DRAWN_ANSWERS.items():
        drawn = verb(name, about, PICTURE_HELP, default=Path(f"{name}.png"))
        drawn.add_argument(
            "answer", type=Path, metavar=name.upper(), help=f"the file that {command} writes"
        )
    collect = verb("collect", "merge a run's parts into trace.h5, draw it, print the table")
    about_out = f"{PICTURE_HELP} of the waterfall, with a .csv beside it"
    attribution = verb("attribution", "show where the time of a step goes, and draw it", about_out)
    attribution.add_argument("--ranks", action="store_true", help="a row for each rank too")
    about_out = ".html; default in the folder of the run or study"
    report = verb("report", "write one HTML page about runs, which needs no network", about_out)
    report.add_argument(
        "--proposal",
        action="store_true",
        help="with a section for a proposal of compute time, and proposal.csv beside the page",
    )
    for name, about in (
        (
            "--num-steps",
            "steps of a run that the proposal asks time for; default: the study once more",
        ),
        ("--num-runs", "how many such runs; default 1"),
        ("--gpus", "GPUs of such a run, as many as a run of the study has; default the most"),
    ):
        report.add_argument(name, type=int, metavar="N", help=f"with --proposal: {about}")
    about_out = "file to write; default perfetto.json, events.csv or extrap.jsonl"
    export = verb(
        "export", "write events for Perfetto or a table, or step times for Extra-P", about_out
    )
    export.add_argument("--format", choices=("perfetto", "csv", "extrap"), required=True)
    runs_help = {
        report: "run folder, trace file, or name of a run or study",
        export: "as for report; several for extrap alone",
    }
    for made, about in runs_help.items():
        made.add_argument("runs", nargs="+", metavar="RUN", help=about)
        made.add_argument(
            "--runs-dir",
            type=Path,
            default=Path("runs"),
            help="folder in which names are looked up",
        )
    for made in (timeline, summary, collect, attribution):
        made.add_argument("path", type=Path, metavar="PATH", help="run folder or trace file")
    return top


def _print(options: Options, answer: dict[str, Any] | list[dict[str, Any]], *lines: object) -> None:
    """Print the answer as JSON if asked for, or else the lines.

    A function is called for its line only then.
    """
    if options.json:
        print(json.dumps(answer, allow_nan=False, default=os.fspath))
    else:
        print(*(line() if callable(line) else line for line in lines), sep="\n")


def _print_notes(notes: Iterable[str]) -> None:
    for note in notes:
        print("analysis:", note, file=sys.stderr)


def _load(path: Path) -> Loaded:
    loaded = load_trace(path)
    _print_notes(loaded.notes)
    return loaded


def _timeline(options: Options) -> None:
    from analysis.metrics.events import step_window
    from analysis.plots.figure import save_figure
    from analysis.plots.timeline import timeline_figure

    path = options.path
    trace = _load(options.path).trace
    # of a run folder or its trace.h5 timeline.png, of another trace named after that file
    name = (
        "timeline.png" if path.is_dir() or path.name == "trace.h5" else f"{path.stem}-timeline.png"
    )
    out = options.out or (path / name if path.is_dir() else path.with_name(name))
    window = step_window(trace, options.step)
    save_figure(timeline_figure(trace, window.step), out)
    answer = {
        "timeline": out,
        "source": trace.source,
        "step": window.step,
        "is_whole": window.is_whole,
        "span_s": window.span_s,
        "bubble": window.bubble,
    }
    _print(options, answer, out)


def _summary(options: Options) -> None:
    from analysis.cli.summary import summary_dict, summary_table
    from analysis.metrics.run_metrics import run_metrics

    loaded = _load(options.path)
    metrics = run_metrics(loaded.trace)
    paths = loaded.paths
    answer = {**summary_dict(metrics, loaded.trace), "paths": paths, "notes": loaded.notes}
    shown = paths[0] if len(paths) == 1 else f"{len(paths)} parts in {paths[0].parent}"
    _print(options, answer, lambda: summary_table(metrics, loaded.trace, {"trace": str(shown)}))


def _collect(options: Options) -> None:
    from analysis.cli.collect import collect
    from analysis.cli.summary import summary_dict, summary_table

    loaded, metrics, files = collect(options.path)
    _print_notes(loaded.notes[1:])
    answer = {**summary_dict(metrics, loaded.trace), **files, "notes": loaded.notes}
    _print(options, answer, lambda: summary_table(metrics, loaded.trace, files))


def _attribution(options: Options) -> None:
    from analysis.attribution.causes import (
        attribute,
        attribution_dict,
        attribution_rows,
        attribution_table,
    )
    from analysis.io.files import write_csv
    from analysis.plots.figure import save_figure
    from analysis.plots.waterfall import waterfall_figure

    found = attribute(_load(options.path).trace)
    files = []
    if options.out is not None:
        save_figure(waterfall_figure(found), options.out)
        files = [options.out, write_csv(attribution_rows(found), options.out.with_suffix(".csv"))]
    _print(
        options,
        {**attribution_dict(found), "files": files},
        attribution_table(found, options.ranks),
        *files,
    )


def _scaling(options: Options) -> None:
    if options.table is not None:
        _published(options)
        return
    if not options.paths:
        raise ConfigError("RUN", "none", "takes runs, or --table", f"see {PROGRAM} scaling --help")
    from analysis.cli.scaling import study_answer, study_report, write_study

    study = write_study(options.paths, options.out or options.paths[0].resolve().parent)
    _print(options, study_answer(study), study_report(study), *study.pictures, *study.tables)


def _published(options: Options) -> None:
    from analysis.scaling.published import (
        choose_series,
        forecast_series,
        published_report,
        read_table,
    )

    if options.paths:
        raise ConfigError(
            "--table", options.table, "is fitted in place of runs", "leave the runs out"
        )
    series = choose_series(read_table(options.table), options.series)
    answers = forecast_series(series, options.fit_to)
    left_out = sorted(series.keys() - {answer["series"] for answer in answers})
    _print_notes(
        f"left out: {name} has no row of {options.fit_to} accelerators or fewer"
        for name in left_out
    )
    _print(options, answers, lambda: published_report(answers))


def _draw(options: Options) -> None:
    from analysis.plots.schedule import draw_schedule

    simulated = draw_schedule(options.schedule, options.out)
    answer = {
        "drawing": options.out,
        "span_units": simulated.span,
        "efficiency": simulated.efficiency,
        "peak_units": simulated.peak,
    }
    _print(options, answer, options.out)


def _draw_answer(options: Options) -> None:
    from analysis.plots import answers
    from analysis.plots.figure import draw_answer_file

    figure, command, _ = DRAWN_ANSWERS[options.verb]
    draw_answer_file(options.answer, options.out, options.verb, command, getattr(answers, figure))
    print(options.out)


def _report(options: Options) -> None:
    from analysis.io.files import write_csv
    from analysis.io.load import default_out, find_runs
    from analysis.report.build import build_report
    from analysis.scaling.proposal import Ask, propose

    runs = find_runs(options.runs, options.runs_dir)
    out = options.out or default_out(options.runs, runs, options.runs_dir)
    names = ("num_runs", "num_steps", "gpus")
    given = {name: getattr(options, name) for name in names}
    proposal, files = None, {}
    if options.proposal:
        proposal = propose(runs, Ask(**given))
    for name, value in given.items():
        if value is not None and proposal is None:
            key = name.replace("_", "-")
            raise ConfigError(key, value, "is of a proposal alone", "--proposal")
    made = build_report(runs, out, proposal)
    answer = asdict(made)
    if proposal is not None:
        files["csv"] = write_csv(proposal.rows, out.with_name("proposal.csv"))
        answer |= {"gpu_hours": asdict(proposal.gpu_hours), "points": proposal.rows}
        answer |= {name: getattr(proposal, name) for name in ("request", "missing", "method")}
    _print_notes([*made.notes, *answer.get("missing", ())])
    lines = [] if proposal is None else [proposal.request]
    _print(options, answer | files, *lines, made.path, *files.values())


def _export(options: Options) -> None:
    from analysis.export.formats import export_runs
    from analysis.io.load import find_runs

    made = export_runs(find_runs(options.runs, options.runs_dir), options.format, options.out)
    _print(options, asdict(made), made.path)


VERBS: dict[str, Callable[[Options], None]] = {
    "timeline": _timeline,
    "summary": _summary,
    "collect": _collect,
    "draw": _draw,
    **dict.fromkeys(DRAWN_ANSWERS, _draw_answer),
    "scaling": _scaling,
    "attribution": _attribution,
    "report": _report,
    "export": _export,
}

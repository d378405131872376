"""The command `python -m analysis VERB`: figures and pictures from trace files."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from analysis.cli.command_line import PROGRAM, parser
from analysis.io.load import Loaded, load_trace
from gems.errors import ConfigError, GemsError, of_the_system, one_of


def main(argv: Sequence[str] | None = None) -> int:
    """Run one verb and gives the exit code: 0, or 2 with one line on stderr for bad input."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        first = arguments[0] if arguments else "none"
        if first not in (*VERBS, "-h", "--help"):
            raise ConfigError("command", first, one_of(VERBS), f"see {PROGRAM} --help")
        options = parser().parse_args(arguments)
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


def _load(path: Path) -> Loaded:
    loaded = load_trace(path)
    for note in loaded.notes:
        print("analysis:", note, file=sys.stderr)
    return loaded


def _timeline(options: argparse.Namespace) -> None:
    from analysis.metrics.step_window import step_window
    from analysis.plots.timeline import draw_timeline

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
    """Name the picture of a run folder or its trace.h5 timeline.png, another trace's after that file."""
    if path.is_dir():
        return path / "timeline.png"
    return path.with_name("timeline.png" if path.name == "trace.h5" else f"{path.stem}-timeline.png")


def _summary(options: argparse.Namespace) -> None:
    from analysis.cli.summary import summary_dict, summary_table
    from analysis.metrics.run_metrics import metrics_of

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
    from analysis.cli.collect import collect
    from analysis.cli.summary import summary_dict, summary_table

    collected = collect(options.path)
    loaded = collected.loaded
    for note in loaded.notes[1:]:
        print("analysis:", note, file=sys.stderr)
    if options.json:
        answer = {**summary_dict(collected.metrics, loaded.trace), **collected.files, "notes": list(loaded.notes)}
        print(json.dumps(answer, allow_nan=False))
        return
    print(summary_table(collected.metrics, loaded.trace, collected.files))


def _attribution(options: argparse.Namespace) -> None:
    from analysis.attribution import attribution_of
    from analysis.attribution.table import attribution_dict, attribution_table
    from analysis.plots.waterfall import draw_waterfall

    found = attribution_of(_load(options.path).trace)
    files = [] if options.out is None else [str(options.out), str(draw_waterfall(found, options.out))]
    if options.json:
        print(json.dumps({**attribution_dict(found), "files": files}, allow_nan=False))
        return
    print(attribution_table(found, options.ranks))
    if files:
        print(*files, sep="\n")


def _scaling(options: argparse.Namespace) -> None:
    from analysis.scaling.study import study_answer, study_report, write_study

    study = write_study(options.paths, options.out or options.paths[0].resolve().parent, options.fit)
    if options.json:
        print(json.dumps(study_answer(study), allow_nan=False))
        return
    print(study_report(study))
    print(*study.pictures, *study.tables, sep="\n")


def _draw(options: argparse.Namespace) -> None:
    from analysis.plots.schedule import draw_schedule

    played = draw_schedule(options.schedule, options.out)
    answer = {
        "drawing": str(options.out),
        "span_units": played.span,
        "efficiency": played.efficiency,
        "peak_units": list(played.peak),
    }
    print(json.dumps(answer) if options.json else options.out)


def _partition(options: argparse.Namespace) -> None:
    from analysis.plots.partition import draw_partition

    draw_partition(options.partition, options.out)
    print(options.out)


def _memory(options: argparse.Namespace) -> None:
    from analysis.plots.memory_plans import draw_memory_plans

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
    from analysis.plots.placement import draw_placement

    draw_placement(options.placement, options.out)
    print(options.out)


def _vdnn(options: argparse.Namespace) -> None:
    from analysis.papers.vdnn import answer, rows_of, studies, table

    made, machine = studies()
    rows = rows_of(made, machine)
    print(json.dumps(answer(rows, made, machine), allow_nan=False) if options.json else table(rows))


def _hybrid(options: argparse.Namespace) -> None:
    from analysis.papers.hybrid import answer, projections, table
    from analysis.plots.hybrid import draw_answer, draw_projections

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

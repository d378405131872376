"""The verbs of `gems-analysis`.

Each verb imports the modules that it needs, so that one without pictures does not load matplotlib.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from analysis.io.load import Loaded, load_trace
from gems.cli.framework import Options
from gems.errors import ConfigError, one_of

Words = Sequence[str]
# Verbs that draw an answer of `gems ... --json`: the figure in `analysis.plots.answers`, and the
# command.
DRAWN_ANSWERS = {
    "partition": ("partition_figure", "gems partition"),
    "memory": ("memory_plans_figure", "gems memory"),
    "hybrid": ("hybrid_figure", "gems plan --hybrid"),
    "placement": ("placement_figure", "gems place"),
}
FORMATS = ("perfetto", "csv", "extrap")
RUNS_DIR = Path("runs")
PROPOSAL = ("--num-runs", "--num-steps", "--gpus")  # as `Ask` takes them


def _paths(words: Words, name: str, least: int = 1, most: float = 1) -> list[Path]:
    """Return the paths that a command line names beside its options."""
    if not least <= len(words) <= most:
        wanted = str(least) if least == most else f"{least} or more"
        raise ConfigError(name, " ".join(words) or "none", f"takes {wanted} words", "see --help")
    return [Path(word) for word in words]


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


def timeline(words: Words, options: Options) -> None:
    """Draw one step of a trace."""
    from analysis.metrics.events import step_window
    from analysis.plots.figure import save_figure
    from analysis.plots.timeline import timeline_figure

    (path,) = _paths(words, "PATH")
    trace = _load(path).trace
    # of a run folder or its trace.h5 timeline.png, of another trace named after that file
    name = (
        "timeline.png" if path.is_dir() or path.name == "trace.h5" else f"{path.stem}-timeline.png"
    )
    out = options.path("--out") or (path / name if path.is_dir() else path.with_name(name))
    window = step_window(trace, options.whole("--step", None, least=0))
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


def summary(words: Words, options: Options) -> None:
    """Print the closing table of a run."""
    from analysis.cli.summary import summary_dict, summary_table
    from analysis.metrics.run_metrics import run_metrics

    loaded = _load(*_paths(words, "PATH"))
    metrics = run_metrics(loaded.trace)
    paths = loaded.paths
    answer = {**summary_dict(metrics, loaded.trace), "paths": paths, "notes": loaded.notes}
    shown = paths[0] if len(paths) == 1 else f"{len(paths)} parts in {paths[0].parent}"
    _print(options, answer, lambda: summary_table(metrics, loaded.trace, {"trace": str(shown)}))


def collect(words: Words, options: Options) -> None:
    """Merge a run's parts, draw it and print its table."""
    from analysis.cli.collect import collect as collected
    from analysis.cli.summary import summary_dict, summary_table

    loaded, metrics, files = collected(*_paths(words, "PATH"))
    _print_notes(loaded.notes[1:])
    answer = {**summary_dict(metrics, loaded.trace), **files, "notes": loaded.notes}
    _print(options, answer, lambda: summary_table(metrics, loaded.trace, files))


def attribution(words: Words, options: Options) -> None:
    """Show where the time of a step goes."""
    from analysis.attribution.causes import (
        attribute,
        attribution_dict,
        attribution_rows,
        attribution_table,
    )
    from analysis.io.files import write_csv
    from analysis.plots.figure import save_figure
    from analysis.plots.waterfall import waterfall_figure

    shares = attribute(_load(*_paths(words, "PATH")).trace)
    files = []
    if (out := options.path("--out")) is not None:
        save_figure(waterfall_figure(shares), out)
        files = [out, write_csv(attribution_rows(shares), out.with_suffix(".csv"))]
    _print(
        options,
        {**attribution_dict(shares), "files": files},
        attribution_table(shares, "--ranks" in options.flags),
        *files,
    )


def scaling(words: Words, options: Options) -> None:
    """Draw a study's scaling, or fit a published table."""
    if (table := options.path("--table")) is not None:
        _published(table, words, options)
        return
    from analysis.cli.scaling import study_answer, study_report, write_study

    paths = _paths(words, "RUN", 1, math.inf)
    study = write_study(paths, options.path("--out") or paths[0].resolve().parent)
    _print(options, study_answer(study), study_report(study), *study.pictures, *study.tables)


def _published(table: Path, words: Words, options: Options) -> None:
    from analysis.scaling.published import (
        choose_series,
        forecast_series,
        published_report,
        read_table,
    )

    if words:
        raise ConfigError("--table", table, "is fitted in place of runs", "leave the runs out")
    fit_to = options.whole("--fit-to", None)
    series = choose_series(read_table(table), options.chosen.get("--series"))
    answers = forecast_series(series, fit_to)
    left_out = sorted(series.keys() - {answer["series"] for answer in answers})
    _print_notes(
        f"left out: {name} has no row of {fit_to} accelerators or fewer" for name in left_out
    )
    _print(options, answers, lambda: published_report(answers))


def outside(words: Words, options: Options) -> None:
    """Predict the rows of a table of published pipelines."""
    from analysis.outside.predict import outside_report, predict_table

    if words:
        raise ConfigError("outside", " ".join(words), "takes no words", "see --help")
    table = options.path("--table")
    row = options.chosen.get("--calibrate")
    for name, value in (("--table", table), ("--calibrate", row)):
        if value is None:
            raise ConfigError(name, "none", "must be given", "see --help")
    assert table is not None and row is not None
    answer = predict_table(table, row)
    _print(options, answer, lambda: outside_report(answer))


def draw(words: Words, options: Options) -> None:
    """Draw a schedule's file."""
    from analysis.plots.schedule import draw_schedule

    schedule, out = _paths(words, "SCHEDULE OUT", 2, 2)
    simulated = draw_schedule(schedule, out)
    answer = {
        "drawing": out,
        "span_units": simulated.span,
        "efficiency": simulated.efficiency,
        "peak_units": simulated.peak,
    }
    _print(options, answer, out)


def draw_answer(verb: str, words: Words, options: Options) -> None:
    """Draw the file that a command of `gems` writes."""
    from analysis.plots import answers
    from analysis.plots.figure import draw_answer_file

    figure, command = DRAWN_ANSWERS[verb]
    (path,) = _paths(words, verb.upper())
    out = options.path("--out") or Path(f"{verb}.png")
    draw_answer_file(path, out, verb, command, getattr(answers, figure))
    print(out)


partition = partial(draw_answer, "partition")
memory = partial(draw_answer, "memory")
hybrid = partial(draw_answer, "hybrid")
placement = partial(draw_answer, "placement")


def report(words: Words, options: Options) -> None:
    """Write a page about runs."""
    from analysis.io.files import write_csv
    from analysis.io.load import default_out, find_runs
    from analysis.report.build import build_report
    from analysis.scaling.proposal import Ask, propose

    _paths(words, "RUN", 1, math.inf)
    runs_dir = options.path("--runs-dir") or RUNS_DIR
    runs = find_runs(words, runs_dir)
    out = options.path("--out") or default_out(words, runs, runs_dir)
    proposal, files = None, {}
    if "--proposal" in options.flags:
        proposal = propose(runs, Ask(*(options.whole(name, None) for name in PROPOSAL)))
    for name in PROPOSAL:
        if name in options.chosen and proposal is None:
            raise ConfigError(name, options.chosen[name], "is of a proposal alone", "--proposal")
    page = build_report(runs, out, proposal)
    answer = asdict(page)
    if proposal is not None:
        files["csv"] = write_csv(proposal.rows, out.with_name("proposal.csv"))
        answer |= {"gpu_hours": asdict(proposal.gpu_hours), "points": proposal.rows}
        answer |= {name: getattr(proposal, name) for name in ("request", "missing", "method")}
    _print_notes([*page.notes, *answer.get("missing", ())])
    lines = [] if proposal is None else [proposal.request]
    _print(options, answer | files, *lines, page.path, *files.values())


def export(words: Words, options: Options) -> None:
    """Write a run's events, or the step times of several."""
    from analysis.export.formats import export_runs
    from analysis.io.load import find_runs

    _paths(words, "RUN", 1, math.inf)
    runs = find_runs(words, options.path("--runs-dir") or RUNS_DIR)
    if (form := options.chosen.get("--format")) is None:
        raise ConfigError("--format", "none", one_of(FORMATS))
    exported = export_runs(runs, form, options.path("--out"))
    _print(options, asdict(exported), exported.path)

"""`gems plan`: the fastest configurations of a run on so many GPUs, and why each loses to the first."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gems import __version__
from gems.cli.framework import Options, print_json, whole_number
from gems.config.compose import compose
from gems.config.experiment_file import check_experiment, experiment_text, write_experiment
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.profile.subject import Subject
from gems.search.best_first import SearchResult
from gems.search.choice import Choice, reasons
from gems.search.evaluate import Epochs, Planner
from gems.search.fastest import BUDGET_S, NUM_BEST, fastest
from gems.search.in_strips import in_strips
from gems.simulation.calibration import confidence_of
from gems.utils.tables import table
from gems.utils.units import GIB, format_size

HYBRID = "--hybrid"
STRIPS = "--strips"
COLUMNS = {
    "": "d",
    "step [s]": ".4g",
    "images/s": ".4g",
    "peak [GiB]": ".2f",
    "eff. [%]": ".1f",
    "ranks x copies": "",
    "micro-batches": "",
    "schedule": "",
    "memory": "",
    "loses to the first by": "",
}


def show_plan(spec: RunSpec, options: Options) -> int:
    """Print the best configurations on parallel.gpus GPUs (by default those of the run), best first.

    --global-batch sets the images of a step (by default the run's own); several values, with
    --epochs FILE, are compared by the time to the target. --top limits the printed rows and
    --budget the seconds of the search. --write FILE writes the first one as an experiment. --strips
    also tries the best ones in strips, for two minutes at most. --hybrid compares data with model
    parallelism instead.

    Raises:
        ConfigError: An option that cannot be, a batch that does not divide, or a profile that
        cannot be had. DoesNotFitError: no configuration fits; the line says what would.
    """
    if not spec.parallel.num_strips:
        raise ConfigError(
            "parallel.strips", 0, "is for one pipeline", f"gems plan {STRIPS} tries strips for many"
        )
    if HYBRID in options.flags:
        shown: Callable[[RunSpec, Options], int] = importlib.import_module(
            "gems.cli.plan_hybrid"
        ).show_hybrid
        return shown(spec, options)
    chosen = options.chosen
    num_best = options.whole("--top", NUM_BEST)
    budget_s = _seconds("--budget", chosen.get("--budget", str(BUDGET_S)))
    epochs: Epochs | None = None
    if "--epochs" in chosen:
        read_epochs = importlib.import_module("gems.search.hybrid.inputs").read_epochs
        epochs = read_epochs(Path(chosen["--epochs"])).law.epochs
    batches = [spec.parallel.global_batch]
    if "--global-batch" in chosen:
        batches = _batches(chosen["--global-batch"], has_epochs=epochs is not None)
    path = Path(chosen["--write"]) if "--write" in chosen else None
    if path is not None:
        check_experiment(path)
    planner = Planner(spec, spec.memory.limit_bytes or spec.machine.device_bytes, epochs)
    answer, plans = fastest(
        planner, batches, num_best, budget_s, in_strips if STRIPS in options.flags else None
    )
    confidence = confidence_of(Subject.of(spec))
    answer["is_calibrated"] = confidence.is_calibrated
    answer["step_range_s"] = confidence.range_s(plans.best[0].step_s)
    if path is not None:
        answer["experiment"] = str(path)
        _write(path, planner, plans.best[0], answer["gpus"])
    if options.json:
        print_json(answer)
        return 0
    print(_table(answer, plans, spec.machine.noise > 0))
    print(f"step times are {confidence.words}")
    if path is not None:
        print(
            f"written: {path}"
            + (f" (make submit CONF={path.stem})" if path.parent.name == "experiment" else "")
        )
    return 0


def _table(answer: dict[str, Any], found: SearchResult[Choice], has_noise: bool) -> str:
    first = found.best[0]
    device_bytes = answer["device_bytes"]
    device = (
        ", memory unlimited" if device_bytes is None else f", {device_bytes / GIB:.1f} GiB each"
    )
    head = (
        f"{answer['model']} {format_size(answer, ' x ')} px on {answer['gpus']}"
        f" GPUs ({answer['machine']}{device}), {first.candidate.global_batch} images a step:"
        " simulated, a prediction"
    )
    rows = [
        (
            place,
            choice.step_s,
            choice.images_per_s,
            max(choice.peak_bytes) / GIB,
            100 * choice.efficiency,
            f"{one.partitions} x {one.replicas}",
            f"{one.micro_batches} of {one.micro_batch_size}",
            one.label,
            one.policy,
            ", ".join(reasons(first, choice)),
        )
        for place, choice in enumerate(found.best, 1)
        for one in (choice.candidate,)
    ]
    quiet = " without noise" if has_noise else ""
    exact = (
        f"no other can be better as modelled{quiet}"
        if found.is_exact
        else (
            f"ended by its budget with {found.num_left} not looked at: they may be better"
            " (--budget)"
        )
    )
    counts = (
        f"{found.num_candidates} configurations: {found.num_simulated} simulated, "
        f"{found.num_too_large} too large when cut, {found.num_pruned_bytes} left out by bytes, "
        f"{found.num_pruned_time} by time, {found.num_impossible} impossible or pointless; "
        f"{exact}; {answer['search_s']:.1f} s"
    )
    lines = [table(COLUMNS, rows, title=head), counts]
    if first.epochs is not None:
        hours = f"{first.score_s / 3600:.4g} h"
        lines.insert(
            1, f"ranked by the time to the target: {hours}, {first.epochs:g} epochs, for the first"
        )
    return "\n".join(lines)


def _write(path: Path, planner: Planner, first: Choice, num_gpus: int) -> None:
    one = first.candidate
    run = planner.run_of(one, first.boundaries)
    base = compose([])
    if one.parts == 1:
        run = replace(run, parallel=replace(run.parallel, replications=None, parts=None))
    base = replace(
        base, parallel=replace(base.parallel, micro_batches=None, replications=None, parts=None)
    )
    comments = [
        (
            f"Made by `gems plan` of gems-train {__version__} on {datetime.now(UTC):%Y-%m-%d}, for"
            f" {num_gpus} GPUs of {planner.spec.machine.name} and {one.global_batch} images a step."
        ),
        (
            f"Predicted by simulation: {first.step_s:.4g} s a step, {first.images_per_s:.4g}"
            f" images/s, efficiency {100 * first.efficiency:.1f} %, at most {max(first.peak_bytes)}"
            " bytes on a device."
        ),
        "The same as: " + " ".join(first.overrides),
    ]
    write_experiment(path, experiment_text(run, base, path.stem, comments))


def _seconds(name: str, text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(name, text, "must be seconds above 0")
    return value


def _batches(text: str, has_epochs: bool) -> list[int]:
    words = text.split(",")
    if len(words) > 1 and not has_epochs:
        raise ConfigError(
            "--global-batch",
            text,
            "must be one number",
            "several compare by the time to a target: give --epochs FILE",
        )
    return sorted({whole_number("--global-batch", word) for word in words})

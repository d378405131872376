"""`gems plan`: the fastest configurations of a run on so many GPUs, and why each loses to the first."""

from __future__ import annotations

import importlib
import math
import time
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from gems import __version__
from gems.cli.framework import Options, print_json
from gems.config.compose import compose
from gems.config.experiment_file import check_experiment, experiment_text, write_experiment
from gems.config.resolve import check_batch, global_batch
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.planner.evaluate import Epochs, Planner
from gems.planner.infeasibility import leanest, refuse
from gems.planner.search.best_first import Found, TooLarge, search
from gems.planner.search.candidate import Candidate, candidates
from gems.planner.search.choice import Choice, reasons
from gems.utils.units import GIB

HYBRID = "--hybrid"
NUM_BEST, BUDGET_S = 10, 40.0
# Of the budget, where nothing has been found to fit: when the search gives way to one for anything that fits, and that
# one to
# what would make it fit.
SEARCH_SHARE, LEAN_SHARE = 0.5, 0.75


def show_plan(spec: RunSpec, options: Options) -> int:
    """Print the best configurations on parallel.gpus GPUs (by default those of the run), best first.

    --global-batch gives the images of a step (by default the run's own), and with --epochs FILE several of them, which
    are then compared by the time to the target. --top says how many are printed, --budget how many seconds the search
    may take,
    --write FILE writes the first as an experiment. --hybrid compares data with model parallelism instead.

    Raises:
        ConfigError: an option that cannot be, a batch that does not divide, or a profile that cannot be had.
        DoesNotFitError: no configuration fits; the line says what would.
    """
    if HYBRID in options.flags:
        shown: Callable[[RunSpec, Options], int] = importlib.import_module("gems.cli.plan_hybrid").show_hybrid
        return shown(spec, options)
    answer, found = planned_answer(spec, options)
    if options.json:
        print_json(answer)
        return 0
    print(_table(answer, found))
    if "experiment" in answer:
        path = Path(answer["experiment"])
        print(f"written: {path}{_how_to_submit(path)}")
    return 0


def planned_answer(spec: RunSpec, options: Options) -> tuple[dict[str, Any], Found[Choice]]:
    """Return what `gems plan` prints, as plain data and as what was found.

    Also write the experiment that it is told to write.

    Raises:
        ConfigError: as `show_plan`.
        DoesNotFitError: as `show_plan`.
    """
    num_best = _whole(options, "--top", NUM_BEST)
    budget_s = _seconds(options, "--budget", BUDGET_S)
    epochs = _epochs(options)
    batches = _batches(options, spec, epochs)
    path = options.chosen.get("--write")
    if path is not None:
        check_experiment(Path(path))
    planner = Planner(spec, spec.memory.limit_bytes or spec.machine.device_bytes, epochs)
    begin = time.perf_counter()
    num_layers = planner.model(planner.sizes[0]).profile.num_layers
    num_gpus = spec.parallel.gpus or spec.world_size
    asked = [one for batch in batches for one in _candidates(planner, num_gpus, batch, num_layers)]
    for size in planner.sizes[1:]:
        if any(one.micro_batch_size >= size for one in asked):
            planner.model(size)
    profile_s = time.perf_counter() - begin
    begin = time.perf_counter()
    found = _search(planner, asked, num_best, begin + budget_s)
    search_s = time.perf_counter() - begin
    if not found.best:
        refuse(planner, asked, found, num_gpus, begin + budget_s)
    answer = _answer(spec, found, num_gpus) | {"profile_s": profile_s, "search_s": search_s}
    if path is not None:
        answer["experiment"] = path
        _write(Path(path), planner, found.best[0], num_gpus)
    return answer, found


def _search(planner: Planner, asked: list[Candidate], num_best: int, end: float) -> Found[Choice]:
    """Search until `end`; while nothing fits, a part of the time is left to find anything that does, or what would."""
    rules, begin = planner.rules(), time.perf_counter()
    last = begin + (end - begin) * SEARCH_SHARE
    fitting: list[bool] = []

    def evaluate(one: Candidate) -> Choice | TooLarge | None:
        result = planner.evaluate(one)
        if isinstance(result, Choice):
            fitting.append(True)
        return result

    def is_over() -> bool:
        return time.perf_counter() > (end if fitting else last)

    found = search(asked, replace(rules, evaluate=evaluate), num_best, is_over)
    if found.best or planner.limit_bytes is None or not found.num_left:
        return found
    slow = [one for one in asked if one.priority > 1]
    lean = leanest(planner, slow, planner.limit_bytes, begin + (end - begin) * LEAN_SHARE)
    if lean is None:
        return found
    return replace(found, best=(lean,), num_simulated=found.num_simulated + 1, num_left=found.num_left - 1)


def _candidates(planner: Planner, num_gpus: int, batch: int, num_layers: int) -> list[Candidate]:
    spec = planner.spec
    asked = candidates(num_gpus, batch, num_layers, has_policies=spec.machine.kind == "real")
    if spec.profile.path is not None:
        asked = [one for one in asked if one.micro_batch_size == spec.parallel.micro_batch_size]
    if not asked:
        raise ConfigError(
            "--global-batch", batch, f"has no split over {num_gpus} GPUs "
            f"into whole micro-batches and at most {num_layers} stages",
            "use a multiple of the GPUs",
        )  # fmt: skip
    check_batch(planner.run_of(asked[0]))
    return asked


def _answer(spec: RunSpec, found: Found[Choice], num_gpus: int) -> dict[str, Any]:
    first = found.best[0]
    return {
        "source": "simulated", "model": spec.model.name, "height_px": spec.data.height_px,
        "width_px": spec.data.width_px,
        "machine": spec.machine.name, "device_bytes": spec.machine.device_bytes, "gpus": num_gpus,
        "choices": [choice.to_json(first) for choice in found.best], "is_exact": found.is_exact,
        "candidates": found.num_candidates, "simulated": found.num_simulated, "too_large": found.num_too_large,
        "pruned_by_bytes": found.num_pruned_bytes, "pruned_by_time": found.num_pruned_time,
        "impossible": found.num_impossible, "left": found.num_left,
    }  # fmt: skip


def _table(answer: dict[str, Any], found: Found[Choice]) -> str:
    first = found.best[0]
    lines = [
        f"{answer['model']} {answer['height_px']} x {answer['width_px']} px on {answer['gpus']} GPUs "
        f"({answer['machine']}{_device(answer['device_bytes'])}), {first.candidate.global_batch} images a step: "
        "simulated, a prediction",
        f"{'':>3}{'step [s]':>10}{'images/s':>10}{'peak [GiB]':>11}{'eff. [%]':>9}  {'ranks x copies':<15}"
        f"{'micro-batches':<15}{'schedule':<24}{'memory':<19}loses to the first by",
    ]  # fmt: skip
    for place, choice in enumerate(found.best, 1):
        one = choice.candidate
        lines.append(
            f"{place:>3}{choice.step_s:>10.4g}{choice.images_per_s:>10.4g}{max(choice.peak_bytes) / GIB:>11.2f}"
            f"{100 * choice.efficiency:>9.1f}  {f'{one.partitions} x {one.replicas}':<15}"
            f"{f'{one.micro_batches} of {one.micro_batch_size}':<15}{one.label:<24}{one.policy:<19}"
            + ", ".join(reasons(first, choice))
        )
    if first.epochs is not None:
        lines.append(
            f"ranked by the time to the target: {first.score_s / 3600:.4g} h, {first.epochs:g} epochs, for the first"
        )
    lines.append(_counts(found, answer["search_s"]))
    return "\n".join(line.rstrip() for line in lines)


def _counts(found: Found[Choice], search_s: float) -> str:
    exact = (
        "no other can be better as modelled"
        if found.is_exact
        else f"ended by its budget with {found.num_left} not looked at: they may be better (--budget)"
    )
    return (
        f"{found.num_candidates} configurations: {found.num_simulated} simulated, "
        f"{found.num_too_large} too large when cut, {found.num_pruned_bytes} left out by bytes, "
        f"{found.num_pruned_time} by time, {found.num_impossible} impossible or pointless; "
        f"{exact}; {search_s:.1f} s"
    )


def _device(device_bytes: int | None) -> str:
    return ", memory unlimited" if device_bytes is None else f", {device_bytes / GIB:.1f} GiB each"


def _write(path: Path, planner: Planner, first: Choice, num_gpus: int) -> None:
    one = first.candidate
    run = planner.run_of(one, first.boundaries)
    base = compose([])
    run = replace(
        run, parallel=replace(run.parallel, replications=None, parts=None) if one.parts == 1 else run.parallel
    )
    base = replace(base, parallel=replace(base.parallel, micro_batches=None, replications=None, parts=None))
    name = path.stem
    comments = [
        f"Made by `gems plan` of gems-train {__version__} on {datetime.now(UTC):%Y-%m-%d}, "
        f"for {num_gpus} GPUs of {planner.spec.machine.name} and {one.global_batch} images a step.",
        f"Predicted by simulation: {first.step_s:.4g} s a step, {first.images_per_s:.4g} images/s, "
        f"efficiency {100 * first.efficiency:.1f} %, at most {max(first.peak_bytes)} bytes on a device.",
        "The same as: " + " ".join(one.overrides(first.boundaries)),
    ]  # fmt: skip
    write_experiment(path, experiment_text(run, base, name, comments))


def _how_to_submit(path: Path) -> str:
    return f" (make submit CONF={path.stem})" if path.parent.name == "experiment" else ""


def _whole(options: Options, name: str, default: int) -> int:
    text = options.chosen.get(name, str(default))
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= 10**6:
        raise ConfigError(name, text, "must be a whole number from 1 to 1000000")
    return int(text)


def _seconds(options: Options, name: str, default: float) -> float:
    text = options.chosen.get(name, str(default))
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise ConfigError(name, text, "must be seconds above 0")
    return value


def _epochs(options: Options) -> Epochs | None:
    path = options.chosen.get("--epochs")
    if path is None:
        return None
    epochs: Epochs = importlib.import_module("gems.planner.hybrid.inputs").read_epochs(Path(path)).law.epochs
    return epochs


def _batches(options: Options, spec: RunSpec, epochs: Epochs | None) -> list[int]:
    text = options.chosen.get("--global-batch")
    if text is None:
        return [global_batch(spec)]
    words = text.split(",")
    if len(words) > 1 and epochs is None:
        raise ConfigError(
            "--global-batch", text, "must be one number", "several compare by the time to a target: give --epochs FILE"
        )
    one_each = [Options(chosen={"--global-batch": word}) for word in words]
    return sorted({_whole(one, "--global-batch", 1) for one in one_each})

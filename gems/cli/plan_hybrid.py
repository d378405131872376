"""`gems plan --hybrid`: for each number of devices the best workers x ways, by end-to-end time to the target."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gems.cli.framework import Options, print_json
from gems.config.schema import RunSpec
from gems.planner.hybrid.device_allocation import Choice, HybridPlan, Row, device_counts, picks, plan_hybrid
from gems.planner.hybrid.end_to_end_time import BreakEven, Efficiency, HybridCase
from gems.planner.hybrid.epochs import EQUAL_EPOCHS
from gems.planner.hybrid.inputs import (
    EFFICIENCY,
    EPOCHS,
    SPEEDUP,
    GivenEpochs,
    epochs_json,
    read_efficiency,
    read_epochs,
    read_speedups,
)
from gems.planner.hybrid.quantity import Quantity
from gems.planner.worker_step import Step, modelled_efficiency, worker_steps
from gems.runs.run_plan import plan_simulation, predict
from gems.utils.units import counted

SCHEMA = "gems.hybrid/1"
MAX_DEVICES = 1024
WAYS = (2, 4, 8)


def show_hybrid(spec: RunSpec, options: Options) -> int:
    """Print the plan of a resolved run: a row for each number of devices, where hybrid begins to win, and the inputs.

    Raises:
        ConfigError: an option's file or value that cannot be read, or nothing that is known and fits.
    """
    chosen = options.chosen
    given = read_epochs(Path(chosen[EPOCHS])) if EPOCHS in chosen else None
    losses = read_efficiency(Path(chosen[EFFICIENCY]), spec.schedule.name) if EFFICIENCY in chosen else None
    speedups = read_speedups(chosen[SPEEDUP]) if SPEEDUP in chosen else None
    most = spec.parallel.gpus or MAX_DEVICES
    wanted = sorted(speedups or {*WAYS, spec.parallel.partitions} - {1})
    degrees = (1, *(degree for degree in wanted if degree <= most))
    steps, refused = worker_steps(spec, degrees, lambda changed: predict(plan_simulation(changed)))
    efficiency = modelled_efficiency(spec) if losses is None else losses[0]
    case = _case(spec, given, efficiency, speedups, steps)
    plan = plan_hybrid(case, device_counts(case.degrees, most), seed=spec.seed)
    answer = _answer(spec, case, plan, given, steps)
    answer["speedup_source"] = "simulated" if speedups is None else "given"
    answer["efficiency_source"] = "simulated" if losses is None else losses[1]
    answer["refused"] = {str(ways): why for ways, why in refused.items() if ways not in case.degrees}
    if options.json:
        print_json(answer)
    else:
        print(table_of(answer))
    return 0


def _case(
    spec: RunSpec,
    given: GivenEpochs | None,
    efficiency: Efficiency,
    speedups: Mapping[int, Quantity] | None,
    steps: Mapping[int, Step],
) -> HybridCase:
    alone = steps[1].step_s
    if speedups is None:
        speedups = {ways: Quantity.exact(alone / step.step_s) for ways, step in steps.items() if ways > 1}
    parallel = spec.parallel
    return HybridCase(
        float((parallel.micro_batches or 1) * parallel.micro_batch_size),
        EQUAL_EPOCHS if given is None else given.law,
        speedups,
        efficiency,
        Quantity.exact(alone),
        (None if given is None else given.num_samples) or spec.data.train_samples,
        {ways: step.misfit for ways, step in steps.items() if step.misfit is not None},
    )


def _answer(
    spec: RunSpec, case: HybridCase, plan: HybridPlan, given: GivenEpochs | None, steps: Mapping[int, Step]
) -> dict[str, Any]:
    return {
        "schema": SCHEMA, "source": "predicted", "model": spec.model.name, "height_px": spec.data.height_px,
        "width_px": spec.data.width_px, "schedule": spec.schedule.name, "memory": spec.memory.name,
        "machine": spec.machine.name, "worker_batch": case.worker_batch, "samples_per_epoch": case.num_samples,
        "epochs": None if given is None else epochs_json(given),
        "speedups": {str(ways): _quantity(each) for ways, each in case.speedups.items()},
        "steps": {
            str(ways): {"step_s": step.step_s, "peak_bytes": step.peak_bytes, "fits": step.misfit is None}
            for ways, step in steps.items()
        },
        "base": {"workers": plan.base[0], "ways": plan.base[1]},
        "rows": [_row(row, case.num_samples) for row in plan.rows],
        "crossings": [_break_even(each) for each in plan.break_evens],
        "picks": {
            name: {"devices": choice.devices, **_choice(choice, case.num_samples)}
            for name, choice in picks(plan).items()
        },
    }  # fmt: skip


def _quantity(given: Quantity | None) -> dict[str, float] | None:
    return None if given is None else {"value": given.value, "low": given.low, "high": given.high}


def _row(row: Row, num_samples: int | None) -> dict[str, Any]:
    return {
        "devices": row.devices,
        "choices": [_choice(choice, num_samples) for choice in row.choices],
        "left_out": {str(ways): why for ways, why in row.left_out.items()},
    }


def _choice(choice: Choice, num_samples: int | None) -> dict[str, Any]:
    step_s, batch = choice.step_s, choice.global_batch
    return {
        "workers": choice.workers, "ways": choice.degree, "global_batch": batch,
        "step_s": step_s, "images_per_s": None if step_s is None else batch / step_s,
        "steps_per_epoch": None if num_samples is None else num_samples / batch, "epochs": choice.epochs,
        "cost": choice.cost, "speedup": _quantity(choice.speedup), "over_data_parallel": _quantity(choice.gain),
        "time_s": _quantity(choice.time_s), "gpu_hours": _quantity(choice.gpu_hours),
        "is_extrapolated": choice.is_extrapolated,
    }  # fmt: skip


def _break_even(found: BreakEven) -> dict[str, Any]:
    return {
        "ways": found.degree, "devices": found.devices, "below": found.below, "listed": found.listed,
        "low": found.low, "high": found.high,
    }  # fmt: skip


def table_of(answer: Mapping[str, Any]) -> str:
    """Return the answer as text."""
    lines, has_rival = [*_head(answer), _COLUMNS], answer["steps"]["1"]["fits"]
    for row in answer["rows"]:
        if row["choices"]:
            lines.append(_line(row["devices"], row["choices"][0], has_rival))
    lines += [_crossing_words(each) for each in answer["crossings"]]
    lines += [f"{name.replace('_', ' ')}: {_pick_words(each)}" for name, each in answer["picks"].items()]
    if any(choice["is_extrapolated"] for row in answer["rows"] for choice in row["choices"]):
        lines.append("* epochs beyond what was measured: the law goes on, and nothing checks it")
    return "\n".join([*lines, *_left_out(answer)])


_COLUMNS = (
    f"{'devices':>7}{'best N x M':>12}{'batch':>9}{'epochs':>9}{'speed-up':>10}{'time h':>10}{'GPU-hours':>11}"
    "   over data parallelism (95 %)"
)


def _head(answer: Mapping[str, Any]) -> list[str]:
    epochs = answer["epochs"]
    if epochs is None:
        known = "not given, taken as one whatever the batch: times are of an epoch (--epochs FILE)"
    elif "e_min" in epochs:
        runs = f", fitted to {len(epochs['runs'])} runs" if "runs" in epochs else ""
        known = (
            f"E(B) = E_min (1 + B / B_crit){runs}: "
            f"E_min {_within(epochs, 'e_min')}, B_crit {_within(epochs, 'b_crit')} samples"
        )
    else:
        known = f"a table of {len(epochs['runs'])} global batches"
    speedups = ", ".join(f"SU^{ways} {each['value']:.3g}" for ways, each in answer["speedups"].items())
    return [
        f"{answer['model']} at {answer['height_px']}x{answer['width_px']} px, {answer['schedule']}, "
        f"{answer['worker_batch']:g} samples a step of a worker: C = T x S x E, predicted",
        f"epochs: {known}",
        f"speed-up of a step by M devices ({answer['speedup_source']}): {speedups or 'none'}; "
        f"scaling efficiency of N workers: {answer['efficiency_source']}",
    ]


def _within(epochs: Mapping[str, Any], name: str) -> str:
    value, low, high = (epochs[f"{name}{end}"] for end in ("", "_low", "_high"))
    return f"{value:.3g}" if low == high else f"{value:.3g} ({low:.3g} to {high:.3g})"


def _line(devices: int, best: Mapping[str, Any], has_rival: bool) -> str:
    mark = "*" if best["is_extrapolated"] else ""
    speedup, time_s, cost = best["speedup"], best["time_s"], best["gpu_hours"]
    cells = (
        (f"{devices}", 7),
        (f"{best['workers']} x {best['ways']}", 12),
        (f"{best['global_batch']:g}", 9),
        (f"{best['epochs']:.3g}{mark}", 9),
        (f"{speedup['value']:.3g}", 10),
        ("-" if time_s is None else f"{time_s['value'] / 3600.0:.3g}", 10),
        ("-" if cost is None else f"{cost['value']:.3g}", 11),
    )
    return "".join(text.rjust(width) for text, width in cells) + f"   {_over(best, has_rival)}"


def _over(best: Mapping[str, Any], has_rival: bool) -> str:
    gain = best["over_data_parallel"]
    if best["ways"] == 1:
        return "it is that"
    if gain is None:
        return "which is not known there" if has_rival else "which does not fit"
    value, low, high = (100.0 * (gain[end] - 1.0) for end in ("value", "low", "high"))
    return f"{value:+.1f} %" + ("" if low == high else f" ({low:+.1f} to {high:+.1f})")


def _crossing_words(found: Mapping[str, Any]) -> str:
    ways, devices = found["ways"], found["devices"]
    if devices is None:
        last = "" if found["below"] is None else f" up to {counted(found['below'], 'device')}"
        return f"{ways} ways: not faster than data parallelism{last}"
    low, high = found["low"], found["high"]
    between = "" if low is None else f" ({low:.0f} to {'never' if high is None else f'{high:.0f}'})"
    return f"{ways} ways: faster than data parallelism from {counted(devices, 'device')} on{between}"


def _pick_words(pick: Mapping[str, Any]) -> str:
    choice = f"{pick['workers']} x {pick['ways']} on {counted(pick['devices'], 'device')}"
    time_s, cost = pick["time_s"]["value"], pick["gpu_hours"]["value"]
    return f"{choice}, {time_s / 3600.0:.3g} h and {cost:.3g} GPU-hours"


def _left_out(answer: Mapping[str, Any]) -> list[str]:
    """Describe what was left out, each reason once."""
    found: dict[str, list[str]] = {}
    for row in answer["rows"]:
        for ways, why in row["left_out"].items():
            fits = answer["steps"].get(ways, {"fits": True})["fits"]
            name = f"{row['devices'] // int(ways)} x {ways}" if fits else f"N x {ways}, which does not fit"
            names = found.setdefault(why, [])
            names += [] if name in names else [name]
    found |= {why: [f"N x {ways}"] for ways, why in answer["refused"].items()}
    return [f"left out {', '.join(names)}: {why}" for why, names in found.items()]

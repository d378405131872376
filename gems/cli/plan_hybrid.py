"""`gems plan --hybrid`: for each number of devices the best workers x ways, by end-to-end time to the target."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gems.cli.framework import Options, print_json
from gems.config.schema import RunSpec
from gems.plan.evaluate import simulate
from gems.search.hybrid import inputs
from gems.search.hybrid.device_allocation import (
    HybridPlan,
    WorkerChoice,
    device_counts,
    picks,
    plan_hybrid,
)
from gems.search.hybrid.end_to_end_time import HybridCase
from gems.search.hybrid.epochs import EQUAL_EPOCHS
from gems.search.hybrid.quantity import Quantity
from gems.search.hybrid.worker_step import Worker, WorkerStep
from gems.simulation.costs import counts_units
from gems.utils.tables import RIGHT, table
from gems.utils.units import counted, format_size

SCHEMA = "gems.hybrid/1"
MAX_DEVICES = 1024
WAYS = (2, 4, 8)
COLUMNS = {
    "devices": "d",
    "best N x M": RIGHT,
    "batch": "g",
    "epochs": RIGHT,
    "speed-up": ".3g",
    "time [h]": ".3g",
    "GPU-hours": ".3g",
    "over data parallelism (95 %)": "",
}


def show_hybrid(spec: RunSpec, options: Options) -> int:
    """Print a row for each number of devices, where hybrid begins to win, and the inputs.

    Raises:
        ConfigError: An option's file or value that cannot be read, or nothing that is known and
        fits.
    """
    chosen = options.chosen
    parallel = spec.parallel
    epochs = inputs.read_epochs(Path(chosen[inputs.EPOCHS])) if inputs.EPOCHS in chosen else None
    speedups = inputs.read_speedups(chosen[inputs.SPEEDUP]) if inputs.SPEEDUP in chosen else None
    most = parallel.gpus or MAX_DEVICES
    wanted = sorted(speedups or {*WAYS, parallel.partitions} - {1})
    degrees = (1, *(degree for degree in wanted if degree <= most))
    worker = Worker(spec)
    efficiency, source = worker.efficiency(), "simulated"
    if inputs.EFFICIENCY in chosen:
        path = Path(chosen[inputs.EFFICIENCY])
        efficiency, source = inputs.read_efficiency(path, spec.schedule.name)
    steps, refused = worker.steps(degrees, simulate)
    alone_s = steps[1].step_s
    case = HybridCase(
        float((parallel.micro_batches or 1) * parallel.micro_batch_size),
        EQUAL_EPOCHS if epochs is None else epochs.law,
        speedups
        or {
            ways: Quantity.exact(alone_s / step.step_s) for ways, step in steps.items() if ways > 1
        },
        efficiency,
        Quantity.exact(alone_s),
        (None if epochs is None else epochs.num_samples) or spec.data.train_samples,
        {ways: step.misfit for ways, step in steps.items() if step.misfit is not None},
    )
    plan = plan_hybrid(case, device_counts(case.degrees, most), seed=spec.seed)
    alone = worker.with_degree(1)
    is_in_units = counts_units(alone.cost, alone.memory, alone.machine)
    answer = {
        "schema": SCHEMA,
        "source": "predicted",
        "model": spec.model.name,
        **spec.data.sides,
        "schedule": spec.schedule.name,
        "memory": spec.memory.name,
        "machine": spec.machine.name,
        "time_unit": "unit" if is_in_units else "s",
        "worker_batch": case.worker_batch,
        "samples_per_epoch": case.num_samples,
        "epochs": None if epochs is None else inputs.epochs_json(epochs),
        "speedups": {str(ways): asdict(speedup) for ways, speedup in case.speedups.items()},
        "speedup_source": "simulated" if speedups is None else "given",
        "efficiency_source": source,
        "steps": {str(ways): _step(step) for ways, step in steps.items()},
        **_plan(plan, case.num_samples, is_in_units),
        "refused": {str(ways): why for ways, why in refused.items() if ways not in case.degrees},
    }
    print_json(answer) if options.json else print(_table(answer))
    return 0


def _step(step: WorkerStep) -> dict[str, Any]:
    return {"step_s": step.step_s, "peak_bytes": step.peak_bytes, "fits": step.misfit is None}


def _plan(plan: HybridPlan, samples: int | None, is_in_units: bool) -> dict[str, Any]:
    return {
        "base": {"workers": plan.base[0], "ways": plan.base[1]},
        "rows": [
            {
                "devices": allocation.devices,
                "choices": [_choice(choice, samples, is_in_units) for choice in allocation.choices],
                "left_out": {str(ways): why for ways, why in allocation.left_out.items()},
            }
            for allocation in plan.allocations
        ],
        "crossings": [_by_ways(asdict(crossing)) for crossing in plan.break_evens],
        "picks": {
            name: {"devices": choice.devices, **_choice(choice, samples, is_in_units)}
            for name, choice in picks(plan).items()
        },
    }


def _by_ways(fields: dict[str, Any]) -> dict[str, Any]:
    return {"ways": fields.pop("degree"), **fields}


def _choice(choice: WorkerChoice, num_samples: int | None, is_in_units: bool) -> dict[str, Any]:
    step_s = choice.step_s
    batch = choice.global_batch
    fields = _by_ways(asdict(choice))
    fields["over_data_parallel"] = fields.pop("gain")
    fields["images_per_s"] = None if step_s is None or is_in_units else batch / step_s
    fields["steps_per_epoch"] = None if num_samples is None else num_samples / batch
    return fields


def _table(answer: Mapping[str, Any]) -> str:
    shown = [row for row in answer["rows"] if row["choices"]]
    is_in_units = answer["time_unit"] == "unit"
    hour, time, cost_name = (
        (1.0, "units", "GPU-units") if is_in_units else (3600.0, "h", "GPU-hours")
    )
    columns = {
        {"time [h]": f"time [{time}]", "GPU-hours": cost_name}.get(key, key): how
        for key, how in COLUMNS.items()
    }
    rows = []
    for row in shown:
        best = row["choices"][0]
        time_s = best["time_s"]
        cost = best["gpu_hours"]
        rows.append(
            (
                row["devices"],
                f"{best['workers']} x {best['ways']}",
                best["global_batch"],
                f"{best['epochs']:.3g}{'*' if best['is_extrapolated'] else ''}",
                best["speedup"]["value"],
                None if time_s is None else time_s["value"] / hour,
                None if cost is None else cost["value"] * 3600.0 / hour,
                _over(best, answer["steps"]["1"]["fits"]),
            )
        )
    lines = [*_head(answer), table(columns, rows), *map(_crossing, answer["crossings"])]
    for name, pick in answer["picks"].items():
        choice = f"{pick['workers']} x {pick['ways']} on {counted(pick['devices'], 'device')}"
        spent = pick["gpu_hours"]["value"] * 3600.0 / hour
        figures = f"{pick['time_s']['value'] / hour:.3g} {time} and {spent:.3g} {cost_name}"
        lines.append(f"{name.replace('_', ' ')}: {choice}, {figures}")
    if any(choice["is_extrapolated"] for row in shown for choice in row["choices"]):
        lines.append("* epochs beyond what was measured: the law goes on, and nothing checks it")
    return "\n".join([*lines, *_left_out(answer)])


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
    speedups = ", ".join(
        f"SU^{ways} {speedup['value']:.3g}" for ways, speedup in answer["speedups"].items()
    )
    return [
        (
            f"{answer['model']} at {format_size(answer)} px,"
            f" {answer['schedule']}, {answer['worker_batch']:g} samples a step of a worker: C = T x"
            " S x E, predicted"
        ),
        f"epochs: {known}",
        (
            f"speed-up of a step by M devices ({answer['speedup_source']}): {speedups or 'none'}; "
            f"scaling efficiency of N workers: {answer['efficiency_source']}"
        ),
    ]


def _within(epochs: Mapping[str, Any], name: str) -> str:
    value, low, high = (epochs[f"{name}{end}"] for end in ("", "_low", "_high"))
    return f"{value:.3g}" if low == high else f"{value:.3g} ({low:.3g} to {high:.3g})"


def _over(best: Mapping[str, Any], has_rival: bool) -> str:
    gain = best["over_data_parallel"]
    if best["ways"] == 1:
        return "it is that"
    if gain is None:
        return "which is not known there" if has_rival else "which does not fit"
    value, low, high = (100.0 * (gain[end] - 1.0) for end in ("value", "low", "high"))
    return f"{value:+.1f} %" + ("" if low == high else f" ({low:+.1f} to {high:+.1f})")


def _crossing(found: Mapping[str, Any]) -> str:
    ways = found["ways"]
    devices = found["devices"]
    if devices is None:
        last = "" if found["below"] is None else f" up to {counted(found['below'], 'device')}"
        return f"{ways} ways: not faster than data parallelism{last}"
    low = found["low"]
    high = found["high"]
    between = "" if low is None else f" ({low:.0f} to {'never' if high is None else f'{high:.0f}'})"
    return (
        f"{ways} ways: faster than data parallelism from {counted(devices, 'device')} on{between}"
    )


def _left_out(answer: Mapping[str, Any]) -> list[str]:
    """Describe the excluded configurations, each reason once."""
    reasons: dict[str, dict[str, None]] = {}
    for row in answer["rows"]:
        for ways, why in row["left_out"].items():
            fits = answer["steps"].get(ways, {"fits": True})["fits"]
            name = (
                f"{row['devices'] // int(ways)} x {ways}"
                if fits
                else f"N x {ways}, which does not fit"
            )
            reasons.setdefault(why, {})[name] = None
    reasons |= {why: {f"N x {ways}": None} for ways, why in answer["refused"].items()}
    return [f"left out {', '.join(names)}: {why}" for why, names in reasons.items()]

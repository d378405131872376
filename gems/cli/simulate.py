"""`gems simulate`: simulates the configured schedule and prints times, efficiency, memory and the bound."""

from __future__ import annotations

from typing import Any

from gems.cli.framework import Options, print_json
from gems.cli.schedule import draw_faults, drawn
from gems.config.schema import RunSpec
from gems.plan.evaluate import simulate
from gems.schedule import PLACEMENTS, is_searched
from gems.simulation.calibration import Confidence
from gems.simulation.prediction import Prediction, allowed_actions
from gems.utils.tables import name_values, table
from gems.utils.units import MIB, percent

MAX_RANK_ROWS = 64
PARTS = ("useful", "recompute", "link_wait", "input_wait", "reduce", "optimizer", "idle")


def show_simulation(spec: RunSpec, options: Options) -> int:
    """Print the prediction for a resolved run: a grid and tables, or one object as JSON."""
    with draw_faults():
        prediction = simulate(spec)
    answer = prediction.to_json()
    if options.json:
        print_json(answer)
        return 0
    schedule = prediction.schedule
    if schedule.num_ranks <= MAX_RANK_ROWS and not any(schedule.num_segments):
        print(
            drawn(
                schedule,
                prediction.costs,
                prediction.step,
                is_profiled=prediction.run.cost.from_layers,
            )
        )
    print(_summary(answer, assumed(prediction), prediction.confidence, prediction.launch_costs))
    print(_rank_table(answer))
    return 0


def assumed(found: Prediction) -> str:
    """Describe the assumptions of the bound: orders, treatment of activations, and links."""
    run = found.run
    schedule = found.schedule
    if is_searched(schedule.name):
        orders = (
            "any schedule with a split backward on"
            f" {', '.join(run.schedule.placements or PLACEMENTS)}"
        )
    else:
        orders = (
            "any order on this placement with a"
            f" {'split' if schedule.has_split_backward else 'full'} backward"
        )
    actions = [
        {"recompute": "recomputed", "offload": "copied to host"}[name]
        for name in allowed_actions(run.schedule.memory_actions, schedule)
    ]
    links = (
        "links without contention"
        if found.network.takes_time(found.costs.boundary_bytes)
        else "free links"
    )
    noise = "; compute without noise" if run.machine.noise else ""
    if schedule.num_strips > 1:
        orders += f" of {schedule.num_strips} strips a micro-batch"
    return f"{orders}; activations {' or '.join(['kept', *actions])}; {links}{noise}"


def _summary(
    answer: dict[str, Any],
    assumptions: str,
    confidence: Confidence | None,
    launch_costs: str | None,
) -> str:
    low = answer["step_low_s"]
    high = answer["step_high_s"]
    is_in_units = answer["time_unit"] == "unit"
    unit = "units" if is_in_units else "s"
    images = "" if is_in_units else f"{answer['images_per_s']:.4g}"
    step = f"{answer['step_s']:g}"
    if not is_in_units and answer["step_units"] != answer["step_s"]:
        step += f" ({answer['step_units']:g} units)"
    if answer["step_range_s"] is not None:
        least, most = answer["step_range_s"]
        step = f"{least:.3g} to {most:.3g}"
        images = " to ".join(
            f"{answer['images_per_s'] * answer['step_s'] / bound:.3g}" for bound in (most, least)
        )
    strips = f"{answer['strips']} strips" if answer["strips"] > 1 else ""
    most = answer["bound_any_strips"]
    rows = [
        (f"step [{unit}]", step),
        *([] if confidence is None else [("this time is", confidence.words)]),
        *([] if launch_costs is None else [("launch costs", launch_costs)]),
        *(
            [(f"95 % of steps [{unit}]", f"{low:g} to {high:g} (machine.noise)")]
            if low < high
            else []
        ),
        *([("images/s", images)] if images else []),
        ("efficiency [%]", percent(answer["efficiency"])),
        ("bubble [%]", percent(answer["bubble"])),
        (
            f"largest possible efficiency under the cap{strips and f' in {strips}'} [%]",
            percent(answer["bound"]),
        ),
        ("  which holds for", assumptions),
        ("missed of that [%]", percent(answer["gap"])),
        *([] if most is None else [("  in any number of strips [%]", percent(most))]),
        ("cap [units]", "none" if answer["cap"] is None else f"{answer['cap']:g}"),
        ("peak [units]", f"{max(answer['peak_units']):g}"),
    ]
    title = (
        f"{answer['schedule']}: {answer['partitions']} ranks x {answer['replicas']} replicas,"
        f" {answer['stages']} stages, {answer['micro_batches']}"
        f" micro-batches{strips and f' of {strips}'}: simulated, a prediction"
    )
    return name_values(rows, title=title)


def _rank_table(answer: dict[str, Any]) -> str:
    """Return a row a rank: where its time goes, in percent of the step, and its peaks."""
    peaks = [None if size is None else size / MIB for size in answer["peak_bytes"]]
    rows = [
        (
            rank,
            *(100 * answer[f"{part}_s"][rank] / answer["step_s"] for part in PARTS),
            answer["peak_units"][rank],
            peaks[rank],
        )
        for rank in range(min(answer["partitions"], MAX_RANK_ROWS))
    ]
    columns = {
        "rank": "d",
        **dict.fromkeys(PARTS, ".1f"),
        "peak [units]": ".4g",
        "peak [MiB]": ".1f",
    }
    return table(columns, rows, title="times in % of the step", indent=2)

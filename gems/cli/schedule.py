"""`gems schedule`: prints the configured schedule as a grid, as JSON, or as torch's CSV."""

from __future__ import annotations

import contextlib
import shutil
import sys
from collections.abc import Iterator
from dataclasses import asdict

from gems.cli.framework import Options, print_json
from gems.config.schema import RunSpec
from gems.errors import ScheduleError
from gems.plan.evaluate import evaluate
from gems.schedule.costs import StageCosts
from gems.schedule.formats.grid import fault_grid, grid, unit_to_fit
from gems.schedule.formats.schedule_json import to_json
from gems.schedule.formats.torch_csv import to_torch_csv
from gems.schedule.lower import compute_only
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate

LOWERED = "level=lowered"
TORCH = "format=torch"
TERMINAL_CHARS = 120  # where there is no terminal to ask


def show_schedule(spec: RunSpec, options: Options) -> int:
    """Print the schedule of a resolved run.

    Compute actions, or with level=lowered the list that ranks run.
    The JSON carries the costs of the stages beside the schedule, for drawings. format=torch gives
    the compute actions as the CSV that torch.distributed.pipelining loads.

    Raises:
        ConfigError: Counts or a cap that the family cannot serve, or a format that cannot say the
        schedule. ScheduleError: a schedule that would not run; its grid with the fault marked is on
        stderr.
    """
    with draw_faults():
        plan = evaluate(spec, runs=False)
        shown = compute_only(plan.schedule)
        costs = plan.memory.costs.in_units(plan.costs.unit_s, 1.0)
        lowered = plan.schedule
    if TORCH in options.flags:
        print(to_torch_csv(shown), end="")
        return 0
    if options.json:
        document = to_json(lowered if LOWERED in options.flags else shown)
        print_json(document | {"costs": asdict(costs)})
        return 0
    has_segments = any(shown.num_segments)
    if LOWERED in options.flags or has_segments:  # segments are too many for a grid
        for rank, actions in enumerate(
            (lowered if LOWERED in options.flags else shown).rank_schedules
        ):
            print(f"rank {rank:>4} | " + " ".join(map(str, actions)))
        return 0
    cost = plan.costs
    step = simulate(lowered, costs, plan.memory.links.in_units(cost.unit_s))
    is_profiled = cost.from_layers
    unit = "s" if is_profiled else "units"
    print(drawn(lowered, costs, step, is_profiled))
    print(
        f"{shown.name}: {shown.num_ranks} ranks x {spec.parallel.replicas} replicas,"
        f" {shown.num_stages} stages, {shown.num_micro_batches} micro-batches, step {step.span:g}"
        f" {unit} (forward {cost.forward:g}, backward {cost.input_grad + cost.weight_grad:g}),"
        f" efficiency {step.efficiency:.3f}, peak {max(step.peak):g} micro-batches of activations"
    )
    return 0


@contextlib.contextmanager
def draw_faults() -> Iterator[None]:
    """Draw the grid of a broken schedule on stderr, and let the error pass."""
    try:
        yield
    except ScheduleError as error:
        if isinstance(error.schedule, Schedule):
            print(fault_grid(error.schedule, error), file=sys.stderr)
        raise


def drawn(schedule: Schedule, costs: StageCosts, step: Simulation, is_profiled: bool) -> str:
    """Return a step as a grid, with a column for the shortest action.

    Measured times have no common unit, and the shortest of them may be a thousandth of the others:
    the grid of such costs is scaled to the terminal, or left out where a rank has more actions than
    fit.
    """
    unit = shortest_time(schedule, costs)
    chars = shutil.get_terminal_size((TERMINAL_CHARS, 0)).columns
    fitted = unit_to_fit(schedule, step, chars) if is_profiled else unit
    if fitted is None:
        most = max(map(len, schedule.rank_schedules))
        return (
            f"(grid left out: up to {most} actions of a rank do not fit {chars} characters; `gems"
            " schedule level=lowered` lists them, COLUMNS=1000 before the command makes room)"
        )
    text = grid(schedule, step, unit=max(unit, fitted))
    if fitted <= unit:
        return text
    name = "s" if is_profiled else "units"
    return f"{text}\n(a column is {fitted:.3g} of {step.span:.3g} {name}; shorter actions take one)"


def shortest_time(schedule: Schedule, costs: StageCosts) -> float:
    """Return the time of the shortest action that takes any: one column of a grid."""
    return min(filter(None, (costs.time(action) for _, action in schedule.actions())), default=1.0)

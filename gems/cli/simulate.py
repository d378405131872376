"""`gems simulate`: plays the configured schedule on paper and prints times, efficiency, memory and the bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from gems.cli.framework import Options, print_json
from gems.cli.schedule import drawn_faults, shortest_time
from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.memory.case import PlanOutcome
from gems.models import layers_of
from gems.partition.methods import cut
from gems.runs.run_plan import memory_case, planned
from gems.schedule import CAPPED
from gems.schedule.action import Kind
from gems.schedule.bounds import memory_time_bound
from gems.schedule.costs import Network, StageCosts
from gems.schedule.formats.grid import grid
from gems.schedule.lower import compute_only
from gems.schedule.memory import Held, RankMemory, memory_over_time
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import RankTime, Simulation, rank_times
from gems.simulation.build import cap_of, costs_of, found_of, pace_of, play, schedule_of
from gems.simulation.jitter import interval_of, median_of, noisy_steps
from gems.simulation.profiled_costs import PROFILE, costed
from gems.simulation.step_time import slowest

MAX_RANK_ROWS = 64


@dataclass(frozen=True, slots=True)
class Prediction:
    """One simulated step of a resolved run, in the units of the costs, and what it was simulated with.

    With machine.noise `played` is the median of drawn steps, and `interval` holds 95 % of them; without it, its span alone.
    """

    schedule: Schedule
    costs: StageCosts
    network: Network
    cap: float | None
    played: Simulation
    times: tuple[RankTime, ...]
    memory: tuple[RankMemory, ...]
    bound: float
    interval: tuple[float, float]


def predict(spec: RunSpec) -> Prediction:
    """Simulate the lowered schedule of a resolved run, one pipeline for all replicas, which are alike.

    Raises:
        ConfigError: counts or a cap that the family cannot serve.
        DoesNotFitError: a rank would hold more than its device, by the profile of its layers.
        ScheduleError: a schedule that would not run.
    """
    if spec.memory.name != "keep":
        return _predict_planned(spec)
    with drawn_faults():
        made = schedule_of(spec)
    costs, cap = costs_of(spec, made.placement), cap_of(spec)
    network, quiet = play(spec, made)
    played, interval = _with_noise(spec, made, costs, network, cap, quiet)
    return Prediction(
        made, costs, network, cap, played,
        rank_times(made, costs, played, network, pace_of(spec, 0)),
        _kept_memory(spec, made, costs, played),
        bound_of(spec, made, costs, network, max(played.peak) if cap is None else cap),
        interval,
    )  # fmt: skip


def _with_noise(
    spec: RunSpec, schedule: Schedule, costs: StageCosts, network: Network, cap: float | None, quiet: Simulation
) -> tuple[Simulation, tuple[float, float]]:
    """Return the median step under machine.noise, and the times between which 95 % of the steps lie."""
    if not spec.machine.noise:
        return quiet, (quiet.span, quiet.span)
    machine, replicas = spec.machine, spec.parallel.replicas
    steps = noisy_steps(schedule, costs, network, cap, machine.noise, replicas, spec.seed, pace=pace_of(spec, 0))
    return median_of(steps), interval_of(steps)


def _predict_planned(spec: RunSpec) -> Prediction:
    """Simulate a run under its memory policy, in seconds and bytes; the bytes on the device are those of its walk."""
    with drawn_faults():
        outcome = planned(spec).memory
    assert outcome is not None
    schedule, costs = outcome.schedule, outcome.costs
    network, _ = slowest(spec, schedule, costs)
    played, interval = _with_noise(spec, schedule, costs, network, None, outcome.played)
    return Prediction(
        schedule, costs, network, None, played,
        rank_times(schedule, costs, played, network),
        tuple(_memory_of(outcome, played, rank) for rank in range(schedule.num_ranks)),
        memory_time_bound(costs, schedule.placement, None, schedule.has_split_backward, network),
        interval,
    )  # fmt: skip


def _kept_memory(spec: RunSpec, made: Schedule, costs: StageCosts, played: Simulation) -> tuple[RankMemory, ...]:
    """Return the bytes of ranks that keep their activations: by the storages of the layers, where a profile names them.

    Configured costs, a placed list, and a searched one of more stages than layers tell of activations, messages and
    parameters alone.
    """
    has_profile = spec.cost.name == PROFILE and made.placement.feeders is None
    if not has_profile or made.num_stages > len(layers_of(spec.model, spec.data)):
        return memory_over_time(made, costs, played, spec.cost.activation_bytes, spec.cost.param_bytes)
    kept = memory_case(spec, compute_only(made), cut(spec, made).boundaries).kept
    return tuple(_memory_of(kept, played, rank) for rank in range(made.num_ranks))


def _memory_of(outcome: PlanOutcome, played: Simulation, rank: int) -> RankMemory:
    """Return a rank's bytes over time: while an action runs, and behind it."""
    held = []
    points, starts, ends = outcome.ranks[rank].points, played.start[rank], played.end[rank]
    for point, start, end in zip(points, starts, ends, strict=True):
        for time, on_device in ((start, point.during_bytes), (end, point.device_bytes)):
            held.append(
                Held(
                    time,
                    float(point.activation_bytes),
                    float(on_device - point.activation_bytes),
                    float(point.host_bytes),
                )
            )
    return RankMemory(0.0, tuple(held))


def in_seconds_and_bytes(spec: RunSpec) -> RunSpec:
    """Return a run under a memory policy with the units of its prediction; another one as it is."""
    if spec.memory.name == "keep":
        return spec
    return replace(spec, cost=replace(spec.cost, unit_s=1.0, activation_bytes=1))


def bound_of(spec: RunSpec, schedule: Schedule, costs: StageCosts, network: Network, cap: float) -> float:
    """Return the efficiency that no order on the same placement exceeds under the cap; see `memory_time_bound`.

    A search knows its own, over all placements that it may use.
    """
    if schedule.name == CAPPED:
        return float(found_of(spec)["bound"])
    allow = set(spec.schedule.memory_actions)
    allow |= {name for name, kind in (("recompute", Kind.R), ("offload", Kind.OFFLOAD)) if schedule.has_any(kind)}
    is_split = schedule.has_split_backward
    return memory_time_bound(costs, schedule.placement, cap, is_split, network, tuple(allow))


def simulation_dict(spec: RunSpec, found: Prediction) -> dict[str, Any]:
    """Return the prediction as plain data.

    Shares (efficiency, bubble, bound, gap) are fractions of 1: useful compute over ranks x step, time in which a
    rank computes nothing, the largest efficiency for this placement under the cap (without one, under the peak that
    the schedule has), and the part of the bound that is missed. Lists have an item a rank of one pipeline: replicas
    are alike. Sizes in bytes are null where cost.activation_bytes is not given.
    """
    played, unit_s, num_ranks = found.played, spec.cost.unit_s, found.schedule.num_ranks
    step_s = played.span * unit_s
    computing = sum(time.useful + time.recompute for time in found.times)
    has_bytes = spec.cost.activation_bytes > 0
    return {
        "source": "simulated",
        "memory": spec.memory.name,
        "schedule": found.schedule.name,
        "partitions": num_ranks,
        "replicas": spec.parallel.replicas,
        "world_size": spec.world_size,
        "micro_batches": found.schedule.num_micro_batches,
        "stages": found.schedule.num_stages,
        "directions": found.schedule.num_directions,
        "step_units": played.span,
        "step_s": step_s,
        "step_low_s": found.interval[0] * unit_s,
        "step_high_s": found.interval[1] * unit_s,
        "images_per_s": global_batch(spec) / step_s,
        "efficiency": played.efficiency,
        "bubble": 1.0 - computing / (num_ranks * played.span),
        "bound": found.bound,
        "gap": 1.0 - played.efficiency / found.bound,
        "cap": found.cap,
        "peak_units": list(played.peak),
        "peak_activation_bytes": [peak * spec.cost.activation_bytes if has_bytes else None for peak in played.peak],
        "peak_bytes": [memory.peak if has_bytes else None for memory in found.memory],
        "peak_host_bytes": [
            max((held.host for held in memory.held), default=0.0) if has_bytes else None for memory in found.memory
        ],
        **{
            f"{name}_s": [getattr(time, part) * unit_s for time in found.times]
            for name, part in (
                ("useful", "useful"), ("recompute", "recompute"), ("link_wait", "link"), ("input_wait", "input"), ("reduce", "reduce"),
                ("optimizer", "step"), ("idle", "idle"),
            )
        },
    }  # fmt: skip


def show_simulation(spec: RunSpec, options: Options) -> int:
    """Print the prediction for a resolved run: a grid and tables, or one object as JSON."""
    spec = in_seconds_and_bytes(costed(spec))
    found = predict(spec)
    answer = simulation_dict(spec, found)
    if options.json:
        print_json(answer)
        return 0
    schedule = found.schedule
    if schedule.num_ranks <= MAX_RANK_ROWS and not any(schedule.num_segments):
        print(grid(schedule, found.played, unit=shortest_time(schedule, found.costs)))
    print(_table(answer))
    print(_rank_table(answer))
    return 0


def _table(answer: dict[str, Any]) -> str:
    cap = "none" if answer["cap"] is None else f"{answer['cap']:g}"
    rows = [
        ("step [s]", f"{answer['step_s']:g} ({answer['step_units']:g} units)"),
        *_noise_row(answer),
        ("images/s", f"{answer['images_per_s']:.4g}"),
        ("efficiency [%]", f"{100 * answer['efficiency']:.1f}"),
        ("bubble [%]", f"{100 * answer['bubble']:.1f}"),
        ("largest possible efficiency under the cap [%]", f"{100 * answer['bound']:.1f}"),
        ("missed of that [%]", f"{100 * answer['gap']:.1f}"),
        ("cap [units]", cap),
        ("peak [units]", f"{max(answer['peak_units']):g}"),
    ]
    head = (
        f"{answer['schedule']}: {answer['partitions']} ranks x {answer['replicas']} replicas, {answer['stages']} stages, "
        f"{answer['micro_batches']} micro-batches: simulated, a prediction"
    )
    return _lines(head, rows)


def _noise_row(answer: dict[str, Any]) -> list[tuple[str, str]]:
    low, high = answer["step_low_s"], answer["step_high_s"]
    return [("95 % of steps [s]", f"{low:g} to {high:g} (machine.noise)")] if low < high else []


def _lines(head: str, rows: Sequence[tuple[str, str]]) -> str:
    width = max(len(name) for name, _ in rows)
    return "\n".join([head, *(f"  {name:<{width}}  {value}" for name, value in rows)])


def _rank_table(answer: dict[str, Any]) -> str:
    """Return a row a rank: where its time goes, in percent of the step, and its peaks."""
    parts = ("useful", "recompute", "link_wait", "input_wait", "reduce", "optimizer", "idle")
    head = f"{'rank':>6}" + "".join(f"{part:>11}" for part in parts) + f"{'peak units':>12}{'peak MiB':>12}"
    lines = [head + "   (times in % of the step)"]
    for rank in range(min(answer["partitions"], MAX_RANK_ROWS)):
        shares = "".join(f"{100 * answer[f'{part}_s'][rank] / answer['step_s']:>11.1f}" for part in parts)
        peak_bytes = answer["peak_bytes"][rank]
        size = "-" if peak_bytes is None else f"{peak_bytes / 2**20:.1f}"
        lines.append(f"{rank:>6}{shares}{answer['peak_units'][rank]:>12.4g}{size:>12}")
    return "\n".join(lines)

"""`gems memory`: what the configured policy does with every layer's activations, or all policies side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gems.cli.framework import Options, print_json
from gems.cli.pictures import check_picture, draw
from gems.config.constraints import check_memory
from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.errors import ConfigError, DoesNotFitError
from gems.memory.case import Exposure, MemoryCase, PlanOutcome, exposures
from gems.memory.plan import Choice
from gems.memory.registry import POLICIES, plan_of
from gems.runs.run_plan import plan_policies
from gems.schedule.action import COPY_KINDS, RECV_KINDS, SEND_KINDS
from gems.simulation.memory_case import with_replicas
from gems.utils.units import MIB, counted

COMPARE = "--compare"
_POSTED = COPY_KINDS | SEND_KINDS | RECV_KINDS
PICTURE = "--picture"


def show_memory(spec: RunSpec, options: Options) -> int:
    """Print a plan as a table (a row a segment), or with --compare a row for each policy; --picture draws both.

    Policies that need a limit are left out of a comparison where none is given, and those that cannot keep it are named
    with the reason.
    """
    is_comparison = COMPARE in options.flags
    picture = options.chosen.get(PICTURE)
    if picture is not None:
        check_picture(Path(picture))
    case = plan_policies(spec)
    names = tuple(POLICIES) if is_comparison else (spec.memory.name,)
    keeping = with_replicas(spec, case, case.kept)
    outcomes, refused = _outcomes(spec, case, keeping, names)
    entries = [_entry(spec, case, keeping, outcome) for outcome in outcomes]
    entries.sort(key=lambda entry: (not entry["fits"], float(f"{entry['step_s']:.9g}"), max(entry["peak_bytes"])))
    answer = _facts(spec, case) | {"choices": entries, "refused": refused}
    if picture is not None:
        answer["picture"] = draw("memory", {**answer, "curves": [_curve(each) for each in outcomes]}, Path(picture))
    if options.json:
        print_json(answer)
        return 0
    print(_comparison(answer) if is_comparison else _table(answer))
    if picture is not None:
        print(f"picture: {answer['picture']}")
    return 0


def _outcomes(
    spec: RunSpec, case: MemoryCase, keeping: PlanOutcome, names: Sequence[str]
) -> tuple[list[PlanOutcome], dict[str, str]]:
    found, refused = [], {}
    for name in names:
        memory = replace(spec.memory, name=name)
        try:
            check_memory(replace(spec, memory=memory))
            is_kept = name == "keep"
            found.append(keeping if is_kept else with_replicas(spec, case, case.outcome(plan_of(memory, case))))
        except (ConfigError, DoesNotFitError) as error:
            if len(names) == 1:
                raise
            refused[name] = str(error)
    return found, refused


def _facts(spec: RunSpec, case: MemoryCase) -> dict[str, Any]:
    profile = case.profile
    return {
        "source": "predicted", "model": profile.model, "height_px": profile.height_px, "width_px": profile.width_px,
        "micro_batch_size": profile.micro_batch_size, "dtype": profile.dtype, "profile_source": profile.source,
        "profile_device": profile.device, "schedule": case.schedule.name, "partitions": case.schedule.num_ranks,
        "micro_batches": case.schedule.num_micro_batches, "limit_bytes": case.limit_bytes,
        "d2h_bytes_per_s": case.d2h_bytes_per_s, "h2d_bytes_per_s": case.h2d_bytes_per_s,
        "boundaries": list(case.boundaries),
    }  # fmt: skip


def _entry(spec: RunSpec, case: MemoryCase, keeping: PlanOutcome, outcome: PlanOutcome) -> dict[str, Any]:
    """Return one policy's figures; `saved` is the share of the kept activations' peak that it takes off the device."""
    kept = max(rank.peak_activation_bytes for rank in keeping.ranks)
    held = max(rank.peak_activation_bytes for rank in outcome.ranks)
    peaks = list(outcome.peak_bytes)
    return {
        "policy": outcome.plan.policy,
        "step_s": outcome.step_s,
        "images_per_s": global_batch(spec) / outcome.step_s if outcome.step_s else None,
        "overhead": round(outcome.step_s / keeping.step_s - 1.0, 9) + 0.0 if keeping.step_s else None,
        "peak_bytes": peaks,
        "peak_activation_bytes": [rank.peak_activation_bytes for rank in outcome.ranks],
        "host_bytes": list(outcome.host_bytes),
        "saved": 1.0 - held / kept if kept else 0.0,
        "fits": case.limit_bytes is None or max(peaks) <= case.limit_bytes,
        "counters": dict(outcome.plan.counters or {}),
        "segments": _segments(case, outcome),
    }


def _segments(case: MemoryCase, outcome: PlanOutcome) -> list[dict[str, Any]]:
    costs = exposures(outcome)
    names = [layer.name for layer in case.profile.layers]
    listed = []
    for stage, segments in enumerate(outcome.plan.stages):
        for number, segment in enumerate(segments):
            cost = costs.get((stage, number), Exposure())
            last = names[segment.end - 1]
            layers = names[segment.first] if segment.end - segment.first == 1 else f"{names[segment.first]} .. {last}"
            listed.append({
                "stage": stage, "segment": number, "layers": layers, "first": segment.first, "end": segment.end,
                "choice": segment.choice.value, "kept_bytes": round(outcome.costs.segments[stage][number].activation),
                "moved_bytes": cost.moved_bytes, "out_s": cost.out_s, "back_s": cost.back_s, "copy_s": cost.copy_s,
                "exposed_s": cost.exposed_s, "again_s": cost.again_s,
            })  # fmt: skip
    return listed


def _curve(outcome: PlanOutcome) -> dict[str, Any]:
    """Return bytes over time of the rank that holds most: on the device and in host memory.

    What is posted, copies and messages, counts from the next action on that the rank itself runs.
    """
    worst = outcome.fullest_rank
    points, host = [], []
    for point, start, end in zip(
        outcome.ranks[worst].points, outcome.simulation.start[worst], outcome.simulation.end[worst], strict=True
    ):
        if point.action.kind in _POSTED:
            continue
        points += [(start, point.during_bytes), (end, point.device_bytes)]
        host.append((end, point.host_bytes))
    return {"policy": outcome.plan.policy, "rank": worst, "device": points, "host": host}


def _head(answer: dict[str, Any]) -> str:
    limit = "no limit" if answer["limit_bytes"] is None else f"limit {answer['limit_bytes'] / MIB:.0f} MiB a rank"
    return (
        f"{answer['model']} at {answer['height_px']}x{answer['width_px']} px, {answer['schedule']} on "
        f"{counted(answer['partitions'], 'rank')}, {counted(answer['micro_batches'], 'micro-batch', 'es')}, "
        f"{limit}: predicted ({answer['profile_source']} profile, {answer['profile_device']})"
    )


def _comparison(answer: dict[str, Any]) -> str:
    lines = [
        _head(answer),
        f"{'policy':<12}{'peak MiB':>10}{'host MiB':>10}{'saved %':>9}{'step ms':>11}{'overhead %':>12}  fits",
    ]
    for entry in answer["choices"]:
        lines.append(
            f"{entry['policy']:<12}{max(entry['peak_bytes']) / MIB:>10.1f}{max(entry['host_bytes']) / MIB:>10.1f}"
            f"{100 * entry['saved']:>9.1f}{entry['step_s'] * 1e3:>11.3f}{100 * (entry['overhead'] or 0.0):>12.1f}  "
            f"{'yes' if entry['fits'] else 'no'}"
        )
    lines += [f"{name}: {why}" for name, why in answer["refused"].items()]
    return "\n".join(lines)


def _table(answer: dict[str, Any]) -> str:
    (entry,) = answer["choices"]
    width = max(24, *(len(row["layers"]) for row in entry["segments"]))
    lines = [
        _head(answer),
        f"{entry['policy']}: peak {max(entry['peak_bytes']) / MIB:.1f} MiB, "
        f"host {max(entry['host_bytes']) / MIB:.1f} MiB, {100 * entry['saved']:.1f} % of activations saved, "
        f"step {entry['step_s'] * 1e3:.3f} ms ({100 * (entry['overhead'] or 0.0):+.1f} % over keep)",
        f"{'stage':>5} {'layers':<{width}} {'choice':<10}{'MiB':>9}{'out ms':>10}{'back ms':>10}"
        f"{'hidden ms':>11}{'exposed ms':>11}{'again ms':>10}",
    ]
    for row in entry["segments"]:
        is_moved = row["choice"] == Choice.OFFLOAD.value and row["out_s"] is not None
        times = [
            f"{row['out_s'] * 1e3:>10.3f}{row['back_s'] * 1e3:>10.3f}" if is_moved else f"{'-':>10}{'-':>10}",
            f"{max(0.0, row['copy_s'] - row['exposed_s']) * 1e3:>11.3f}{row['exposed_s'] * 1e3:>11.3f}"
            if is_moved
            else f"{'-':>11}{'-':>11}",
            f"{row['again_s'] * 1e3:>10.3f}" if row["again_s"] else f"{'-':>10}",
        ]  # fmt: skip
        lines.append(
            f"{row['stage']:>5} {row['layers']:<{width}} {row['choice']:<10}{row['kept_bytes'] / MIB:>9.2f}"
            + "".join(times)
        )
    lines += [f"{name}: {value}" for name, value in entry["counters"].items()]
    return "\n".join(lines)

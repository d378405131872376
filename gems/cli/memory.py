"""`gems memory`: which activations a policy keeps, recomputes or offloads, or compare policies."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from gems.cli.answers import case_facts, draw, picture_path
from gems.cli.framework import Options, print_json
from gems.config.constraints import check_memory
from gems.config.schema import RunSpec
from gems.errors import ConfigError, DoesNotFitError
from gems.memory.case import Exposure, MemoryCase, PlanOutcome, exposures
from gems.memory.plan import Choice
from gems.memory.registry import POLICIES, plan_of
from gems.plan.draft import Draft
from gems.plan.evaluate import with_strips_chosen
from gems.plan.strips_choice import in_words, thin_parts
from gems.profile.subject import Subject
from gems.schedule.action import COPY_KINDS, RECV_KINDS, SEND_KINDS
from gems.simulation.calibration import confidence_of
from gems.simulation.prediction import with_jitter
from gems.utils.tables import table
from gems.utils.units import MIB, counted, format_size

POLICY_COLUMNS = {
    "policy": "",
    "peak [MiB]": ".1f",
    "host [MiB]": ".1f",
    "saved [%]": ".1f",
    "step [ms]": ".3f",
    "overhead [%]": ".1f",
    "fits": "",
}
SEGMENT_COLUMNS = {
    "stage": "d",
    "layers": "",
    "choice": "",
    "kept [MiB]": ".2f",
    **{f"{name} [ms]": ".3f" for name in ("out", "back", "hidden", "exposed", "again")},
}
_POSTED = COPY_KINDS | SEND_KINDS | RECV_KINDS


def show_memory(spec: RunSpec, options: Options) -> int:
    """Print a plan as a table (a row a segment), or with --compare a row for each policy.

    --picture draws both.
    Policies that need a limit are left out of a comparison where none is given, and those that
    cannot keep it are named with the reason.
    """
    is_comparison = "--compare" in options.flags
    picture = picture_path(options)
    case = Draft(with_strips_chosen(spec), runs=True).policy_case
    names = tuple(POLICIES) if is_comparison else (spec.memory.name,)
    keeping = case.as_run(case.kept)
    outcomes: list[PlanOutcome] = []
    refused: dict[str, str] = {}
    for name in names:
        memory = replace(spec.memory, name=name)
        try:
            check_memory(memory, spec.machine, spec.schedule, spec.parallel.num_strips)
            outcomes.append(case.as_run(case.outcome(plan_of(memory, case))))
        except (ConfigError, DoesNotFitError) as error:
            if not is_comparison:
                raise
            refused[name] = str(error)
    keeping_s, *steps_s = (
        with_jitter(each, spec.machine.noise, spec.seed)[0].span for each in (keeping, *outcomes)
    )
    entries = [
        _entry(case, keeping, outcome, keeping_s, step_s, spec.parallel.global_batch)
        for outcome, step_s in zip(outcomes, steps_s, strict=True)
    ]
    entries.sort(
        key=lambda entry: (
            not entry["fits"],
            float(f"{entry['step_s']:.9g}"),
            max(entry["peak_bytes"]),
        )
    )
    answer = case_facts(case.profile, case.schedule) | {
        "division": spec.parallel.strips,
        "limit_bytes": case.limit_bytes,
        "d2h_bytes_per_s": case.d2h_bytes_per_s,
        "h2d_bytes_per_s": case.h2d_bytes_per_s,
        "boundaries": list(case.boundaries),
        "choices": entries,
        "refused": refused,
    }
    if picture is not None:
        answer["picture"] = draw(
            "memory", {**answer, "curves": [_curve(each) for each in outcomes]}, picture
        )
    if options.json:
        print_json(answer)
        return 0
    print(_comparison(answer) if is_comparison else _table(answer))
    print(f"step times are {confidence_of(Subject.of(spec)).words}")
    if thin := thin_parts(spec.parallel, spec.data, spec.machine.launch_s, case.profile):
        print(f"warning: {thin}")
    if picture is not None:
        print(f"picture: {answer['picture']}")
    return 0


def _entry(
    case: MemoryCase,
    keeping: PlanOutcome,
    outcome: PlanOutcome,
    keeping_s: float,
    step_s: float,
    batch: int,
) -> dict[str, Any]:
    """Return one policy's figures.

    `saved` is the share of the kept activations' peak that it takes off the device.
    """
    keep_bytes = max(rank.peak_activation_bytes for rank in keeping.ranks)
    peak_bytes = max(rank.peak_activation_bytes for rank in outcome.ranks)
    peaks = list(outcome.peak_bytes)
    return {
        "policy": outcome.plan.policy,
        "step_s": step_s,
        "images_per_s": batch / step_s if step_s else None,
        "overhead": round(step_s / keeping_s - 1.0, 9) + 0.0 if keeping_s else None,
        "peak_bytes": peaks,
        "peak_activation_bytes": [rank.peak_activation_bytes for rank in outcome.ranks],
        "host_bytes": list(outcome.host_bytes),
        "saved": 1.0 - peak_bytes / keep_bytes if keep_bytes else 0.0,
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
            layers = (
                names[segment.first]
                if segment.end - segment.first == 1
                else f"{names[segment.first]} .. {last}"
            )
            listed.append(
                {
                    "stage": stage,
                    "segment": number,
                    "layers": layers,
                    "first": segment.first,
                    "end": segment.end,
                    "choice": segment.choice.value,
                    "kept_bytes": round(outcome.costs.segments[stage][number].activation),
                    "moved_bytes": cost.moved_bytes,
                    "out_s": cost.out_s,
                    "back_s": cost.back_s,
                    "copy_s": cost.copy_s,
                    "exposed_s": cost.exposed_s,
                    "again_s": cost.again_s,
                }
            )
    return listed


def _curve(outcome: PlanOutcome) -> dict[str, Any]:
    """Return bytes over time of the rank that holds most: on the device and in host memory.

    What is posted, copies and messages, counts from the next action on that the rank itself runs.
    """
    worst = outcome.fullest_rank
    points = []
    host = []
    for point, start, end in zip(
        outcome.ranks[worst].points,
        outcome.simulation.start[worst],
        outcome.simulation.end[worst],
        strict=True,
    ):
        if point.action.kind in _POSTED:
            continue
        points += [(start, point.during_bytes), (end, point.device_bytes)]
        host.append((end, point.host_bytes))
    return {"policy": outcome.plan.policy, "rank": worst, "device": points, "host": host}


def _head(answer: dict[str, Any]) -> str:
    limit = (
        "no limit"
        if answer["limit_bytes"] is None
        else f"limit {answer['limit_bytes'] / MIB:.0f} MiB a rank"
    )
    strips = f" of {in_words(answer['division'])}" if answer["strips"] > 1 else ""
    return (
        f"{answer['model']} at {format_size(answer)} px, {answer['schedule']}"
        f" on {counted(answer['partitions'], 'rank')},"
        f" {counted(answer['micro_batches'], 'micro-batch', 'es')}{strips},"
        f" {limit}: predicted ({answer['profile_source']} profile, {answer['profile_device']})"
    )


def _comparison(answer: dict[str, Any]) -> str:
    rows = [
        (
            choice["policy"],
            max(choice["peak_bytes"]) / MIB,
            max(choice["host_bytes"]) / MIB,
            100 * choice["saved"],
            choice["step_s"] * 1e3,
            100 * (choice["overhead"] or 0.0),
            "yes" if choice["fits"] else "no",
        )
        for choice in answer["choices"]
    ]
    lines = [table(POLICY_COLUMNS, rows, title=_head(answer))]
    return "\n".join([*lines, *(f"{name}: {why}" for name, why in answer["refused"].items())])


def _table(answer: dict[str, Any]) -> str:
    (entry,) = answer["choices"]
    rows = []
    for row in entry["segments"]:
        times_s: list[float | None] = [None] * 4
        if Choice(row["choice"]).is_copied and row["out_s"] is not None:
            exposed_s = row["exposed_s"]
            times_s = [row["out_s"], row["back_s"], max(0.0, row["copy_s"] - exposed_s), exposed_s]
        times_ms = [
            None if time_s is None else 1e3 * time_s
            for time_s in (*times_s, row["again_s"] or None)
        ]
        rows.append(
            (row["stage"], row["layers"], row["choice"], row["kept_bytes"] / MIB, *times_ms)
        )
    lines = [
        _head(answer),
        (
            f"{entry['policy']}: peak {max(entry['peak_bytes']) / MIB:.1f} MiB, host"
            f" {max(entry['host_bytes']) / MIB:.1f} MiB, {100 * entry['saved']:.1f} % of"
            f" activations saved, step {entry['step_s'] * 1e3:.3f} ms"
            f" ({100 * (entry['overhead'] or 0.0):+.1f} % over keep)"
        ),
        table(SEGMENT_COLUMNS, rows),
    ]
    return "\n".join([*lines, *(f"{name}: {value}" for name, value in entry["counters"].items())])

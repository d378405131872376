"""`gems partition`: cut the model by each method, with the ranks' bytes, or find the largest one."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from gems.cli.answers import case_facts, draw, picture_path
from gems.cli.framework import Options, print_json
from gems.config.schema import RunSpec
from gems.partition.compare import PLAIN, EvaluatedPartition, compare, evaluate
from gems.partition.max_model_size import RESOLUTION, Axis, MaxModelSize, max_model_sizes
from gems.partition.methods import METHODS, PartitionCase
from gems.plan.draft import Draft
from gems.plan.largest_image import LargestImage, largest_image
from gems.plan.strips_choice import in_words, shown
from gems.utils.tables import table
from gems.utils.units import GIB, MIB, format_size

PEERS = ("torchgpipe_size", "torchgpipe_time")


def show_partition(spec: RunSpec, options: Options) -> int:
    """Print the cut of a resolved run, all methods side by side, or the largest model that each can train."""
    if "--largest" in options.chosen:
        return _show_largest(spec, options.chosen["--largest"], options.json)
    if spec.partition.objective == "auto":
        spec = replace(spec, partition=replace(spec.partition, objective="peak_bytes"))
    is_comparison = "--compare" in options.flags
    picture = picture_path(options, "partition.png" if is_comparison and not options.json else None)
    draft = Draft(spec)
    case = draft.partitioner.case(draft.lowered)
    if is_comparison:
        evaluated = compare(case, spec.partition.objective, spec.partition.budget_s)
    else:
        evaluated = [evaluate(case, draft.partition(draft.lowered))]
    entries = [_entry(case, item, evaluated[0], spec.parallel.global_batch) for item in evaluated]
    answer = case_facts(case.profile, case.schedule) | {
        "stages": case.num_stages,
        "layers": case.profile.num_layers,
        "objective": spec.partition.objective,
        "limit_bytes": case.limit_bytes,
        **({"methods": entries} if is_comparison else entries[0]),
    }
    if not options.json:
        print(_table(answer, entries))
    if picture is not None:
        layers = [
            {
                "name": item.name,
                "time_s": item.time_s,
                "param_bytes": item.param_bytes,
                "stash_bytes": item.kept_bytes,
            }
            for item in case.profile.layers
        ]
        drawn = {**answer, "methods": entries, "drawn_layers": layers}
        answer["picture"] = draw("partition", drawn, picture)
    if options.json:
        print_json(answer)
    elif picture is not None:
        print(f"picture: {answer['picture']}")
    return 0


def _entry(
    case: PartitionCase, evaluated: EvaluatedPartition, ours: EvaluatedPartition, batch: int
) -> dict[str, Any]:
    """Return one method's answer; `peak_ratio` and `time_ratio` are over the exact method's.

    `peak_bytes` are those allocated, `reserved_bytes` what torch's allocator would take from a GPU
    to serve them.
    """
    partition = evaluated.partition
    step_s = evaluated.step_s
    is_exact = partition.method == "exact"
    return {
        "method": partition.method,
        "boundaries": list(partition.boundaries),
        "layers_per_stage": list(evaluated.layers_per_stage),
        "peak_bytes": list(evaluated.peak_bytes),
        "reserved_bytes": list(case.reserved_bytes(partition.boundaries)),
        "step_s": step_s,
        "images_per_s": batch / step_s if step_s else None,
        "optimal": partition.is_optimal,
        "bound": partition.bound if is_exact else None,
        "gap": partition.gap if is_exact else None,
        "solve_s": partition.solve_s,
        "peak_ratio": max(evaluated.peak_bytes) / max(1, max(ours.peak_bytes)),
        "time_ratio": step_s / ours.step_s if ours.step_s else None,
        **({"facts": partition.facts} if partition.facts else {}),
    }


def _table(answer: dict[str, Any], entries: Sequence[dict[str, Any]]) -> str:
    head = (
        f"{answer['model']} at {format_size(answer)} px, {answer['layers']}"
        f" layers in {answer['stages']} stages on {answer['partitions']} ranks,"
        f" {answer['schedule']}: predicted ({answer['profile_source']} profile,"
        f" {answer['profile_device']})"
    )
    columns = {
        "method": "",
        "peak [MiB]": ".1f",
        "peak ratio": ".2f",
        "reserved [MiB]": ".1f",
        "step [ms]": ".2f",
        "step ratio": ".2f",
        "solved [s]": ".2f",
        "proof": "",
    }
    rows = [
        (
            entry["method"],
            max(entry["peak_bytes"]) / MIB,
            entry["peak_ratio"],
            max(entry["reserved_bytes"]) / MIB,
            entry["step_s"] * 1e3,
            entry["time_ratio"],
            entry["solve_s"],
            _proof(entry),
        )
        for entry in entries
    ]
    lines = [table(columns, rows, title=head)]
    for entry in entries:
        lines += [
            f"{entry['method']}: layers a stage {' '.join(map(str, entry['layers_per_stage']))}",
            (
                f"{'':<{len(entry['method'])}}  MiB a rank"
                f" {' '.join(f'{p / MIB:.1f}' for p in entry['peak_bytes'])}"
            ),
        ]
    return "\n".join(lines)


def _proof(entry: dict[str, Any]) -> str | None:
    if entry["method"] == PLAIN:
        return "least for plain pipelines"
    if entry["optimal"]:
        return "optimal"
    return None if entry["gap"] is None else f"at most {100 * entry['gap']:.2f} % above the least"


def _show_largest(spec: RunSpec, axis: str, as_json: bool) -> int:
    """Print, for each method, the largest depth, resolution or micro-batch under machine.device_bytes."""
    from gems.profile.store import take_in_this_process

    schedule = Draft(spec).lowered
    growth = Axis(spec, axis)

    def build_case(value: int) -> PartitionCase:
        print(".", end="", file=sys.stderr, flush=True)
        return Draft(growth.at(value)).partitioner.case(schedule)

    if axis == RESOLUTION:
        take_in_this_process()
    sizes = max_model_sizes(growth, tuple(METHODS), build_case)
    strips = largest_image(spec) if axis == RESOLUTION else None
    print(file=sys.stderr)
    answer: dict[str, Any] = {
        "source": "predicted",
        "model": spec.model.name,
        "axis": axis,
        "schedule": spec.schedule.name,
        "partitions": spec.parallel.partitions,
        "limit_bytes": spec.machine.device_bytes,
        "methods": [
            {
                "method": size.method,
                axis: size.value,
                "num_parameters": size.num_parameters,
                "peak_bytes": size.peak_bytes,
            }
            for size in sizes
        ],
        "parameters_over": {
            size.method: {
                "parameters": _over(sizes[0].num_parameters, size.num_parameters),
                "value": _over(sizes[0].value, size.value),
            }
            for size in sizes
            if size.method in PEERS
        },
        **({"strips": asdict(strips)} if strips else {}),
    }
    if as_json:
        print_json(answer)
    else:
        print(_largest_table(answer, sizes, strips))
    return 0


def _over(value: int, other: int) -> float | None:
    return round(value / other, 3) if other else None


def _largest_table(
    answer: dict[str, Any], found: Sequence[MaxModelSize], strips: LargestImage | None
) -> str:
    axis = answer["axis"]
    ours = found[0]
    rows = [
        (
            row.method,
            row.value,
            row.num_parameters,
            row.peak_bytes / GIB,
            _over(row.value, ours.value),
            _over(row.num_parameters, ours.num_parameters),
        )
        for row in found
    ]
    columns = {
        "method": "",
        axis: "d",
        "parameters": "d",
        "peak [GiB]": ".2f",
        "value/ours": ".3f",
        "params/ours": ".3f",
    }
    head = (
        f"{answer['model']}, {answer['schedule']} on {answer['partitions']} ranks of "
        f"{(answer['limit_bytes'] or 0) / GIB:.2f} GiB: the largest that trains (predicted)"
    )
    lines = [table(columns, rows, title=head)]
    lines += [
        f"ours over {peer}: {ratio['parameters']} x the parameters, {ratio['value']} x the {axis}"
        for peer, ratio in answer["parameters_over"].items()
    ]
    if strips:
        more = f", {strips.side_px / ours.value:.2f} x the side of ours" if ours.value else ""
        lines.append(
            f"in {in_words(strips.strips)} (parallel.strips={shown(strips.strips)}"
            f" memory={strips.memory}): {strips.side_px} px, {strips.peak_bytes / GIB:.2f} GiB,"
            f" step {strips.step_s:.4g} s{more}"
        )
    return "\n".join(lines)

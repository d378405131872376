"""Show how `gems partition` partitions the configured model, and what each rank then holds.

This is for one method or for all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gems.cli.framework import Options, print_json
from gems.cli.pictures import check_picture, draw
from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.partition.compare import PLAIN, EvaluatedPartition, compare, evaluate
from gems.partition.methods import PartitionCase, partition_case, partition_model
from gems.simulation.build import lowered_schedule
from gems.simulation.costs import network_in_seconds
from gems.utils.units import MIB


def show_partition(spec: RunSpec, options: Options) -> int:
    """Print the cut of a resolved run, all methods side by side, or the largest model that each can train."""
    if "--largest" in options.chosen:
        from gems.cli.max_model import show_largest

        return show_largest(spec, options)
    if spec.partition.objective == "auto":
        spec = replace(spec, partition=replace(spec.partition, objective="peak_bytes"))
    is_comparison = "--compare" in options.flags
    picture = options.chosen.get("--picture") or ("partition.png" if is_comparison and not options.json else None)
    if picture is not None:
        check_picture(Path(picture))
    schedule = lowered_schedule(spec)
    case = partition_case(spec, schedule)
    network = network_in_seconds(spec)
    if is_comparison:
        evaluated = compare(case, spec.partition.objective, spec.partition.budget_s, network)
    else:
        found = partition_model(spec, schedule)
        evaluated = [evaluate(case, found, network)]
    answer = _facts(spec, case) | ({"methods": []} if is_comparison else {})
    entries = [_entry(spec, case, each, evaluated[0]) for each in evaluated]
    answer |= {"methods": entries} if is_comparison else entries[0]
    if options.json:
        if picture is not None:
            answer["picture"] = _draw(answer, case, Path(picture))
        print_json(answer)
        return 0
    print(_table(answer, entries))
    if picture is not None:
        print(f"picture: {_draw(answer, case, Path(picture))}")
    return 0


def _facts(spec: RunSpec, case: PartitionCase) -> dict[str, Any]:
    profile = case.profile
    return {
        "source": "predicted", "model": profile.model, "height_px": profile.height_px, "width_px": profile.width_px,
        "micro_batch_size": profile.micro_batch_size, "dtype": profile.dtype, "profile_source": profile.source,
        "profile_device": profile.device, "schedule": case.schedule.name, "partitions": case.schedule.num_ranks,
        "stages": case.num_stages, "layers": profile.num_layers, "micro_batches": case.schedule.num_micro_batches,
        "objective": spec.partition.objective, "limit_bytes": case.limit_bytes,
    }  # fmt: skip


def _entry(
    spec: RunSpec, case: PartitionCase, evaluated: EvaluatedPartition, ours: EvaluatedPartition
) -> dict[str, Any]:
    """Return one method's answer; `peak_ratio` and `time_ratio` are over the exact method's.

    `peak_bytes` are those allocated, `reserved_bytes` what torch's allocator would take from a GPU to serve them.
    """
    found = evaluated.partition
    is_exact = found.method == "exact"
    return {
        "method": found.method,
        "boundaries": list(found.boundaries),
        "layers_per_stage": list(evaluated.layers_per_stage),
        "peak_bytes": list(evaluated.peak_bytes),
        "reserved_bytes": list(case.reserved_bytes(found.boundaries)),
        "step_s": evaluated.step_s,
        "images_per_s": global_batch(spec) / evaluated.step_s if evaluated.step_s else None,
        "optimal": found.is_optimal,
        "bound": found.bound if is_exact else None,
        "gap": found.gap if is_exact else None,
        "solve_s": found.solve_s,
        "peak_ratio": max(evaluated.peak_bytes) / max(1, max(ours.peak_bytes)),
        "time_ratio": evaluated.step_s / ours.step_s if ours.step_s else None,
        **({"facts": found.facts} if found.facts else {}),
    }


def _table(answer: dict[str, Any], entries: Sequence[dict[str, Any]]) -> str:
    head = (
        f"{answer['model']} at {answer['height_px']}x{answer['width_px']} px, {answer['layers']} layers in "
        f"{answer['stages']} stages on {answer['partitions']} ranks, {answer['schedule']}: predicted "
        f"({answer['profile_source']} profile, {answer['profile_device']})"
    )
    lines = [
        head,
        f"{'method':<16}{'peak MiB':>10}{'ratio':>7}{'reserved':>10}{'step ms':>10}{'ratio':>7}{'solved s':>9}  proof",
    ]
    for entry in entries:
        ratio = "-" if entry["time_ratio"] is None else f"{entry['time_ratio']:.2f}"
        lines.append(
            f"{entry['method']:<16}{max(entry['peak_bytes']) / MIB:>10.1f}{entry['peak_ratio']:>7.2f}"
            f"{max(entry['reserved_bytes']) / MIB:>10.1f}"
            f"{entry['step_s'] * 1e3:>10.2f}{ratio:>7}{entry['solve_s']:>9.2f}  {_proof(entry)}"
        )
    for entry in entries:
        lines += [
            f"{entry['method']}: layers a stage {' '.join(map(str, entry['layers_per_stage']))}",
            f"{'':<{len(entry['method'])}}  MiB a rank {' '.join(f'{p / MIB:.1f}' for p in entry['peak_bytes'])}",
        ]
    return "\n".join(lines)


def _proof(entry: dict[str, Any]) -> str:
    if entry["method"] == PLAIN:
        return "least for plain pipelines"
    if entry["optimal"]:
        return "optimal"
    return "-" if entry["gap"] is None else f"at most {100 * entry['gap']:.2f} % above the least"


def _draw(answer: dict[str, Any], case: PartitionCase, path: Path) -> str:
    """Let the analysis draw the answer, and gives the picture's path."""
    layers = [
        {"name": layer.name, "time_s": layer.time_s, "param_bytes": layer.param_bytes,
         "stash_bytes": layer.kept_bytes}
        for layer in case.profile.layers
    ]  # fmt: skip
    methods = answer.get("methods") or [answer]
    return draw("partition", {**answer, "methods": methods, "drawn_layers": layers}, path)

"""`gems partition --largest`: the largest model that each method can train, and the ratio to torchgpipe's."""

from __future__ import annotations

import sys
from typing import Any

from gems.cli.framework import Options, print_json
from gems.config.schema import RunSpec
from gems.partition.max_model_size import MaxModelSize, max_model_sizes
from gems.partition.methods import METHODS, partition_case
from gems.profile import ModelProfile
from gems.simulation.build import lowered_schedule

PEERS = ("torchgpipe_size", "torchgpipe_time")


def show_largest(spec: RunSpec, options: Options) -> int:
    """Print, for each method, the largest depth, resolution or micro-batch under machine.device_bytes."""
    axis = options.chosen["--largest"]
    schedule = lowered_schedule(spec)

    def profile_of(changed: RunSpec) -> ModelProfile:
        from gems.profile.store import profile_of

        print(".", end="", file=sys.stderr, flush=True)
        return profile_of(changed)

    found = max_model_sizes(
        spec, axis, tuple(METHODS), lambda changed: partition_case(changed, schedule, profile_of(changed))
    )
    print(file=sys.stderr)
    answer = _answer(spec, axis, found)
    if options.json:
        print_json(answer)
        return 0
    limit = spec.machine.device_bytes or 0
    print(
        f"{answer['model']}, {spec.schedule.name} on {spec.parallel.partitions} ranks of {limit / 2**30:.2f} GiB: "
        "the largest that trains (predicted)"
    )
    print(f"{'method':<18}{axis:>12}{'parameters':>16}{'peak GiB':>10}{'value/ours':>12}{'params/ours':>12}")
    ours = found[0]
    for each in found:
        print(
            f"{each.method:<18}{each.value:>12}{each.num_parameters:>16}{each.peak_bytes / 2**30:>10.2f}"
            f"{_ratio(each.value, ours.value):>12}{_ratio(each.num_parameters, ours.num_parameters):>12}"
        )
    for peer, ratio in answer["parameters_over"].items():
        print(f"ours over {peer}: {ratio['parameters']} x the parameters, {ratio['value']} x the {axis}")
    return 0


def _answer(spec: RunSpec, axis: str, found: list[MaxModelSize]) -> dict[str, Any]:
    ours = found[0]
    return {
        "source": "predicted",
        "model": spec.model.name,
        "axis": axis,
        "schedule": spec.schedule.name,
        "partitions": spec.parallel.partitions,
        "limit_bytes": spec.machine.device_bytes,
        "methods": [
            {
                "method": each.method,
                axis: each.value,
                "num_parameters": each.num_parameters,
                "peak_bytes": each.peak_bytes,
            }
            for each in found
        ],
        "parameters_over": {
            each.method: {
                "parameters": _over(ours.num_parameters, each.num_parameters),
                "value": _over(ours.value, each.value),
            }
            for each in found
            if each.method in PEERS
        },
    }


def _over(ours: int, theirs: int) -> float | None:
    return round(ours / theirs, 3) if theirs else None


def _ratio(theirs: int, ours: int) -> str:
    return f"{theirs / ours:.3f}" if ours else "-"

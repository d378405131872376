"""How each method partitions the whole zoo, and what that costs.

Peak bytes and step time over the exact partition's.
Every model of conf/model with enough layers, on 4 and 8 ranks, under 1f1b and gems_master, at 256 x
256 px (sequences of 50 tokens), one micro-batch of 1; profiles are fake ones, and the peaks the
memory model's. Under gems_master a rank holds a pair of stages; `exact_plain` is the best partition
of a pipeline that ignores that, for one micro-batch in flight, and `exact_1f1b` the one for a
pipeline under 1F1B. The table is followed by the largest VGG and ResNet that each method trains on
16 GB, for each number of ranks, and the ratio to torchgpipe's; `--no-largest` leaves them out.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import partial
from itertools import product
from typing import Any

from gems.config.overrides import CONF
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.partition.compare import PLAIN, compare
from gems.partition.max_model_size import max_model_sizes
from gems.partition.methods import METHODS as ALL_METHODS
from gems.partition.methods import partition_by, partition_case
from gems.simulation.build import lowered_schedule
from scripts.bench.rig import Table, answered, composed, machine, options, spread, square

RANKS = (4, 8)
SCHEDULES = ("1f1b", "gems_master")
BUDGET_S = 20.0
PIPELINE = "exact_1f1b"
METHODS = (*(name for name in ALL_METHODS if name != "exact"), PLAIN, PIPELINE)
# Their last layers hold most of the bytes: parameters or logits over a vocabulary.
NOT_DECAYING = ("alexnet", "overfeat", "vgg16", "gnmt", "biglstm")
SEQUENCES = {"gnmt": "token_pairs", "biglstm": "tokens"}
LARGEST = {"vgg": "vgg116", "resnet": "resnet110_v2"}
LARGEST_METHODS = ("exact", "mcap", "torchgpipe_size", "torchgpipe_time", "pipedream", "even")
DEVICE = "16GB"


def _zoo_run(model: str, schedule: str, ranks: int, words: str = "") -> RunSpec:
    data = (
        f"data={SEQUENCES[model]}"
        if model in SEQUENCES
        else f"data=synthetic {square(256)} data.num_classes=1000"
    )
    replications = 8 if schedule == "gems_master" else "null"
    return composed(
        f"model={model} {data} partition=exact schedule={schedule} parallel.partitions={ranks}",
        f"parallel.micro_batches=8 parallel.replications={replications}",
        words,
    )


def _rows(only: str) -> Iterator[dict[str, Any]]:
    models = sorted(path.stem for path in (CONF / "model").glob("*.yaml") if only in path.stem)
    for model, ranks, schedule in product(models, RANKS, SCHEDULES):
        spec = _zoo_run(model, schedule, ranks)
        try:
            case = partition_case(spec, lowered_schedule(spec))
        except ConfigError as error:
            if error.key != "parallel.partitions":
                raise
            continue
        ours, *others = compare(case, "peak_bytes", BUDGET_S)
        peak_bytes = max(ours.peak_bytes)
        row: dict[str, Any] = {
            "model": model,
            "ranks": ranks,
            "schedule": schedule,
            "peak_bytes": peak_bytes,
            "step_s": ours.step_s,
            "gap": ours.partition.gap,
            "optimal": ours.partition.is_optimal,
            "solve_s": ours.partition.solve_s,
            "peak_ratio": {
                each.partition.method: max(each.peak_bytes) / peak_bytes for each in others
            },
            "time_ratio": {each.partition.method: each.step_s / ours.step_s for each in others},
        }
        if schedule == "gems_master":
            pipeline = _zoo_run(model, "1f1b", ranks)
            cut = partition_by(
                "exact", partition_case(pipeline, lowered_schedule(pipeline), case.profile)
            )
            row["peak_ratio"][PIPELINE] = (
                case.problem("peak_bytes").cost(cut.boundaries) / peak_bytes
            )
        yield row


def means(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the geometric means of the peak ratios by schedule and method, and the lowest ones."""
    groups: dict[str, list[float]] = {
        f"{schedule} {name}": [] for schedule in SCHEDULES for name in METHODS
    }
    groups |= {f"{name} over the pairs' cut, decaying CNNs": [] for name in (PLAIN, PIPELINE)}
    for row in found:
        for name, ratio in row["peak_ratio"].items():
            groups[f"{row['schedule']} {name}"].append(ratio)
            if name in (PLAIN, PIPELINE) and row["model"] not in NOT_DECAYING:
                groups[f"{name} over the pairs' cut, decaying CNNs"].append(ratio)
    return {name: spread(ratios) for name, ratios in groups.items() if ratios}


def largest_models() -> list[dict[str, Any]]:
    """Return the deepest VGG and ResNet that each method trains on a device, in layers and parameters."""
    table = Table(
        "family:<8",
        "ranks:>6",
        "method:>18",
        "depth:>8",
        "parameters=num_parameters:>14,",
        "ours over it=ours_over_it:>14.2f",
    )
    return table.rows(_largest())


def _largest() -> Iterator[dict[str, Any]]:
    for (family, model), ranks in product(LARGEST.items(), RANKS):
        spec = _zoo_run(model, "1f1b", ranks, f"machine.device_bytes={DEVICE}")
        entries = max_model_sizes(
            spec, "depth", LARGEST_METHODS, partial(partition_case, schedule=lowered_schedule(spec))
        )
        for each in entries:
            yield {
                "family": family,
                "ranks": ranks,
                "method": each.method,
                "depth": each.value,
                "num_parameters": each.num_parameters,
                "peak_bytes": each.peak_bytes,
                "ours_over_it": entries[0].num_parameters / max(1, each.num_parameters),
            }


def main(argv: list[str]) -> int:
    """Run the comparison and return 1 if another method is below the exact one."""
    given = options(__doc__, argv, json=False, only="", no_largest=False)
    machine()
    table = Table(
        "model:<15",
        "ranks:>5",
        "schedule:>12",
        "peak MiB=peak_bytes:>10.1f",
        *(f"{name[-8:]}={name}:>9.2f" for name in METHODS),
        "s=solve_s:>8.2f",
    )
    found = []
    for row in _rows(given.only):
        proof = "optimal" if row["optimal"] else f"gap {100 * row['gap']:.2f} %"
        table.row(row | dict.fromkeys(METHODS) | row["peak_ratio"], proof)
        found.append(row)
    answer = {"source": "predicted", "rows": found, "means": means(found)}
    if not given.no_largest:
        answer["largest"] = largest_models()
    for name, figures in {} if given.json else answer["means"].items():
        print(
            f"{name:<44} mean {figures['mean']:.3f}  least {figures['least']:.3f}  most"
            f" {figures['most']:.3f}"
        )
    is_beaten = any(ratio < 1 - 1e-9 for row in found for ratio in row["peak_ratio"].values())
    return answered(answer, is_beaten, given.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

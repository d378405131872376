"""How each method partitions the whole zoo, and what that costs.

Peak bytes and predicted step time over the exact partition's.

Every model of conf/model with enough layers, on 4 and 8 ranks, under 1f1b and gems_master, at 256 x 256 px (sequences
of 50 tokens), one micro-batch of 1; profiles are fake ones, and the peaks the memory model's. Under gems_master a rank
holds a pair of stages; `exact_plain` is the best partition of a pipeline that ignores that, for one micro-batch in
flight, and `exact_1f1b` the one for a pipeline under 1F1B. The table is followed by the largest VGG and ResNet that
each method trains on 16 GB, for each number of ranks, and the ratio to torchgpipe's.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from gems.config.compose import compose
from gems.config.overrides import CONF
from gems.config.schema import RunSpec
from gems.errors import ConfigError
from gems.partition.compare import PLAIN, compare
from gems.partition.max_model_size import max_model_sizes
from gems.partition.methods import METHODS as ALL_METHODS
from gems.partition.methods import partition_by, partition_case
from gems.simulation.build import lowered_schedule
from gems.simulation.costs import network_in_seconds
from scripts.bench.rig import MIB, Table, machine, parser, spread

SIDE_PX, MICRO_BATCHES, NUM_CLASSES = 256, 8, 1000
RANKS = (4, 8)
METHODS = tuple(name for name in ALL_METHODS if name != "exact")
SCHEDULES = ("1f1b", "gems_master")
BUDGET_S = 20.0
PIPELINE = "exact_1f1b"
# Their last layers hold most of the bytes: parameters or logits over a vocabulary.
NOT_DECAYING = ("alexnet", "overfeat", "vgg16", "gnmt", "biglstm")
SEQUENCES = {"gnmt": "token_pairs", "biglstm": "tokens"}
LARGEST = {"vgg": "vgg116", "resnet": "resnet110_v2"}
DEVICE = "16GB"


def zoo_run(model: str, schedule: str, ranks: int, *words: str) -> RunSpec:
    """Return the run of a model of the zoo."""
    sizes = [f"data.height_px={SIDE_PX}", f"data.width_px={SIDE_PX}", f"data.num_classes={NUM_CLASSES}"]
    data = [f"data={SEQUENCES[model]}"] if model in SEQUENCES else ["data=synthetic", *sizes]
    runs = MICRO_BATCHES if schedule == "gems_master" else "null"
    return compose([
        f"model={model}", *data, "partition=exact", f"schedule={schedule}", f"parallel.partitions={ranks}",
        f"parallel.micro_batches={MICRO_BATCHES}", f"parallel.replications={runs}", *words,
    ])  # fmt: skip


def rows(only: str) -> list[dict[str, Any]]:
    """Compare the methods on every case."""
    found = []
    names = (*METHODS, PLAIN, PIPELINE)
    table = Table(
        "model:<15", "ranks:>5", "schedule:>12", "peak MiB:>10.1f", *(f"{n[-8:]}:>9.2f" for n in names), "s:>8.2f"
    )
    for model in sorted(path.stem for path in (CONF / "model").glob("*.yaml")):
        if only not in model:
            continue
        for ranks in RANKS:
            for schedule in SCHEDULES:
                spec = zoo_run(model, schedule, ranks)
                try:
                    case = partition_case(spec, lowered_schedule(spec))
                except ConfigError as error:
                    if error.key != "parallel.partitions":
                        raise
                    continue
                judged = compare(case, "peak_bytes", BUDGET_S, network_in_seconds(spec))
                ours = judged[0]
                row = {
                    "model": model, "ranks": ranks, "schedule": schedule, "peak_bytes": max(ours.peak_bytes),
                    "step_s": ours.step_s, "gap": ours.partition.gap, "optimal": ours.partition.is_optimal,
                    "solve_s": ours.partition.solve_s,
                    "peak_ratio": {
                        each.partition.method: max(each.peak_bytes) / max(ours.peak_bytes) for each in judged[1:]
                    },
                    "time_ratio": {each.partition.method: each.step_s / ours.step_s for each in judged[1:]},
                }  # fmt: skip
                if schedule == "gems_master":
                    pipeline = zoo_run(model, "1f1b", ranks)
                    found_for = partition_by(
                        "exact", partition_case(pipeline, lowered_schedule(pipeline), case.profile)
                    )
                    cost = case.problem("peak_bytes").cost(found_for.boundaries)
                    row["peak_ratio"][PIPELINE] = cost / max(ours.peak_bytes)
                table.row(
                    model, ranks, schedule, row["peak_bytes"] / MIB, *(row["peak_ratio"].get(name) for name in names),
                    row["solve_s"], note="optimal" if row["optimal"] else f"gap {100 * row['gap']:.2f} %",
                )  # fmt: skip
                found.append(row)
    return found


def means(found: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the geometric means of the peak ratios by schedule and method, and the lowest ones."""
    answer: dict[str, Any] = {}
    for schedule in SCHEDULES:
        chosen = [row for row in found if row["schedule"] == schedule]
        for name in (*METHODS, PLAIN, PIPELINE):
            ratios = [row["peak_ratio"][name] for row in chosen if name in row["peak_ratio"]]
            if ratios:
                answer[f"{schedule} {name}"] = spread(ratios)
    pairs = [row["peak_ratio"] for row in found if PLAIN in row["peak_ratio"] and row["model"] not in NOT_DECAYING]
    for name in (PLAIN, PIPELINE) if pairs else ():
        answer[f"{name} over the pairs' cut, decaying CNNs"] = spread([ratios[name] for ratios in pairs])
    return answer


def largest_models() -> list[dict[str, Any]]:
    """Return the deepest VGG and ResNet that each method trains on a device, in layers and parameters."""
    found = []
    table = Table("family:<8", "ranks:>6", "method:>18", "depth:>8", "M parameters:>14.1f", "ours over it:>14.2f")
    for family, model in LARGEST.items():
        for ranks in RANKS:
            spec = zoo_run(model, "1f1b", ranks, f"machine.device_bytes={DEVICE}")
            schedule = lowered_schedule(spec)
            methods = ("exact", "mcap", "torchgpipe_size", "torchgpipe_time", "pipedream", "even")
            entries = max_model_sizes(
                spec, "depth", methods, lambda changed, schedule=schedule: partition_case(changed, schedule)
            )  # type: ignore[misc]
            for each in entries:
                ratio = entries[0].num_parameters / max(1, each.num_parameters)
                table.row(family, ranks, each.method, each.value, each.num_parameters / 1e6, ratio)
                found.append({
                    "family": family, "ranks": ranks, "method": each.method, "depth": each.value,
                    "num_parameters": each.num_parameters, "peak_bytes": each.peak_bytes, "ours_over_it": ratio,
                })  # fmt: skip
    return found


def main() -> int:
    """Run the comparison and return 1 if another method is below the exact one."""
    options = parser(__doc__, "json", "only")
    options.add_argument("--no-largest", action="store_true", help="leave out the largest models")
    given = options.parse_args()
    machine()
    found = rows(given.only)
    answer = {"source": "predicted", "rows": found, "means": means(found)}
    if not given.no_largest:
        answer["largest"] = largest_models()
    if given.json:
        json.dump(answer, sys.stdout)
    else:
        for name, figures in answer["means"].items():
            print(f"{name:<44} mean {figures['mean']:.3f}  least {figures['least']:.3f}  most {figures['most']:.3f}")
    return int(any(ratio < 1 - 1e-9 for row in found for ratio in row["peak_ratio"].values()))


if __name__ == "__main__":
    sys.exit(main())

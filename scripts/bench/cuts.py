"""Where each method cuts the whole zoo, and what that costs: peak bytes and predicted step time over the exact cut's.

Every model of conf/model with layers enough, on 4 and 8 ranks, under 1f1b and gems_master, at 256 x 256 px (sequences of
50 tokens), one micro-batch of 1; profiles are fake ones, and the peaks the memory model's. Under gems_master a rank
holds a pair of stages; `exact_plain` is the best cut of a pipeline that does not know that, for one micro-batch in
flight, and `exact_1f1b` the one for a pipeline under 1F1B. Behind the table stand,
for each number of ranks, the largest VGG and ResNet that each method trains on 16 GB, and the ratio to torchgpipe's.

`--json` prints one object; `--only WORD` takes the models whose name has it; `--no-largest` leaves that part out.
"""

from __future__ import annotations

import argparse
import json
import math
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
from scripts.bench.spread import spread

SIDE_PX, MICRO_BATCHES, NUM_CLASSES = 256, 8, 1000
RANKS = (4, 8)
METHODS = tuple(name for name in ALL_METHODS if name != "exact")
SCHEDULES = ("1f1b", "gems_master")
BUDGET_S = 20.0
# Their last layers hold most of the bytes: parameters or logits over a vocabulary.
PIPELINE = "exact_1f1b"
NOT_DECAYING = ("alexnet", "overfeat", "vgg16", "gnmt", "biglstm")
SEQUENCES = {"gnmt": "token_pairs", "biglstm": "tokens"}
LARGEST = {"vgg": "vgg116", "resnet": "resnet110_v2"}
DEVICE = "16GB"


def spec_of(model: str, schedule: str, ranks: int, *words: str) -> RunSpec:
    """Return the run of a model of the zoo."""
    images = [
        "data=synthetic",
        f"data.height_px={SIDE_PX}",
        f"data.width_px={SIDE_PX}",
        f"data.num_classes={NUM_CLASSES}",
    ]
    data = [f"data={SEQUENCES[model]}"] if model in SEQUENCES else images
    runs = MICRO_BATCHES if schedule == "gems_master" else "null"
    return compose([
        f"model={model}", *data, "partition=exact", f"schedule={schedule}", f"parallel.partitions={ranks}",
        f"parallel.micro_batches={MICRO_BATCHES}", f"parallel.replications={runs}", *words,
    ])  # fmt: skip


def rows(only: str) -> list[dict[str, Any]]:
    """Compare the methods on every case."""
    found = []
    for model in sorted(path.stem for path in (CONF / "model").glob("*.yaml")):
        if only not in model:
            continue
        for ranks in RANKS:
            for schedule in SCHEDULES:
                spec = spec_of(model, schedule, ranks)
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
                    "peak_ratio": {each.partition.method: max(each.peak_bytes) / max(ours.peak_bytes) for each in judged[1:]},
                    "time_ratio": {each.partition.method: each.step_s / ours.step_s for each in judged[1:]},
                }  # fmt: skip
                if schedule == "gems_master":
                    pipeline = spec_of(model, "1f1b", ranks)
                    found_for = partition_by(
                        "exact", partition_case(pipeline, lowered_schedule(pipeline), case.profile)
                    )
                    cost = case.problem("peak_bytes").cost(found_for.boundaries)
                    row["peak_ratio"][PIPELINE] = cost / max(ours.peak_bytes)
                print_row(row)
                found.append(row)
    return found


def print_row(row: dict[str, Any]) -> None:
    """Print one case on stderr as it is found."""
    proof = "optimal" if row["optimal"] else f"gap {100 * row['gap']:.2f} %"
    ratios = " ".join(f"{row['peak_ratio'].get(name, math.nan):>8.2f}" for name in (*METHODS, PLAIN, PIPELINE))
    print(
        f"{row['model']:<15}{row['ranks']:>3} {row['schedule']:<12}{row['peak_bytes'] / 2**20:>10.1f} {ratios}"
        f"{row['solve_s']:>8.2f}  {proof}",
        file=sys.stderr, flush=True,
    )  # fmt: skip


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
    for family, model in LARGEST.items():
        for ranks in RANKS:
            spec = spec_of(model, "1f1b", ranks, f"machine.device_bytes={DEVICE}")
            schedule = lowered_schedule(spec)
            methods = ("exact", "mcap", "torchgpipe_size", "torchgpipe_time", "pipedream", "even")
            entries = max_model_sizes(
                spec, "depth", methods, lambda changed, schedule=schedule: partition_case(changed, schedule)
            )  # type: ignore[misc]
            ours = entries[0]
            for each in entries:
                print(
                    f"{family:<8}{ranks:>3} {each.method:<16}depth {each.value:>6}  {each.num_parameters / 1e6:>9.1f} M parameters"
                    f"  ours over it {ours.num_parameters / max(1, each.num_parameters):.2f}",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
                found.append({"family": family, "ranks": ranks, "method": each.method, "depth": each.value,
                              "num_parameters": each.num_parameters, "peak_bytes": each.peak_bytes,
                              "ours_over_it": ours.num_parameters / max(1, each.num_parameters)})  # fmt: skip
    return found


def main() -> int:
    """Run the comparison; exit code 1 where another method is below the exact one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--no-largest", action="store_true")
    options = parser.parse_args()
    head = " ".join(f"{name[-8:]:>8}" for name in (*METHODS, PLAIN, PIPELINE))
    print(f"{'model':<15}{'':>3} {'schedule':<12}{'peak MiB':>10} {head}{'s':>8}", file=sys.stderr)
    found = rows(options.only)
    answer = {"source": "predicted", "rows": found, "means": means(found)}
    if not options.no_largest:
        answer["largest"] = largest_models()
    if options.json:
        json.dump(answer, sys.stdout)
    else:
        for name, figures in answer["means"].items():
            print(f"{name:<44} mean {figures['mean']:.3f}  least {figures['least']:.3f}  most {figures['most']:.3f}")
    is_least = all(ratio >= 1 - 1e-9 for row in found for ratio in row["peak_ratio"].values())
    return 0 if is_least else 1


if __name__ == "__main__":
    sys.exit(main())

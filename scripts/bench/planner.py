"""Time the planner, and compare its choice with running all configurations.

Counts the seconds to an answer for ResNet-1001-v2 at 2048 x 2048 px on 8 and 64 GPUs.

`--only large` plans the eight cases of modelled GPUs in nodes of eight: 16, 32, 80 and 141 GB of
memory, with the rates of a V100, V100, A100 and H200, links of 12.5 GB/s between and 100 GB/s
within nodes, and 2 TB of host memory a node, all assumed. `--only small` runs every configuration
of a small space on 4 emulated ranks, and compares the fastest with the plan's choice. Profiles are
taken before, into the cache. Prints rows on stderr and JSON on stdout; the exit code is 1 if an
answer takes 15 s of the processor, or if the choice is 3 % slower than the best.
"""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from itertools import product
from statistics import median
from typing import Any

from gems.errors import DoesNotFitError
from gems.plan.draft import Draft
from gems.search.best_first import search
from gems.search.candidate import Candidate, candidates
from gems.search.choice import Choice
from gems.search.evaluate import PROFILED_SIZES, Planner
from gems.search.fastest import fastest
from scripts.bench.rig import (
    answered,
    composed,
    counted_steps_s,
    finished_run,
    log,
    machine,
    options,
    square,
)

GPUS = (8, 64)
MACHINES = (("v100", 16), ("v100", 32), ("a100", 80), ("h200", 141))
LARGE = (
    f"model=resnet1001_v2 data=synthetic {square(2048)} machine.ranks_per_node=8"
    " machine.node_bytes_per_s=100e9 machine.link_bytes_per_s=12.5e9 machine.host_bytes=2TB"
)
IMAGES_PER_GPU = 2
MAX_S = 15.0
MAX_SLOWER = 0.03
SMALL = (
    f"model=resnet20_v1 data=synthetic {square(64)} machine=emulated cost=profile"
    " machine.flops_per_s=4e9 train.steps=5 benchmark.skip_steps=1 parallel.partitions=4"
)
SMALL_GPUS = 4
SMALL_BATCH = 16
NUM_SMALL = 40
SEARCHED = ("zb_h1", "zb_v", "interleaved_1f1b")


def _large(num_gpus: int, gpu: str, size_gb: int) -> dict[str, Any]:
    spec = composed(
        LARGE, f"machine={gpu} machine.device_bytes={size_gb}GB parallel.gpus={num_gpus}"
    )
    for size in PROFILED_SIZES:  # into the cache
        Planner(spec, None).model(size)
    row: dict[str, Any] = {"gpus": num_gpus, "machine": gpu, "device_gb": size_gb}
    begin = time.perf_counter()
    processor_begin = time.process_time()
    try:
        answer, _ = fastest(Planner(spec, spec.machine.device_bytes), [IMAGES_PER_GPU * num_gpus])
        first = answer["choices"][0]
        row |= {
            key: answer[key]
            for key in ("candidates", "simulated", "left", "profile_s", "search_s", "is_exact")
        }
        row |= {key: first[key] for key in ("step_s", "images_per_s", "efficiency", "overrides")}
        row["peak_bytes"] = max(first["peak_bytes"])
    except DoesNotFitError as error:
        row["does_not_fit"] = str(error)
    row |= {
        "answer_s": time.perf_counter() - begin,
        "processor_s": time.process_time() - processor_begin,
    }
    log(str(row))
    return row


def small() -> dict[str, Any]:
    """Run a whole space of schedules and pipelines on emulated ranks, and plan in it."""
    planner = Planner(composed(SMALL), None)
    space = small_space(planner.model(1).profile.num_layers)
    result = search(space, planner.rules(), 1)
    rows = {}
    for one in space:
        choice = planner.evaluate(one)
        if isinstance(choice, Choice):
            rows[one] = {
                "configuration": list(choice.overrides),
                "simulated_s": choice.step_s,
                "emulated_s": _emulated_s(choice),
            }
            log(str(rows[one]))
    picked = rows[result.best[0].candidate]
    best = min(rows.values(), key=lambda row: row["emulated_s"])
    return {
        "configurations": len(rows),
        "picked": picked,
        "best": best,
        "slower": picked["emulated_s"] / best["emulated_s"] - 1,
        "rows": list(rows.values()),
    }


def small_space(num_layers: int) -> list[Candidate]:
    """Return 40 configurations of pipelines on 4 GPUs, those without a search first."""
    every = candidates(SMALL_GPUS, SMALL_BATCH, num_layers, has_policies=False)
    several = [one for one in every if one.partitions > 1 and one.micro_batches > 1]
    several = [one for one in several if one.family.is_quick] + [
        one for one in several if one.schedule in SEARCHED
    ]
    return several[:: max(1, len(several) // NUM_SMALL)][:NUM_SMALL]


def _emulated_s(choice: Choice) -> float:
    words = [word for word in choice.overrides if not word.startswith("memory")]
    spec = composed(SMALL, words)
    with finished_run(replace(spec, cost=Draft(spec).costs.cost)) as folder:
        return float(median(counted_steps_s(folder)))


def main(argv: list[str]) -> int:
    """Run the chosen parts and return the exit code."""
    only = {"choices": ("large", "small")}
    gpus = {"type": int, "nargs": "*", "default": GPUS}
    arguments = options(__doc__, argv, only=only, gpus=gpus)
    machine()
    answer: dict[str, Any] = {"source": "simulated"}
    if arguments.only != "small":
        answer["large"] = [
            _large(num_gpus, *gpu) for num_gpus, gpu in product(arguments.gpus, MACHINES)
        ]
    if arguments.only != "large":
        answer["small"] = small()
    is_slow = any(row["processor_s"] >= MAX_S for row in answer.get("large", ()))
    return answered(answer, is_slow or answer.get("small", {}).get("slower", 0.0) > MAX_SLOWER)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

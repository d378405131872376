"""The planner: seconds to an answer for ResNet-1001-v2 at 2048 x 2048 px on 8 and 64 GPUs, and its choice against running everything.

`--only large` plans the eight cases of modelled GPUs in nodes of eight: 16, 32, 80 and 141 GB of memory, with the rates of a
V100, V100, A100 and H200, links of 12.5 GB/s between and 100 GB/s within nodes, and 2 TB of host memory a node, all assumed.
`--only small` runs every configuration of a small space on 4 emulated ranks, and compares the fastest with the plan's choice.
Profiles are taken before, into the cache. Prints rows on stderr and JSON on stdout; exit code 1 where an answer takes 60 s or the choice is 3 % slower than the best.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from gems.cli.framework import Options
from gems.cli.plan import planned_answer
from gems.config.compose import compose
from gems.errors import DoesNotFitError
from gems.launch.local_launcher import mpiexec_argv, rank_environment, run_ranks
from gems.planner.evaluate import PROFILED_SIZES, Planner
from gems.planner.search.best_first import search
from gems.planner.search.candidate import Candidate, candidates
from gems.planner.search.choice import Choice
from gems.runs.prepare import prepare

GPUS = (8, 64)
MACHINES = (("v100", 16), ("v100", 32), ("a100", 80), ("h200", 141))
LARGE = (
    "model=resnet1001_v2", "data=synthetic", "data.height_px=2048", "data.width_px=2048", "machine.ranks_per_node=8",
    "machine.node_bytes_per_s=100e9", "machine.link_bytes_per_s=12.5e9", "machine.host_bytes=2TB",
)  # fmt: skip
IMAGES_PER_GPU = 2
MAX_S, MAX_SLOWER = 60.0, 0.03
SMALL = (
    "model=resnet20_v1", "data=synthetic", "data.height_px=64", "data.width_px=64", "machine=emulated", "cost=profile",
    "machine.flops_per_s=4e9", "train.steps=5", "train.warmup_steps=1", "parallel.partitions=4",
)  # fmt: skip
SMALL_GPUS, SMALL_BATCH, NUM_SMALL = 4, 16, 40


def large(gpus: Sequence[int]) -> list[dict[str, Any]]:
    """Plan the eight cases."""
    rows = []
    for num_gpus in gpus:
        for machine, size_gb in MACHINES:
            words = [
                *LARGE, f"machine={machine}", f"machine.device_bytes={size_gb}GB", f"parallel.gpus={num_gpus}",
            ]  # fmt: skip
            chosen = {"--global-batch": str(IMAGES_PER_GPU * num_gpus)}
            row: dict[str, Any] = {"gpus": num_gpus, "machine": machine, "device_gb": size_gb}
            spec = compose(words)
            for size in PROFILED_SIZES:  # into the cache
                Planner(spec, None).profile(size)
            begin = time.perf_counter()
            try:
                answer = planned_answer(spec, Options(chosen=chosen))[0]
                first = answer["choices"][0]
                row |= {
                    key: answer[key] for key in ("candidates", "simulated", "left", "profile_s", "search_s", "is_exact")
                }
                row |= {key: first[key] for key in ("step_s", "images_per_s", "efficiency", "overrides")}
                row["peak_bytes"] = max(first["peak_bytes"])
            except DoesNotFitError as error:
                row["does_not_fit"] = str(error)
            row["answer_s"] = time.perf_counter() - begin
            print(row, file=sys.stderr, flush=True)
            rows.append(row)
    return rows


def small() -> dict[str, Any]:
    """Run a space of schedules, pipelines and micro-batches on emulated ranks, all of it, and plans in it."""
    spec = compose(SMALL)
    planner = Planner(spec, None)
    asked = small_space(planner)
    found = search(asked, planner.rules(), 1)
    rows = []
    for one in asked:
        choice = planner.evaluate(one)
        if isinstance(choice, Choice):
            row = {
                "configuration": list(one.overrides(choice.boundaries)),
                "simulated_s": choice.step_s,
                "emulated_s": emulated_s(choice),
            }
            print(row, file=sys.stderr, flush=True)
            rows.append((one, row))
    picked = next(row for one, row in rows if one == found.best[0].candidate)
    best = min((row for _, row in rows), key=lambda row: row["emulated_s"])
    return {
        "configurations": len(rows), "picked": picked, "best": best, "slower": picked["emulated_s"] / best["emulated_s"] - 1,
        "rows": [row for _, row in rows],
    }  # fmt: skip


def small_space(planner: Planner) -> list[Candidate]:
    """Return 40 configurations of 4 ranks: those that follow from counts, every one of a pipeline of 4 ranks before others."""
    layers = planner.profile(1).num_layers
    asked = [one for one in candidates(SMALL_GPUS, SMALL_BATCH, layers, has_policies=False) if one.family.is_quick]
    asked += [
        one
        for one in candidates(SMALL_GPUS, SMALL_BATCH, layers, has_policies=False)
        if one.schedule in ("zb_h1", "zb_v", "interleaved_1f1b")
    ]
    several = [one for one in asked if one.partitions > 1 and one.micro_batches > 1]
    stride = max(1, len(several) // NUM_SMALL)
    return several[::stride][:NUM_SMALL]


def emulated_s(choice: Choice) -> float:
    """Return the median step of a configuration on emulated ranks, in seconds."""
    words = [word for word in choice.candidate.overrides(choice.boundaries) if not word.startswith("memory")]
    spec = compose([*SMALL, *words])
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(replace(spec, runs_dir=scratch))
        argv = mpiexec_argv(spec.world_size, [sys.executable, "-m", "gems.engine.run", str(folder.path)])
        ended = run_ranks(argv, rank_environment(1), folder.logs / "ranks.log", timeout_s=120.0, echo=False)
        if ended.returncode:
            raise SystemExit("\n".join(ended.tail))
        return median_step_s(folder.path)


def median_step_s(folder: Path) -> float:
    """Return the median of a run's steps without its warm-up, in seconds."""
    from statistics import median

    from analysis.io.load import load_parts
    from analysis.metrics.run_metrics import step_times_s

    steps = load_parts(folder).trace.steps
    return float(median(step_times_s(steps)[steps["is_warmup"] == 0]))


def main() -> int:
    """Run what was asked for."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--only", choices=("large", "small"))
    parser.add_argument("--gpus", type=int, nargs="*", default=GPUS)
    options = parser.parse_args()
    only = options.only
    answer: dict[str, Any] = {"source": "simulated"}
    if only != "small":
        answer["large"] = large(options.gpus)
    if only != "large":
        answer["small"] = small()
    json.dump(answer, sys.stdout)
    slow = any(row["answer_s"] >= MAX_S for row in answer.get("large", ()))
    return int(slow or answer.get("small", {}).get("slower", 0.0) > MAX_SLOWER)


if __name__ == "__main__":
    sys.exit(main())

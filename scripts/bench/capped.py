"""Schedules found under a cap beside GEMS and `memory=plan`, trained on this machine.

Bytes and images per second.
Two ranks train ResNet-56 by a measured profile: gems_master, `capped` under the activations that
GEMS holds without and with memory actions, and under `memory=plan` 1F1B and the schedule that is
searched with its plan, with the device bytes that the list with recomputation is predicted to need.
All are run in turn, A B C D A B C D, and ratios are those of one round. Takes Hydra overrides, for
every case. Prints a table on stderr and JSON on stdout.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.runs.run_plan import plan_run, predict_peak
from gems.utils.atomic_io import read_json
from scripts.bench.rig import (
    Table,
    answered,
    composed,
    counted_steps_s,
    finished_run,
    in_turns,
    machine,
)

DEFAULTS = (
    "model=resnet56_v1 data=synthetic data.height_px=128 data.width_px=128 profile=measured"
    " memory.min_offload_bytes=0 parallel.partitions=2 parallel.micro_batches=8"
    " parallel.micro_batch_size=2 benchmark.skip_steps=1 train.steps=4"
)
CAPPED = "schedule=capped schedule.activation_cap=1"
ROUNDS = 3
GEMS = "gems_master"
WITH_RECOMPUTE = "capped K=1 recompute"
UNDER_PLAN = {"1f1b memory=plan": "schedule=1f1b", "capped memory=plan": "schedule=capped"}
WAYS = {
    GEMS: "schedule=gems_master",
    "capped K=1": CAPPED,
    WITH_RECOMPUTE: f"{CAPPED} schedule.memory_actions=[recompute]",
    "capped K=1 offload": f"{CAPPED} schedule.memory_actions=[offload]",
}


def main(overrides: list[str]) -> int:
    """Run all ways in turn and print them."""
    machine()
    table = Table(
        "schedule=way:<26",
        "activations MiB=activation_bytes:>15.1f",
        "predicted MiB=predicted_bytes:>14.1f",
        "step ms=step_s:>9.1f",
        "images/s=images_per_s:>9.2f",
        "over GEMS=ratio:>10.2f",
    )
    specs = {way: composed(DEFAULTS, words, overrides) for way, words in WAYS.items()}
    peak = predict_peak(plan_run(specs[WITH_RECOMPUTE]))
    assert peak is not None
    limit = f"memory=plan memory.limit_bytes={peak.device_bytes}"
    specs |= {
        way: composed(DEFAULTS, f"{words} {limit}", overrides) for way, words in UNDER_PLAN.items()
    }
    calls: dict[str, Callable[[], dict[str, Any]]] = {
        way: partial(_run, spec) for way, spec in specs.items()
    }
    found = in_turns(calls, ROUNDS)
    rows = []
    for way, runs in found.items():
        ratios = [
            gems["step_s"] / run["step_s"] for gems, run in zip(found[GEMS], runs, strict=True)
        ]
        step_s = statistics.median(run["step_s"] for run in runs)
        rows.append(
            table.row(
                runs[0]
                | {
                    "way": way,
                    "step_s": step_s,
                    "ratio": statistics.median(ratios),
                    "images_per_s": global_batch(specs[way]) / step_s,
                }
            )
        )
    return answered(rows, False)


def _run(spec: RunSpec) -> dict[str, Any]:
    """Train, and return the median step with the most that any rank's activations took, counted and predicted."""
    with finished_run(spec) as folder:
        result = read_json(folder.result_json)
        return {
            "step_s": statistics.median(counted_steps_s(folder).tolist()),
            "activation_bytes": max(result["peak_activation_bytes"]),
            "predicted_bytes": max(result["predicted_activation_bytes"]),
        }


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

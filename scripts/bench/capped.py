"""Schedules found under a cap beside GEMS and `memory=plan`, trained on this machine.

Bytes and images per second.
Two ranks train ResNet-56 by a measured profile: gems_master, `capped` under the activations that
GEMS holds without and with memory actions, and under `memory=plan` 1F1B and the schedule that is
searched with its plan, with the device bytes that the list with recomputation is predicted to need.
All are run in turn, A B C D A B C D, and ratios are those of one round. Takes Hydra overrides, for
every case. Prints a table on stderr and JSON on stdout.
"""

from __future__ import annotations

import sys

from gems.plan.evaluate import evaluate
from scripts.bench.rig import Table, answered, composed, machine, trained_in_turns

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
        "over GEMS=over_gems:>10.2f",
    )
    specs = {way: composed(DEFAULTS, words, overrides) for way, words in WAYS.items()}
    peak = evaluate(specs[WITH_RECOMPUTE]).peak
    assert peak is not None
    limit = f"memory=plan memory.limit_bytes={peak.device_bytes}"
    specs |= {
        way: composed(DEFAULTS, f"{words} {limit}", overrides) for way, words in UNDER_PLAN.items()
    }
    rows = table.rows(
        (
            row | ({"over_gems": 1.0 / row["ratio"]} if row.get("ratio") else {})
            for row in trained_in_turns(specs, ROUNDS)
        ),
        lambda row: row.get("failed", ""),
    )
    return answered(rows, any("failed" in row for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What memory policies move and hold, on the processor.

Traffic: bytes moved to host memory over the unique bytes that autograd saved, with every layer's saved tensors
offloaded: ours by the counters of the engine's activation store in a training step, torch's save_on_cpu by what its
hook copies, and torchtune's rule (torchtune itself is not installed). Parameters, buffers and images count in neither;
what a hook copies of parameters besides is given apart. Unique is each storage once, however many tensors share it, by
a hook of its own.

Peaks: for each policy the most bytes of a step on one rank, as the engine counts saved storages and as torch's profiler
sees its allocator, beside what `gems memory` predicts from a profile on fake tensors; each in a process of its own,
with two micro-batches of one image (1f1b). A policy with a limit is given the peak less half of what is saved.

The exit code is 1 if ours moves anything twice, a predicted peak is more than 5 % off, or a run fails.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from gems.errors import GemsError
from gems.models import layers_of
from gems.models.build import build_layers, input_spec
from scripts.bench.memory_rig import (
    HOOKS,
    OneRank,
    all_offloaded,
    engine_under,
    hook_traffic,
    one_rank,
    one_rank_case,
    planned_outcome,
)
from scripts.bench.rig import MIB, Table, child, machine, parser

TRAFFIC_CASES = (("vgg16", 224), ("resnet50", 224), ("inception_v3", 256))
BATCH = 2
PEAK_CASES = (("resnet110_v2", 64), ("vgg16", 256), ("unet", 256))
POLICIES = {
    "keep": ["memory=keep"],
    "vdnn_all": ["memory=vdnn_all"],
    "vdnn_conv": ["memory=vdnn_conv"],
    "lms": ["memory=lms", "memory.limit_bytes={limit}"],
    "lms_limit": ["memory=lms_limit", "memory.limit_bytes={limit}"],
    "recompute": ["memory=recompute"],
    "selective": ["memory=recompute", "memory.recompute=selective"],
    "plan": ["memory=plan", "memory.limit_bytes={limit}"],
}
MICRO_BATCHES = 2
MAX_ERROR = 0.05


def traffic_row(model: str, side_px: int) -> dict[str, Any]:
    """Measure what each moves of one model."""
    words = [f"parallel.micro_batches={MICRO_BATCHES}", f"parallel.micro_batch_size={BATCH}"]
    spec = one_rank(model, side_px, *words, "memory.min_offload_bytes=0")
    layers = layers_of(spec.model, spec.data)
    given = input_spec(spec.data, BATCH)
    row: dict[str, Any] = {"model": model, "side_px": side_px, "batch": BATCH}
    for name in HOOKS:
        modules = nn.ModuleList(build_layers(layers, 0, len(layers), spec.seed))
        found = hook_traffic(name, modules, torch.randn(given.shape))
        row["unique_bytes"] = found.saved_bytes
        row[name] = {
            "moved_bytes": found.moved_bytes, "factor": found.moved_bytes / found.saved_bytes,
            "parameter_bytes": found.known_bytes,
        }  # fmt: skip
    ours = OneRank(spec, *all_offloaded(spec))
    ours.step()
    moved_bytes = ours.counters.offloaded_bytes / MICRO_BATCHES
    row["ours"] = {
        "moved_bytes": moved_bytes, "factor": moved_bytes / row["unique_bytes"], "parameter_bytes": 0,
        "back_bytes": ours.counters.prefetched_bytes / MICRO_BATCHES, "num_misses": ours.counters.num_misses,
    }  # fmt: skip
    return row


def traffic(only: str) -> list[dict[str, Any]]:
    """Print the factors side by side."""
    names = ["ours", *HOOKS]
    table = Table("bytes moved / unique bytes saved:<34", "unique MiB:12.1f", *(f"{name}:18.3f" for name in names))
    rows = []
    for model, side_px in TRAFFIC_CASES:
        if only in model:
            row = traffic_row(model, side_px)
            rows.append(row)
            factors = (row[name]["factor"] for name in names)
            table.row(f"{model}, {side_px} px, batch {BATCH}", row["unique_bytes"] / MIB, *factors)
    return rows


def measured_policy(model: str, side_px: int, policy: str) -> dict[str, Any]:
    """Measure one policy in this process, beside its prediction."""
    words = [f"parallel.micro_batches={MICRO_BATCHES}", "parallel.micro_batch_size=1", "schedule=1f1b"]
    (kept,) = one_rank_case(one_rank(model, side_px, *words)).kept.ranks
    limit = kept.peak_bytes - kept.peak_activation_bytes // 2
    words += [word.format(limit=limit) for word in POLICIES[policy]]
    spec = one_rank(model, side_px, *words)
    try:
        outcome = planned_outcome(spec, one_rank_case(spec))
    except GemsError as error:
        return {"refused": str(error)}
    (rank,) = outcome.ranks
    return {
        "predicted_bytes": rank.peak_bytes,
        "predicted_activation_bytes": rank.peak_activation_bytes,
        "predicted_host_bytes": rank.peak_host_bytes,
        **asdict(engine_under(spec, outcome).peaks()),
    }


def peaks(only: str, policies: Sequence[str]) -> list[dict[str, Any]]:
    """Print measured beside predicted peaks, each policy in a process of its own."""
    table = Table(
        "most MiB of a step, 1 rank:<26", "policy:>10", "saved, counted:>16.2f", "predicted:>11.2f", "error %:>8.2f",
        "all, allocated:>16.2f", "predicted:>11.2f", "error %:>8.2f", "host:>8.1f",
    )  # fmt: skip
    rows = []
    for model, side_px in PEAK_CASES:
        for policy in policies if only in model else ():
            words = ["--threads", str(torch.get_num_threads()), "--alone", model, str(side_px), policy]
            row = {"model": model, "side_px": side_px, "policy": policy, **child("scripts.bench.memory", *words)}
            rows.append(row)
            what = f"{model}, {side_px} px", policy
            if "allocated_bytes" not in row:
                table.row(*what, note=f"refused: {row['refused']}" if "refused" in row else f"failed: {row['failed']}")
                continue
            row["error"] = row["predicted_bytes"] / row["allocated_bytes"] - 1
            row["activation_error"] = row["predicted_activation_bytes"] / row["activation_bytes"] - 1
            table.row(
                *what, row["activation_bytes"] / MIB, row["predicted_activation_bytes"] / MIB,
                100 * row["activation_error"], row["allocated_bytes"] / MIB, row["predicted_bytes"] / MIB,
                100 * row["error"], row["host_bytes"] / MIB,
            )  # fmt: skip
    return rows


def main(argv: Sequence[str]) -> int:
    """Print both tables, or with --json one object."""
    options = parser(__doc__, "json", "only", "threads")
    options.add_argument("--part", default="all", choices=("all", "traffic", "peaks"))
    options.add_argument("--policies", default=",".join(POLICIES))
    options.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    if given.alone:
        model, side_px, policy = given.alone
        print(json.dumps(measured_policy(model, int(side_px), policy)))
        return 0
    machine()
    moved = traffic(given.only) if given.part != "peaks" else []
    held = peaks(given.only, given.policies.split(",")) if given.part != "traffic" else []
    if given.json:
        print(json.dumps({"device": "cpu", "torch": torch.__version__, "traffic": moved, "peaks": held}))
    is_once = all(row["ours"]["factor"] <= 1.0 for row in moved)
    errors = [row[name] for row in held for name in ("error", "activation_error") if name in row]
    has_failed = any("failed" in row for row in held)
    return int(not is_once or has_failed or any(abs(error) > MAX_ERROR for error in errors))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

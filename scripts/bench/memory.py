"""Bytes that memory policies move and hold, on a CPU.

Traffic: bytes moved to host memory over the unique bytes that autograd saved, with every layer's
saved tensors offloaded: ours by the counters of the engine's activation store in a training step,
torch's save_on_cpu by what its hook copies, and torchtune's rule (torchtune itself is not
installed). Parameters, buffers and images count in neither; what a hook copies of parameters
besides is given apart. Unique is each storage once, however many tensors share it, by a hook of its
own.

Peaks: for each policy the most bytes of a step on one rank, as the engine counts saved storages and
as torch's profiler sees its allocator, beside what `gems memory` predicts from a profile on fake
tensors; each in a process of its own, with two micro-batches of one image (1f1b). A policy with a
limit is given the peak less half of what is saved.

The exit code is 1 if ours moves anything twice, a predicted peak is more than 5 % off, or a run
fails.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

import torch

from gems.models.build import input_spec
from gems.plan.evaluate import evaluate
from scripts.bench import memory_rig
from scripts.bench.memory_rig import HOOKS, OneRank, one_rank
from scripts.bench.rig import Table, answered, in_child, machine, options

TRAFFIC_CASES = (("vgg16", 224), ("resnet50", 224), ("inception_v3", 256))
BATCH = 2
PEAK_CASES = (("resnet110_v2", 64), ("vgg16", 256), ("unet", 256))
POLICIES = {
    "keep": "memory=keep",
    "vdnn_all": "memory=vdnn_all",
    "vdnn_conv": "memory=vdnn_conv",
    "lms": "memory=lms memory.limit_bytes={limit}",
    "lms_limit": "memory=lms_limit memory.limit_bytes={limit}",
    "recompute": "memory=recompute",
    "selective": "memory=recompute memory.recompute=selective",
    "plan": "memory=plan memory.limit_bytes={limit}",
}
MICRO_BATCHES = 2
MAX_ERROR = 0.05


def _traffic_row(model: str, side_px: int) -> dict[str, Any]:
    words = (
        f"parallel.micro_batches={MICRO_BATCHES} parallel.micro_batch_size={BATCH}"
        " memory.min_offload_bytes=0"
    )
    spec = one_rank(model, side_px, words)
    row: dict[str, Any] = {"model": model, "side_px": side_px, "batch": BATCH}
    for name in HOOKS:
        traffic = memory_rig.hook_traffic(
            name,
            memory_rig.layer_modules(spec.model, spec.data),
            torch.randn(input_spec(spec.data, BATCH).shape),
        )
        row["unique_bytes"] = traffic.saved_bytes
        row[name] = _moved(row, traffic.moved_bytes, traffic.known_bytes)
    ours = OneRank(memory_rig.all_offloaded(spec))
    ours.step()
    assert ours.rank.train.store is not None
    counters = ours.rank.train.store.counters
    row["ours"] = _moved(row, counters.offloaded_bytes / MICRO_BATCHES, 0) | {
        "back_bytes": counters.prefetched_bytes / MICRO_BATCHES,
        "num_misses": counters.num_misses,
    }
    return row


def _moved(row: dict[str, Any], moved_bytes: float, parameter_bytes: int) -> dict[str, Any]:
    factor = moved_bytes / row["unique_bytes"]
    return {"moved_bytes": moved_bytes, "factor": factor, "parameter_bytes": parameter_bytes}


def _traffic(only: str) -> list[dict[str, Any]]:
    names = ("ours", *HOOKS)
    heads = (f"{name}:18.3f" for name in names)
    table = Table(
        "bytes moved over bytes saved=model:<30",
        "px=side_px:>5",
        "unique MiB=unique_bytes:12.1f",
        *heads,
    )
    rows = []
    for model, side_px in TRAFFIC_CASES:
        if only in model:
            rows.append(_traffic_row(model, side_px))
            table.row(rows[-1] | {name: rows[-1][name]["factor"] for name in names})
    return rows


def measured_policy(model: str, side_px: int, policy: str) -> dict[str, Any]:
    """Measure one policy in this process, beside its prediction."""
    words = f"parallel.micro_batches={MICRO_BATCHES} parallel.micro_batch_size=1 schedule=1f1b"
    (keep,) = evaluate(one_rank(model, side_px, words, "memory=keep")).memory.ranks
    limit = keep.peak_bytes - keep.peak_activation_bytes // 2
    return memory_rig.under_policy(
        one_rank(model, side_px, words, POLICIES[policy].format(limit=limit))
    )[0]


def peaks(only: str, policies: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yield measured beside predicted peaks, each policy in its own process."""
    for (model, side_px), policy in product(PEAK_CASES, policies):
        if only in model:
            row = in_child(measured_policy, model, side_px, policy, threads=torch.get_num_threads())
            yield {"model": model, "side_px": side_px, "policy": policy, **row}


def main(argv: Sequence[str]) -> int:
    """Print both tables, or with --json one object."""
    arguments = options(
        __doc__,
        argv,
        json=False,
        only="",
        threads=1,
        part=("all", "traffic", "peaks"),
        policies=list(POLICIES),
    )
    torch.set_num_threads(arguments.threads)
    machine()
    moved = _traffic(arguments.only) if arguments.part != "peaks" else []
    results: list[dict[str, Any]] = []
    if arguments.part != "traffic":
        table = Table(
            "MiB of a step, 1 rank=model:<22",
            "px=side_px:>5",
            "policy:>11",
            "saved MiB=activation_bytes:>11.2f",
            "predicted MiB=predicted_activation_bytes:>15.2f",
            "error %=activation_error:>9.2f",
            "all MiB=allocated_bytes:>11.2f",
            "predicted MiB=predicted_bytes:>15.2f",
            "error %=error:>9.2f",
            "host MiB=host_bytes:>10.1f",
        )
        results = table.rows(peaks(arguments.only, arguments.policies), memory_rig.why_not)
    answer = {"device": "cpu", "torch": torch.__version__, "traffic": moved, "peaks": results}
    errors = [row[name] for row in results for name in ("error", "activation_error") if name in row]
    is_wrong = any(row["ours"]["factor"] > 1.0 for row in moved) or any(
        abs(error) > MAX_ERROR for error in errors
    )
    return answered(answer, is_wrong or any("failed" in row for row in results), arguments.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

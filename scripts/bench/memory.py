"""What memory policies move and hold, on the processor.

Traffic: bytes moved to host memory over the unique bytes that autograd saved, with every layer's saved tensors offloaded:
ours by the counters of the engine's activation store in a training step, torch's save_on_cpu by what its hook copies, and
torchtune's rule (torchtune itself is not installed). Parameters, buffers and images count in neither; what a hook copies of
parameters besides is given apart. Unique is each storage once, however many tensors name it, by a hook of its own.

Peaks: for each policy the most bytes of a step on one rank, as the engine counts saved storages and as torch's profiler
sees its allocator, beside what `gems memory` predicts from a profile on fake tensors; each in a process of its own, with two
micro-batches of one image (1f1b). A policy that keeps to a limit is given the peak without half of what is saved.

`--part traffic|peaks`, `--only WORD` (of the model), `--policies A,B`, `--threads N` and `--json` do what they say. Gives 1
when ours moves anything twice, a predicted peak is more than 5 % off, or a run fails.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from gems.errors import GemsError
from gems.models import layers_of
from gems.models.build import build_layers, input_spec
from scripts.bench.memory_peers import HOOKS, hook_traffic
from scripts.bench.memory_rig import MIB, Ours, all_offloaded, case_of_run, ours_under, outcome_of, spec_of

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
LARGEST_ERROR = 0.05


def traffic_row(model: str, side_px: int) -> dict[str, Any]:
    """Measure what each moves of one model."""
    words = [f"parallel.micro_batches={MICRO_BATCHES}", f"parallel.micro_batch_size={BATCH}"]
    spec = spec_of(model, side_px, *words, "memory.min_offload_bytes=0")
    layers = layers_of(spec.model, spec.data)
    given = input_spec(spec.data, BATCH)
    row: dict[str, Any] = {"model": model, "side_px": side_px, "batch": BATCH}
    for name in HOOKS:
        modules = nn.ModuleList(build_layers(layers, 0, len(layers), spec.seed))
        found = hook_traffic(name, modules, torch.randn(given.shape))
        row["unique_bytes"] = found.saved_bytes
        row[name] = {
            "moved_bytes": found.moved_bytes,
            "factor": found.moved_bytes / found.saved_bytes,
            "parameter_bytes": found.known_bytes,
        }
    schedule, plan = all_offloaded(spec)
    ours = Ours(spec, schedule, plan)
    ours.step()
    counters = ours.counters
    of_one = counters.offloaded_bytes / MICRO_BATCHES
    row["ours"] = {
        "moved_bytes": of_one,
        "factor": of_one / row["unique_bytes"],
        "parameter_bytes": 0,
        "back_bytes": counters.prefetched_bytes / MICRO_BATCHES,
        "num_misses": counters.num_misses,
    }
    return row


def traffic(only: str) -> list[dict[str, Any]]:
    """Print the factors side by side."""
    names = ["ours", *HOOKS]
    head = "".join(f"{name:>18s}" for name in names)
    print(f"{'bytes moved / unique bytes saved':34s}{'unique MiB':>12s}{head}", file=sys.stderr)
    rows = []
    for model, side_px in TRAFFIC_CASES:
        if only in model:
            row = traffic_row(model, side_px)
            rows.append(row)
            factors = "".join(f"{row[name]['factor']:18.3f}" for name in names)
            what = f"{model}, {side_px} px, batch {BATCH}"
            print(f"{what:34s}{row['unique_bytes'] / MIB:12.1f}{factors}", file=sys.stderr, flush=True)
    return rows


def peaks_of(model: str, side_px: int, policy: str) -> dict[str, Any]:
    """Measure one policy in this process, beside its prediction."""
    words = [f"parallel.micro_batches={MICRO_BATCHES}", "parallel.micro_batch_size=1", "schedule=1f1b"]
    (kept,) = case_of_run(spec_of(model, side_px, *words)).kept.ranks
    limit = kept.peak_bytes - kept.peak_activation_bytes // 2
    words += [word.format(limit=limit) for word in POLICIES[policy]]
    spec = spec_of(model, side_px, *words)
    try:
        outcome = outcome_of(spec, case_of_run(spec))
    except GemsError as error:
        return {"refused": str(error)}
    (walked,) = outcome.ranks
    measured = ours_under(spec, outcome).peaks()
    return {
        "predicted_bytes": walked.peak_bytes,
        "predicted_activation_bytes": walked.peak_activation_bytes,
        "predicted_host_bytes": walked.peak_host_bytes,
        **asdict(measured),
    }


def peaks(only: str, policies: Sequence[str]) -> list[dict[str, Any]]:
    """Print measured beside predicted peaks, each policy in a process of its own."""
    print(
        f"{'most MiB of a step, 1 rank':26s}{'policy':>10s}{'saved: counted':>16s}{'predicted':>11s}{'error':>8s}"
        f"{'all: allocated':>16s}{'predicted':>11s}{'error':>8s}{'host':>8s}",
        file=sys.stderr,
    )
    rows = []
    for model, side_px in PEAK_CASES:
        for policy in policies if only in model else ():
            row = {"model": model, "side_px": side_px, "policy": policy, **_in_child(model, side_px, policy)}
            if "allocated_bytes" in row:
                row["error"] = row["predicted_bytes"] / row["allocated_bytes"] - 1
                counted = row["activation_bytes"]
                row["activation_error"] = row["predicted_activation_bytes"] / counted - 1
            rows.append(row)
            print(_text(row), file=sys.stderr, flush=True)
    return rows


def _in_child(model: str, side_px: int, policy: str) -> dict[str, Any]:
    threads = str(torch.get_num_threads())
    words = ["--threads", threads, "--alone", model, str(side_px), policy]
    ended = subprocess.run([sys.executable, "-m", "scripts.bench.memory", *words], capture_output=True, text=True)
    if ended.returncode:
        print(ended.stderr, file=sys.stderr)
        return {"failed": " ".join(ended.stderr.splitlines()[-1:])}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _text(row: dict[str, Any]) -> str:
    what = f"{row['model']}, {row['side_px']} px"
    if "allocated_bytes" not in row:
        why = f"refused: {row['refused']}" if "refused" in row else f"failed: {row['failed']}"
        return f"{what:26s}{row['policy']:>10s}  {why}"
    return (
        f"{what:26s}{row['policy']:>10s}"
        f"{row['activation_bytes'] / MIB:16.2f}{row['predicted_activation_bytes'] / MIB:11.2f}"
        f"{100 * row['activation_error']:7.2f}%"
        f"{row['allocated_bytes'] / MIB:16.2f}{row['predicted_bytes'] / MIB:11.2f}{100 * row['error']:7.2f}%"
        f"{row['host_bytes'] / MIB:8.1f}"
    )


def main(argv: Sequence[str]) -> int:
    """Print both tables, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--part", default="all", choices=("all", "traffic", "peaks"))
    parser.add_argument("--only", default="")
    parser.add_argument("--policies", default=",".join(POLICIES))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--alone", nargs=3, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    if given.alone:
        model, side_px, policy = given.alone
        print(json.dumps(peaks_of(model, int(side_px), policy)))
        return 0
    moved = traffic(given.only) if given.part != "peaks" else []
    held = peaks(given.only, given.policies.split(",")) if given.part != "traffic" else []
    if given.json:
        print(json.dumps({"device": "cpu", "torch": torch.__version__, "traffic": moved, "peaks": held}))
    is_once = all(row["ours"]["factor"] <= 1.0 for row in moved)
    errors = [row[name] for row in held for name in ("error", "activation_error") if name in row]
    is_near = all(abs(error) <= LARGEST_ERROR for error in errors)
    is_near = is_near and not any("failed" in row for row in held)
    return 0 if is_once and is_near else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

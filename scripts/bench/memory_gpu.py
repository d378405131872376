"""Memory policies on a CUDA GPU: copies, overhead at half the memory, the largest image, and peaks beside predictions.

`--part bandwidth`: pinned copies each way and both at once, of 1, 16 and 256 MiB. `--part overhead`: a step of our plan
with half of the activations' peak saved over a step that keeps all, beside torch's save_on_cpu with pinned memory,
torchtune's OffloadActivations where it is installed, and torch.utils.checkpoint around each layer; the ways take turns in
one process, medians. `--part largest`: the largest square image that ResNet-110-v2 trains at under each policy. `--part
peaks`: allocated, reserved and NVML's peaks beside the prediction. Each case runs in a process of its own, and what does
not fit is named. `--only WORD`, `--sizes PX,PX`, `--policies A,B`, `--rounds N` and `--json` do what they say.
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import torch

from scripts.bench.copy_bandwidth import SIZES_BYTES, bandwidth

MODELS = ("vgg16", "resnet152", "unet")
LARGEST_OF = "resnet110_v2"
SIZES_PX = (1024, 4096)
STEP_PX = 128
FIRST_PX = 512
MAX_PX = 16384
PARTS = ("bandwidth", "overhead", "largest", "peaks")
GIB = 2**30
CHILD_LIMIT_S = 560.0


def machine_facts() -> dict[str, Any]:
    """Return hardware and versions."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": device.name,
        "gpu_gib": device.total_memory / GIB,
        "host": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }


def measure_bandwidth() -> list[dict[str, Any]]:
    """Print and gives bytes per second of copies."""
    rows = []
    print(f"{'copy MiB':>10s}{'d2h':>9s}{'h2d':>9s}{'both: d2h':>11s}{'h2d':>9s}   GB/s", file=sys.stderr)
    for copy_bytes in SIZES_BYTES:
        row = asdict(bandwidth(torch.device("cuda"), copy_bytes))
        rows.append(row)
        rates = [value / 1e9 for name, value in row.items() if name != "copy_bytes"]
        print(
            f"{copy_bytes / 2**20:10.0f}{rates[0]:9.1f}{rates[1]:9.1f}{rates[2]:11.1f}{rates[3]:9.1f}", file=sys.stderr
        )
    return rows


def measure_overhead(models: Sequence[str], sizes: Sequence[int], words: Sequence[str]) -> list[dict[str, Any]]:
    """Print and gives a row for each model and size."""
    print(f"{'step over keep; of its memory saved':38s}", file=sys.stderr)
    rows = []
    for model in models:
        for side_px in sizes:
            row = _child("overhead", model, str(side_px), *words)
            rows.append({"model": model, "side_px": side_px, **row})
            print(f"{model}, {side_px} px", file=sys.stderr)
            for way, found in row.get("ways", {}).items():
                print(f"  {way:14s}{_way_text(found)}", file=sys.stderr, flush=True)
            if "failed" in row:
                print(f"  failed: {row['failed']}", file=sys.stderr)
    return rows


def _way_text(found: dict[str, Any]) -> str:
    if "refused" in found:
        return f"does not run: {found['refused']}"
    held = f"{found['step_s'] * 1e3:10.1f} ms{found['held_bytes'] / GIB:8.2f} GiB"
    if "overhead" not in found:
        return held
    return f"{held}{100 * found['overhead']:+8.1f} %{100 * found['saved']:8.1f} % saved"


def measure_largest(policies: Sequence[str], words: Sequence[str]) -> list[dict[str, Any]]:
    """Print and gives the largest side in px that trains under each policy: doubled while it fits, then halved in."""
    rows = []
    for policy in policies:
        tried: dict[int, dict[str, Any]] = {}

        def fits(side_px: int, policy: str = policy, tried: dict[int, dict[str, Any]] = tried) -> bool:
            tried[side_px] = _child("alone", LARGEST_OF, str(side_px), policy, *words)
            return "step_s" in tried[side_px]

        good, bad = 0, FIRST_PX
        while bad <= MAX_PX and fits(bad):
            good, bad = bad, 2 * bad
        while good and bad <= MAX_PX and bad - good > STEP_PX:
            middle = (good + bad) // 2 // STEP_PX * STEP_PX
            good, bad = (middle, bad) if fits(middle) else (good, middle)
        rows.append({"model": LARGEST_OF, "policy": policy, "side_px": good, **tried.get(good, {})})
        why = tried.get(bad, {})
        end = f", not at {bad}: {why.get('refused') or why.get('failed')}" if why else ", the largest tried"
        print(f"{LARGEST_OF} under {policy:12s} trains at {good} px{end}", file=sys.stderr, flush=True)
    return rows


def measure_peaks(
    models: Sequence[str], sizes: Sequence[int], policies: Sequence[str], words: Sequence[str]
) -> list[dict[str, Any]]:
    """Print and gives allocated, reserved and NVML's peaks beside the prediction."""
    print(f"{'GiB':30s}{'predicted':>11s}{'allocated':>11s}{'error':>9s}{'reserved':>10s}{'NVML':>8s}", file=sys.stderr)
    rows = []
    for model in models:
        for side_px in sizes:
            for policy in policies:
                row = {"model": model, "side_px": side_px, "policy": policy}
                row |= _child("alone", model, str(side_px), policy, *words)
                rows.append(row)
                what = f"{model}, {side_px} px, {policy}"
                if "step_s" not in row:
                    print(f"{what:30s}  does not run: {row.get('refused') or row.get('failed')}", file=sys.stderr)
                    continue
                row["error"] = row["predicted_bytes"] / row["allocated_bytes"] - 1
                print(
                    f"{what:30s}{row['predicted_bytes'] / GIB:11.2f}{row['allocated_bytes'] / GIB:11.2f}"
                    f"{100 * row['error']:8.2f}%{row['reserved_bytes'] / GIB:10.2f}{row['nvml_bytes'] / GIB:8.2f}",
                    file=sys.stderr, flush=True,
                )  # fmt: skip
    return rows


def _child(*words: str) -> dict[str, Any]:
    """Run one case in a process of its own, for a broken allocator or a fault must not reach the next one."""
    command = [sys.executable, "-m", "scripts.bench.memory_gpu", "--child", *words]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, timeout=CHILD_LIMIT_S)
    except subprocess.TimeoutExpired:
        return {"failed": f"no end after {CHILD_LIMIT_S:.0f} s"}
    if ended.returncode:
        return {"failed": " ".join(ended.stderr.splitlines()[-1:])[:300] or f"exit code {ended.returncode}"}
    found: dict[str, Any] = json.loads(ended.stdout.splitlines()[-1])
    return found


def _run_child(words: Sequence[str]) -> dict[str, Any]:
    from scripts.bench.memory_gpu_case import alone, overhead_of

    what, model, side_px, *more = words
    if what == "overhead":
        return overhead_of(model, int(side_px), int(more[0]), json.loads(more[1]))
    return alone(model, int(side_px), more[0], json.loads(more[1]))


def main(argv: Sequence[str]) -> int:
    """Print the tables, or with --json one object; refuses where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--part", default="all", choices=("all", *PARTS))
    parser.add_argument("--only", default="")
    parser.add_argument("--sizes", default=",".join(map(str, SIZES_PX)))
    parser.add_argument("--policies", default="keep,vdnn_all,vdnn_conv,lms,recompute,plan")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print("bench-memory-gpu: torch sees no CUDA GPU here: nothing was measured", file=sys.stderr)
        return 2
    if given.child:
        print(json.dumps(_run_child(given.child)))
        return 0
    models = [model for model in MODELS if given.only in model]
    sizes, policies = [int(word) for word in given.sizes.split(",")], given.policies.split(",")
    answer: dict[str, Any] = machine_facts()
    print(", ".join(f"{name} {value}" for name, value in answer.items()), file=sys.stderr)
    parts = PARTS if given.part == "all" else (given.part,)
    answer["bandwidth"] = copies = measure_bandwidth()  # the plans stand on it
    best = copies[-1]
    rates = json.dumps({name: best[f"duplex_{name}"] for name in ("d2h_bytes_per_s", "h2d_bytes_per_s")})
    if "overhead" in parts:
        answer["overhead"] = measure_overhead(models, sizes, [str(given.rounds), rates])
    if "largest" in parts:
        answer["largest"] = measure_largest(policies, [rates])
    if "peaks" in parts:
        answer["peaks"] = measure_peaks(models, sizes[:1], policies, [rates])
    if given.json:
        print(json.dumps(answer))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

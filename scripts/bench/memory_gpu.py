"""Memory policies on a CUDA GPU: copies, overhead at half the memory, the largest image, and peaks beside predictions.

`--part bandwidth`: pinned copies each way and both at once, of 1, 16 and 256 MiB. `--part overhead`: a step of our plan
with half of the activations' peak saved over a step that keeps all, beside torch's save_on_cpu with pinned memory,
torchtune's OffloadActivations if it is installed, and torch.utils.checkpoint around each layer; all take turns in one
process, medians. `--part largest`: the largest square image that ResNet-110-v2 trains at under each policy. `--part
peaks`: allocated, reserved and NVML's peaks beside the prediction. Each case runs in a process of its own, and cases
that do not fit are named.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from gems.engine.supervision.monitor import _open_gpu
from gems.errors import DoesNotFitError
from gems.models import layers_of
from gems.models.build import build_layers, input_spec
from scripts.bench.memory_rig import PEERS, PlainLoop, engine_under, one_rank, one_rank_case, planned_outcome
from scripts.bench.rig import GIB, MIB, Table, child, in_turns, log, parser, seconds
from scripts.calibrate import bandwidth

MODELS = ("vgg16", "resnet152", "unet")
LARGEST_OF = "resnet110_v2"
SIZES_PX = (1024, 4096)
STEP_PX, FIRST_PX, MAX_PX = 128, 512, 16384
PARTS = ("bandwidth", "overhead", "largest", "peaks")
COPY_BYTES = (MIB, 16 * MIB, 256 * MIB)
CHILD_LIMIT_S = 560.0

OURS = {"keep": ["memory=keep"], "plan": ["memory=plan", "memory.target_reduction=0.5"]}
THEIRS = ("plain", "save_on_cpu", "torchtune", "checkpoint")
POLICIES = ("keep", "vdnn_all", "vdnn_conv", "lms", "recompute", "plan")
DEVICE = "cuda"
PROFILE = "profile=measured"
BATCH = 1
SHEETS = ("v100", "a100", "h100", "h200")
DEVICE_SHARE = 0.92  # of the device, for a plan: the rest is CUDA's own and fragmentation
HOST_SHARE = 0.7


class Steps(Protocol):
    """Something that runs training steps."""

    def step(self) -> None:
        """Run one."""


def gpu_facts() -> dict[str, Any]:
    """Return hardware and versions."""
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {
        "gpu": device.name, "gpu_gib": device.total_memory / GIB, "host": platform.processor() or platform.machine(),
        "python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }  # fmt: skip


def measure_bandwidth() -> list[dict[str, Any]]:
    """Print and return bytes per second of copies."""
    rows = []
    table = Table("copy MiB:10.0f", "d2h GB/s:10.1f", "h2d:9.1f", "both, d2h:11.1f", "h2d:9.1f")
    for copy_bytes in COPY_BYTES:
        row = asdict(bandwidth(torch.device("cuda"), copy_bytes))
        rows.append(row)
        table.row(copy_bytes / MIB, *(value / 1e9 for name, value in row.items() if name != "copy_bytes"))
    return rows


def measure_overhead(models: Sequence[str], sizes: Sequence[int], words: Sequence[str]) -> list[dict[str, Any]]:
    """Print and return a row for each model and size."""
    table = Table("step over keep:<24", "step ms:10.1f", "held GiB:10.2f", "overhead %:+12.1f", "saved %:9.1f")
    rows = []
    for model in models:
        for side_px in sizes:
            row = _child("overhead", model, str(side_px), *words)
            rows.append({"model": model, "side_px": side_px, **row})
            table.row(f"{model}, {side_px} px", note=f"failed: {row['failed']}" if "failed" in row else "")
            for way, found in row.get("ways", {}).items():
                if "refused" in found:
                    table.row(f"  {way}", note=f"does not run: {found['refused']}")
                    continue
                shares = (None if name not in found else 100 * found[name] for name in ("overhead", "saved"))
                table.row(f"  {way}", 1e3 * found["step_s"], found["held_bytes"] / GIB, *shares)
    return rows


def measure_largest(policies: Sequence[str], words: Sequence[str]) -> list[dict[str, Any]]:
    """Print and return the largest side in px that trains under each policy: doubled while it fits, then bisected."""
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
        log(f"{LARGEST_OF} under {policy:12s} trains at {good} px{end}")
    return rows


def measure_peaks(
    models: Sequence[str], sizes: Sequence[int], policies: Sequence[str], words: Sequence[str]
) -> list[dict[str, Any]]:
    """Print and return allocated, reserved and NVML's peaks beside the prediction."""
    table = Table("GiB:<30", "predicted:11.2f", "allocated:11.2f", "error %:9.2f", "reserved:10.2f", "NVML:8.2f")
    rows = []
    for model in models:
        for side_px in sizes:
            for policy in policies:
                row = {"model": model, "side_px": side_px, "policy": policy}
                row |= _child("alone", model, str(side_px), policy, *words)
                rows.append(row)
                what = f"{model}, {side_px} px, {policy}"
                if "step_s" not in row:
                    table.row(what, note=f"does not run: {row.get('refused') or row.get('failed')}")
                    continue
                row["error"] = row["predicted_bytes"] / row["allocated_bytes"] - 1
                sizes_gib = [row[f"{name}_bytes"] / GIB for name in ("predicted", "allocated", "reserved", "nvml")]
                table.row(what, *sizes_gib[:2], 100 * row["error"], *sizes_gib[2:])
    return rows


def _child(*words: str) -> dict[str, Any]:
    """Run one case in a process of its own, so that a fault or a full allocator does not reach the next one."""
    return child("scripts.bench.memory_gpu", "--child", *words, limit_s=CHILD_LIMIT_S)


def compare_ways(model: str, side_px: int, rounds: int, rates: dict[str, float]) -> dict[str, Any]:
    """Time a step in every way, in turn and in one process, and return medians beside what each holds in a step.

    A way that does not fit, or cannot be imported, is named with the reason. `held_bytes` is the most beyond
    parameters, gradients and optimizer state.
    """
    row: dict[str, Any] = {"model": model, "side_px": side_px, "ways": {}}
    running: dict[str, Steps] = {}
    for way in (*OURS, *THEIRS):
        try:
            running[way] = _build(way, model, side_px, rates)
            running[way].step()
            row["ways"][way] = {"held_bytes": _held_bytes(running[way])}
        except (torch.OutOfMemoryError, DoesNotFitError, ImportError) as error:
            running.pop(way, None)
            row["ways"][way] = {"refused": _line(error)}
            torch.cuda.empty_cache()
    times = in_turns({way: partial(_step_s, made) for way, made in running.items()}, rounds)
    for way, all_s in times.items():
        row["ways"][way]["step_s"] = statistics.median(all_s)
    kept = row["ways"]["keep"]
    for way in times if "step_s" in kept else ():
        found = row["ways"][way]
        found["overhead"] = found["step_s"] / kept["step_s"] - 1
        found["saved"] = 1 - found["held_bytes"] / kept["held_bytes"]
    return row


def run_alone(model: str, side_px: int, policy: str, rates: dict[str, float]) -> dict[str, Any]:
    """Run two steps under one policy, and return the peaks of the second beside the prediction."""
    before = _device_used_bytes()
    limits = [
        f"machine.device_bytes={round(DEVICE_SHARE * torch.cuda.mem_get_info()[1])}",
        f"machine.host_bytes={round(HOST_SHARE * _free_host_bytes())}",
    ]
    spec = one_rank(model, side_px, *_machine(rates), *limits, *_two_micro_batches(), f"memory={policy}")
    try:
        outcome = planned_outcome(spec, one_rank_case(spec))
        made = engine_under(spec, outcome)
        found = made.peaks()
    except (torch.OutOfMemoryError, DoesNotFitError) as error:
        return {"refused": _line(error)}
    return {
        "predicted_bytes": max(outcome.peak_bytes), "nvml_bytes": _device_used_bytes() - before,
        "step_s": statistics.median(_step_s(made) for _ in range(3)), **asdict(found),
    }  # fmt: skip


def _build(way: str, model: str, side_px: int, rates: dict[str, float]) -> Steps:
    """Build a step: our engine's under a policy, or another's hooks in a plain loop."""
    if way in OURS:
        spec = one_rank(model, side_px, *_machine(rates), PROFILE, *_two_micro_batches(), *OURS[way])
        return engine_under(spec, planned_outcome(spec, one_rank_case(spec)))
    if way == "torchtune":
        try:
            PEERS[way]()
        except Exception as error:
            raise ImportError("torchtune is not installed here") from error
    spec = one_rank(model, side_px, *_machine(rates))
    layers = layers_of(spec.model, spec.data)
    modules = nn.ModuleList(build_layers(layers, 0, len(layers), spec.seed, device=DEVICE))
    images = [torch.randn(input_spec(spec.data, BATCH).shape, device=DEVICE) for _ in range(2)]
    return PlainLoop(modules, images, way)


def _two_micro_batches() -> list[str]:
    return ["schedule=1f1b", "parallel.micro_batches=2", f"parallel.micro_batch_size={BATCH}"]


def _machine(rates: dict[str, float]) -> list[str]:
    """Return the machine with the copy rates measured; its other rates are those of its data sheet if we have one."""
    name = torch.cuda.get_device_name().lower()
    known = next((machine for machine in SHEETS if machine in name), "cuda")
    return [f"machine={known}", *(f"machine.{name}={rate}" for name, rate in rates.items())]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _free_host_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def _held_bytes(made: Steps) -> int:
    """Return the most that a step holds beyond what is there before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _step_s(made: Steps) -> float:
    torch.cuda.synchronize()
    return seconds(lambda: (made.step(), torch.cuda.synchronize()))  # type: ignore[func-returns-value]


def _device_used_bytes() -> int:
    """Return the bytes in use on the device by the driver's count, by whomever; 0 if it does not tell."""
    gpu = _open_gpu(torch.device(DEVICE))
    return 0 if gpu is None else gpu.read()[0]


def main(argv: Sequence[str]) -> int:
    """Print the tables, or with --json one object; refuse without a GPU."""
    options = parser(__doc__, "json", "only")
    options.add_argument("--part", default="all", choices=("all", *PARTS))
    options.add_argument("--sizes", default=",".join(map(str, SIZES_PX)), help="sides of the images in px")
    options.add_argument("--policies", default=",".join(POLICIES))
    options.add_argument("--rounds", type=int, default=7)
    options.add_argument("--child", nargs=5, help=argparse.SUPPRESS)
    given = options.parse_args(argv)
    if not torch.cuda.is_available():
        log("bench-memory-gpu: torch sees no CUDA GPU here: nothing was measured")
        return 2
    if given.child:
        what, model, side_px, word, rates = given.child
        found = (
            compare_ways(model, int(side_px), int(word), json.loads(rates))
            if what == "overhead"
            else run_alone(model, int(side_px), word, json.loads(rates))
        )
        print(json.dumps(found))
        return 0
    models = [model for model in MODELS if given.only in model]
    sizes, policies = [int(word) for word in given.sizes.split(",")], given.policies.split(",")
    answer: dict[str, Any] = gpu_facts()
    log(", ".join(f"{name} {value}" for name, value in answer.items()))
    parts = PARTS if given.part == "all" else (given.part,)
    answer["bandwidth"] = copies = measure_bandwidth()  # the plans are based on it
    rates = json.dumps({name: copies[-1][f"duplex_{name}"] for name in ("d2h_bytes_per_s", "h2d_bytes_per_s")})
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

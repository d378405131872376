"""Memory policies on a CUDA GPU.

Copies, overhead at half the memory, the largest image, and peaks beside predictions.
`--part bandwidth`: copies each way and both at once, of `--copies` MiB, of pinned and of pageable
memory; the other parts plan by them. `--part overhead`: a step of our plan with half of the
activations' peak saved over a step that keeps all, beside torch's save_on_cpu with pinned memory,
torchtune's OffloadActivations if it is installed, and torch.utils.checkpoint around each layer; all
take turns in one process, medians. `--part largest`: the largest square image that `--largest-of`
trains at under each policy, from `--first-px` in steps of `--step-px`, on a device of
`--device-bytes` or the whole one. `--part peaks`: allocated, reserved and NVML's peaks beside the
prediction. Each case runs in a process of its own, and cases that do not fit are named. `--sizes`
are the sides of the images in px.
"""

from __future__ import annotations

import platform
import statistics
import sys
import time
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import product
from typing import Any

import psutil
import torch

from gems.engine.supervision.monitor import _open_gpu
from gems.errors import DoesNotFitError
from gems.models.build import input_spec
from gems.plan.evaluate import evaluate
from scripts.bench import memory_rig
from scripts.bench.memory_rig import PEERS, WARM_UP_STEPS, OneRank, PlainLoop, one_rank, why_not
from scripts.bench.rig import (
    GIB,
    MIB,
    Table,
    answered,
    gpu_machine,
    in_child,
    in_turns,
    log,
    options,
)
from scripts.calibrate import bandwidth

MODELS = ("vgg16", "resnet152", "unet")
LARGEST_OF = "resnet110_v2"
STEP_PX = 128
FIRST_PX = 512
MAX_PX = 16384
PARTS = ("bandwidth", "overhead", "largest", "peaks")
CHILD_LIMIT_S = 560.0

HALF = "memory=plan memory.target_reduction=0.5"
GRAPHS = "train.cuda_graphs=true"
OURS = {
    "keep": "memory=keep",
    "keep, graphs": f"memory=keep {GRAPHS}",
    "recompute": "memory=recompute",
    "recompute, graphs": f"memory=recompute {GRAPHS}",
    "plan": HALF,
    "plan, graphs": f"{HALF} {GRAPHS}",
}
POLICIES = ["keep", "vdnn_all", "vdnn_conv", "lms", "recompute", "plan"]
DEVICE = "cuda"
PROFILE = "profile=measured"
BATCH = 1
DEVICE_SHARE = 0.92  # of the device, for a plan: the rest is CUDA's own and fragmentation
HOST_SHARE = 0.7
PINNED = "pinned"
PAGEABLE = "pageable"
Rates = dict[str, float]


def _bandwidth_rows(copies_mib: Sequence[int], round_mib: int) -> list[dict[str, Any]]:
    table = Table(
        "host memory=memory:<12",
        "copy MiB=copy_bytes:10.0f",
        "d2h GB/s=d2h_bytes_per_s:10.1f",
        "h2d GB/s=h2d_bytes_per_s:10.1f",
        "both, d2h GB/s=duplex_d2h_bytes_per_s:16.1f",
        "h2d GB/s=duplex_h2d_bytes_per_s:10.1f",
    )
    return table.rows(
        {
            "memory": memory,
            **bandwidth(torch.device("cuda"), size * MIB, memory == PINNED, round_mib * MIB),
        }
        for memory, size in product((PAGEABLE, PINNED), copies_mib)
    )


def _overhead_rows(
    models: Sequence[str], sizes: Sequence[int], rounds: int, rates: Rates
) -> list[dict[str, Any]]:
    table = Table(
        "step over keep=way:<24",
        "step ms=step_s:10.1f",
        "held GiB=held_bytes:10.2f",
        "overhead %=overhead:+12.1f",
        "saved %=saved:9.1f",
    )
    rows = []
    for model, side_px in product(models, sizes):
        row = {
            "model": model,
            "side_px": side_px,
            **_child(compare_ways, model, side_px, rounds, rates),
        }
        rows.append(row)
        table.row({"way": f"{model}, {side_px} px"}, why_not(row))
        for way, figures in row.get("ways", {}).items():
            table.row({"way": f"  {way}", **figures}, why_not(figures))
    return rows


def largest_rows(
    policies: Sequence[str],
    rates: Rates,
    model: str = LARGEST_OF,
    first_px: int = FIRST_PX,
    step_px: int = STEP_PX,
    device_bytes: int = 0,
) -> Iterator[dict[str, Any]]:
    """Yield the largest side in px that trains under each policy.

    Doubled while it fits, then bisected.
    """
    for policy in policies:
        tried: dict[int, dict[str, Any]] = {}

        def fits(
            side_px: int, policy: str = policy, tried: dict[int, dict[str, Any]] = tried
        ) -> bool:
            tried[side_px] = _child(run_alone, model, side_px, policy, rates, device_bytes)
            return "step_s" in tried[side_px]

        good = 0
        bad = first_px
        while bad <= MAX_PX and fits(bad):
            good = bad
            bad = 2 * bad
        while good and bad <= MAX_PX and bad - good > step_px:
            middle = (good + bad) // 2 // step_px * step_px
            good, bad = (middle, bad) if fits(middle) else (good, middle)
        end = f", not at {bad}: {why_not(tried[bad])}" if bad in tried else ", the largest tried"
        log(f"{model} under {policy:12s} trains at {good} px{end}")
        refused = why_not(tried[bad]) if bad in tried else ""
        yield {
            "model": model,
            "policy": policy,
            "side_px": good,
            **tried.get(good, {}),
            "next_px": bad,
            "why": refused,
        }


def _peak_rows(
    models: Sequence[str], side_px: int, policies: Sequence[str], rates: Rates
) -> list[dict[str, Any]]:
    table = Table(
        "model:<14",
        "px=side_px:>6",
        "policy:>10",
        "predicted GiB=predicted_bytes:15.2f",
        "allocated GiB=allocated_bytes:15.2f",
        "error %=error:9.2f",
        "reserved GiB=reserved_bytes:14.2f",
        "NVML GiB=nvml_bytes:10.2f",
    )

    return table.rows(
        (
            {
                "model": model,
                "side_px": side_px,
                "policy": policy,
                **_child(run_alone, model, side_px, policy, rates),
            }
            for model, policy in product(models, policies)
        ),
        why_not,
    )


# Each case in a process of its own, so that a fault or a full allocator does not reach the next
# one.
_child = partial(in_child, limit_s=CHILD_LIMIT_S)


def compare_ways(model: str, side_px: int, rounds: int, rates: Rates) -> dict[str, Any]:
    """Time a step by every method, in turn and in one process; return medians and peaks.

    A way that does not fit, or cannot be imported, is named with the reason. `held_bytes` is the
    most beyond parameters, gradients and optimizer state.
    """
    ways: dict[str, dict[str, Any]] = {}
    running: dict[str, OneRank | PlainLoop] = {}
    for way in (*OURS, *PEERS):
        try:
            running[way] = _build(way, model, side_px, rates)
            for _ in range(WARM_UP_STEPS):
                running[way].step()
            ways[way] = {"held_bytes": _held_bytes(running[way])}
        except (torch.OutOfMemoryError, DoesNotFitError, ImportError) as error:
            running.pop(way, None)
            ways[way] = {"refused": _line(error)}
            torch.cuda.empty_cache()
    times = in_turns({way: partial(_step_s, step) for way, step in running.items()}, rounds)
    for way, all_s in times.items():
        ways[way]["step_s"] = statistics.median(all_s)
    keep = ways["keep"]
    for way in times if "step_s" in keep else ():
        ways[way]["overhead"] = ways[way]["step_s"] / keep["step_s"] - 1
        ways[way]["saved"] = 1 - ways[way]["held_bytes"] / keep["held_bytes"]
    return {"model": model, "side_px": side_px, "ways": ways}


def run_alone(
    model: str, side_px: int, policy: str, rates: Rates, device_bytes: int = 0
) -> dict[str, Any]:
    """Run two steps under one policy, and return the peaks of the second beside the prediction.

    `device_bytes` is the limit of the allocator; 0 means most of the device.
    """
    before = _device_used_bytes()
    limits = (
        f"machine.device_bytes={device_bytes or round(DEVICE_SHARE * torch.cuda.mem_get_info()[1])}"
        f" machine.host_bytes={round(HOST_SHARE * psutil.virtual_memory().available)}"
    )
    spec = one_rank(
        model, side_px, gpu_machine(**rates), limits, _two_micro_batches(), f"memory={policy}"
    )
    row, run = memory_rig.under_policy(spec)
    if run is not None:
        row["nvml_bytes"] = _device_used_bytes() - before
        row["step_s"] = statistics.median(_step_s(run) for _ in range(3))
    return row


def _build(way: str, model: str, side_px: int, rates: Rates) -> OneRank | PlainLoop:
    if way in OURS:
        spec = one_rank(
            model, side_px, gpu_machine(**rates), PROFILE, _two_micro_batches(), OURS[way]
        )
        return OneRank(evaluate(spec).for_ranks)
    if way == "torchtune":
        try:
            PEERS[way]()
        except Exception as error:
            raise ImportError("torchtune is not installed here") from error
    spec = one_rank(model, side_px, gpu_machine(**rates))
    images = [torch.randn(input_spec(spec.data, BATCH).shape, device=DEVICE) for _ in range(2)]
    return PlainLoop(memory_rig.layer_modules(spec.model, spec.data, DEVICE), images, way)


def _two_micro_batches() -> str:
    return f"schedule=1f1b parallel.micro_batches=2 parallel.micro_batch_size={BATCH}"


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _held_bytes(made: OneRank | PlainLoop) -> int:
    """Return the most that a step holds beyond the static bytes; slots of CUDA graphs count."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    if isinstance(made, OneRank):
        before = made.static_bytes()
    torch.cuda.reset_peak_memory_stats()
    made.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _step_s(made: OneRank | PlainLoop) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    made.step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _device_used_bytes() -> int:
    """Return the bytes in use on the device by the driver's count, by whomever.

    0 if it does not tell.
    """
    gpu = _open_gpu(torch.device(DEVICE))
    return 0 if gpu is None else gpu.read()[0]


def main(argv: Sequence[str]) -> int:
    """Print the tables, or with --json one object; refuse without a GPU."""
    arguments = options(
        __doc__,
        argv,
        json=False,
        models=list(MODELS),
        part=("all", *PARTS),
        sizes=[1024, 4096],
        policies=POLICIES,
        rounds=7,
        copies=[1, 16, 256],
        round_mib=1024,
        largest_of=LARGEST_OF,
        first_px=FIRST_PX,
        step_px=STEP_PX,
        device_bytes=0,
    )
    if not torch.cuda.is_available():
        log("bench-memory-gpu: torch sees no CUDA GPU here: nothing was measured")
        return 2
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    answer: dict[str, Any] = {
        "gpu": device.name,
        "gpu_gib": device.total_memory / GIB,
        "host": platform.processor() or platform.machine(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cudnn": torch.backends.cudnn.version(),
    }
    log(", ".join(f"{name} {value}" for name, value in answer.items()))
    answer["bandwidth"] = copies = _bandwidth_rows(arguments.copies, arguments.round_mib)
    rates = {name: copies[-1][f"duplex_{name}"] for name in ("d2h_bytes_per_s", "h2d_bytes_per_s")}
    if arguments.part in ("all", "overhead"):
        answer["overhead"] = _overhead_rows(
            arguments.models, arguments.sizes, arguments.rounds, rates
        )
    if arguments.part in ("all", "largest"):
        limits = (
            arguments.largest_of,
            arguments.first_px,
            arguments.step_px,
            arguments.device_bytes,
        )
        answer["largest"] = list(largest_rows(arguments.policies, rates, *limits))
    if arguments.part in ("all", "peaks"):
        answer["peaks"] = _peak_rows(
            arguments.models, arguments.sizes[0], arguments.policies, rates
        )
    return answered(answer, False, arguments.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

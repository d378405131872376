"""Measurements of rows that are not benchmarks.

Each function runs in its own process, and loads torch only there. A function of several cases
prints the figures of each case as it ends, so that some remain after a time-out.
"""

from __future__ import annotations

import itertools
import json
import os
import platform
import statistics
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from gems import __version__
from gems.plan.evaluate import evaluate
from gems.runs.provenance import commit
from scripts.bench import rig
from scripts.bench.rig import composed, gpu_machine, in_child

ROOT = Path(__file__).resolve().parent.parent.parent
Ways = Mapping[str, str]  # the overrides of each run by its name
SANITIZER = "TORCH_CUDA_SANITIZER"
NO_DEVICE_POINTERS = "this MPI takes no device pointers"
HOST_BYTES = "SC_PHYS_PAGES", "SC_PAGE_SIZE"
Precisions = Sequence[tuple[str, bool | None]]  # with the use of TF32


def facts() -> dict[str, Any]:
    """Return this machine's hardware and software versions, and whether its GPU is a real one."""
    import torch

    if not torch.cuda.is_available():
        return {"failed": "torch sees no GPU here"}
    from gems.engine.transport.mpi import gpu_support, library

    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    hip = getattr(torch.version, "hip", None)
    hardware = {
        "gpu": device.name,
        "num_gpus": torch.cuda.device_count(),
        "gpu_bytes": device.total_memory,
        "compute_capability": f"{device.major}.{device.minor}",
        "cpu": rig.processor(),
        "num_cores": os.cpu_count(),
        "host_bytes": os.sysconf(HOST_BYTES[0]) * os.sysconf(HOST_BYTES[1]),
    }
    versions = {
        "gems": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda or hip,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
        "mpi": library(),
        "mpi_takes_device_pointers": gpu_support(),
    }
    is_fake = (
        torch.version.cuda is None and hip is None
    )  # torch's build for processors has no GPU of its own
    return {"hardware": hardware, "versions": versions, "commit": commit(ROOT), "is_fake": is_fake}


def _driver() -> str | None:
    try:
        import pynvml

        pynvml.nvmlInit()
        version = pynvml.nvmlSystemGetDriverVersion()
    except Exception:  # there is no such driver, or none that answers
        return None
    return version.decode() if isinstance(version, bytes) else str(version)


def machine() -> dict[str, Any]:
    """Return the hardware and the versions of this machine as figures."""
    values = facts()
    return {**values["hardware"], **values["versions"]} if "hardware" in values else values


def trained(
    words: str, ways: Ways, predicts: bool = False, first_is_base: bool = False
) -> list[dict[str, Any]]:
    """Train each run on this machine; `words` are overrides of all.

    Return time and bytes, beside the prediction if `predicts`. With `first_is_base`, `ratio` is a
    step's time over the first run's. A run that fails is named with the reason.
    """
    rows = _shown({"way": way, **_trained(f"{words} {own}", predicts)} for way, own in ways.items())
    return _over_the_first(rows) if first_is_base else rows


def _shown(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print all rows so far with each one that is made, and return them."""
    entries: list[dict[str, Any]] = []
    for row in rows:
        entries.append(row)
        print(json.dumps(entries), flush=True)
    return entries


def _over_the_first(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    base = rows[0].get("step_s")
    return [
        row | ({"ratio": row["step_s"] / base} if base and "step_s" in row else {}) for row in rows
    ]


def _trained(words: str, predicts: bool) -> dict[str, Any]:
    spec = composed(words, gpu_machine())
    row = rig.trained(spec)
    if "failed" in row or not predicts:
        return row
    plan = evaluate(spec)
    if plan.steps_s is not None:
        row["predicted_s"] = plan.steps_s / spec.train.steps
        row["time_error"] = row["predicted_s"] / row["step_s"] - 1
    if plan.peak is not None:
        row["predicted_bytes"] = plan.peak.device_bytes
        row["bytes_error"] = plan.peak.device_bytes / row["device_bytes"] - 1
    return row


def staged(words: str, ways: Ways) -> list[dict[str, Any]]:
    """Train the first run on one rank, and the others through the host and by device pointers."""
    (first, own), *others = ways.items()
    runs = {first: own}
    takes = bool(in_child(mpi_takes_pointers).get("takes"))
    for way, own in others:
        runs[f"{way}, through the host"] = f"{own} machine.transport=host"
        if takes:
            runs[f"{way}, device pointers"] = f"{own} machine.transport=auto"
    rows = trained(words, runs, first_is_base=True)
    return rows if takes else [*rows, {"way": "device pointers", "unmeasured": NO_DEVICE_POINTERS}]


def mpi_takes_pointers() -> dict[str, bool]:
    """Return whether MPI says that it takes device pointers."""
    from gems.engine.transport.mpi import gpu_support

    return {"takes": gpu_support()}


def offloaded(model: str, side_px: int, policy: str, steps: int) -> dict[str, Any]:
    """Train some steps on one rank under a memory policy.

    Torch's CUDA sanitizer, if it is on, raises at a race.
    """
    from scripts.bench.memory_rig import OneRank, one_rank

    words = (
        "schedule=1f1b parallel.micro_batches=2 parallel.micro_batch_size=1"
        " memory.min_offload_bytes=0"
    )
    spec = one_rank(model, side_px, words, gpu_machine(), f"memory={policy}")
    run = OneRank(evaluate(spec).for_ranks)
    for _ in range(steps):
        run.step()
    assert run.rank.train.store is not None
    counters = run.rank.train.store.counters
    _synchronize()
    return {
        "model": model,
        "side_px": side_px,
        "policy": policy,
        "num_steps": steps,
        "offloaded_bytes": counters.offloaded_bytes,
        "prefetched_bytes": counters.prefetched_bytes,
        **(
            {"num_races": 0}
            if SANITIZER in os.environ
            else {"unmeasured": "ran without torch's sanitizer"}
        ),
    }


def idle_share(model: str, sizes: Sequence[int], micro_batches: int) -> list[dict[str, Any]]:
    """Return the share of a step on one rank in which no kernel ran, by torch's profiler.

    The step is from its first kernel's start to its last one's end.
    """
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile, supported_activities

    from scripts.bench.memory_rig import OneRank, one_rank

    if ProfilerActivity.CUDA not in supported_activities():
        return [{"unmeasured": "torch's profiler knows no GPU here"}]
    rows = []
    for side_px in sizes:
        words = f"parallel.micro_batches={micro_batches} parallel.micro_batch_size=1"
        spec = one_rank(model, side_px, words, gpu_machine())
        run = OneRank(evaluate(spec).for_ranks)
        for _ in range(2):
            run.step()
        _synchronize()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
            run.step()
            _synchronize()
        on_gpu = (
            e
            for e in profiler.profiler.kineto_results.events()
            if e.device_type() == DeviceType.CUDA
        )
        events = [
            event for event in on_gpu if not event.is_user_annotation()
        ]  # those span the gaps between kernels
        spans = sorted(
            (event.start_ns(), event.start_ns() + event.duration_ns()) for event in events
        )
        row: dict[str, Any] = {"model": model, "side_px": side_px, "micro_batches": micro_batches}
        if spans:
            total_ns = max(end for _, end in spans) - spans[0][0]
            row |= {
                "num_kernels": len(spans),
                "span_s": total_ns * 1e-9,
                "idle_share": 1 - union(spans) / total_ns,
            }
        else:
            row["unmeasured"] = "torch's profiler saw no kernel"
        rows.append(row)
        del run
        torch.cuda.empty_cache()
    return rows


def union(spans: Iterable[tuple[int, int]]) -> int:
    """Return the length of the union of sorted spans."""
    covered = last = 0
    for begin, end in spans:
        covered += max(0, end - max(begin, last))
        last = max(last, end)
    return covered


def kernels(
    model: str, side_px: int, steps: int, limit_s: float, precisions: Precisions
) -> list[dict[str, Any]]:
    """Time a step on one rank by precision, kernels and memory format, each in its own process."""
    return _over_the_first(_shown(_kernels(model, side_px, steps, limit_s, precisions)))


def _kernels(
    model: str, side_px: int, steps: int, limit_s: float, precisions: Precisions
) -> Iterator[dict[str, Any]]:
    both = (False, True)
    for (precision, tf32), is_benchmarked, is_last in itertools.product(precisions, both, both):
        chosen = {
            "precision": precision,
            "cudnn_benchmark": is_benchmarked,
            "tf32": tf32,
            "channels_last": is_last,
        }
        words = [
            f"machine.{key}={str(value).lower()}"
            for key, value in list(chosen.items())[1:]
            if value is not None
        ]
        words.append(f"train.precision={precision}")
        yield {
            **chosen,
            **in_child(step_of, model, side_px, " ".join(words), steps, limit_s=limit_s),
        }


def step_of(model: str, side_px: int, words: str, steps: int) -> dict[str, Any]:
    """Return the median step of one rank that keeps its activations, and the allocator's peak."""
    import torch

    from scripts.bench.memory_rig import OneRank, one_rank

    run_of_two = "parallel.micro_batches=2 parallel.micro_batch_size=1"
    # nothing is predicted, so the data sheet may lack the rate of a precision
    spec = one_rank(model, side_px, run_of_two, gpu_machine(), words, "cost=uniform")
    run = OneRank(evaluate(spec).for_ranks)
    times_s = []
    for _ in range(2 + steps):
        _synchronize()
        begin_s = time.perf_counter()
        run.step()
        _synchronize()
        times_s.append(time.perf_counter() - begin_s)
    return {
        "step_s": statistics.median(times_s[2:]),
        "device_bytes": torch.cuda.max_memory_allocated(),
    }


def _synchronize() -> None:
    import torch

    torch.cuda.synchronize()

"""What one process of `bench_memory_gpu` does on its GPU: one model at one size, in several ways or under one policy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any, Protocol

import torch
from torch import nn

from gems.engine.supervision.monitor import _open_gpu
from gems.errors import DoesNotFitError
from gems.models import layers_of
from gems.models.build import build_layers, input_spec
from scripts.bench.memory_peers import PlainLoop, has_torchtune
from scripts.bench.memory_rig import case_of_run, ours_under, outcome_of, spec_of

OURS = {"keep": ["memory=keep"], "plan": ["memory=plan", "memory.target_reduction=0.5"]}
THEIRS = ("plain", "save_on_cpu", "torchtune", "checkpoint")
POLICIES = {
    "keep": ["memory=keep"],
    "vdnn_all": ["memory=vdnn_all"],
    "vdnn_conv": ["memory=vdnn_conv"],
    "lms": ["memory=lms"],
    "recompute": ["memory=recompute"],
    "plan": ["memory=plan"],
}
DEVICE = "cuda"
PROFILE = "profile=measured"
BATCH = 1
SHEETS = ("v100", "a100", "h100", "h200")
DEVICE_SHARE = 0.92  # what a plan may use of the device: the rest is CUDA's own and fragments
HOST_SHARE = 0.7


class Steps(Protocol):
    """Something that runs training steps."""

    def step(self) -> None:
        """Run one."""


def overhead_of(model: str, side_px: int, rounds: int, rates: dict[str, float]) -> dict[str, Any]:
    """Time a step in every way, in turn and in one process, and gives medians beside what each holds in a step.

    A way that does not fit, or cannot be imported, is named with the reason. `held_bytes` is the most beyond parameters,
    gradients and optimizer state.
    """
    row: dict[str, Any] = {"model": model, "side_px": side_px, "ways": {}}
    running: dict[str, Steps] = {}
    for way, build in _builders(model, side_px, rates).items():
        try:
            running[way] = build()
            running[way].step()
            row["ways"][way] = {"held_bytes": _held_bytes(running[way])}
        except (torch.OutOfMemoryError, DoesNotFitError, ImportError) as error:
            running.pop(way, None)
            row["ways"][way] = {"refused": _line(error)}
            torch.cuda.empty_cache()
    times: dict[str, list[float]] = {way: [] for way in running}
    for _ in range(rounds):
        for way, made in running.items():
            times[way].append(_seconds(made))
    for way, seconds in times.items():
        row["ways"][way]["step_s"] = statistics.median(seconds)
    kept = row["ways"]["keep"]
    for way in times if "step_s" in kept else ():
        found = row["ways"][way]
        found["overhead"] = found["step_s"] / kept["step_s"] - 1
        found["saved"] = 1 - found["held_bytes"] / kept["held_bytes"]
    return row


def alone(model: str, side_px: int, policy: str, rates: dict[str, float]) -> dict[str, Any]:
    """Run two steps under one policy, and gives the peaks of the second beside the prediction."""
    before = _device_used_bytes()
    spec = spec_of(
        model, side_px, *_machine(rates), *_limits(), "schedule=1f1b", "parallel.micro_batches=2",
        f"parallel.micro_batch_size={BATCH}", *POLICIES[policy],
    )  # fmt: skip
    try:
        outcome = outcome_of(spec, case_of_run(spec))
        made = ours_under(spec, outcome)
        found = made.peaks()
    except (torch.OutOfMemoryError, DoesNotFitError) as error:
        return {"refused": _line(error)}
    return {
        "predicted_bytes": max(outcome.peak_bytes),
        "nvml_bytes": _device_used_bytes() - before,
        "step_s": statistics.median(_seconds(made) for _ in range(3)),
        **asdict(found),
    }


def _builders(model: str, side_px: int, rates: dict[str, float]) -> dict[str, Callable[[], Steps]]:
    def ours(way: str) -> Steps:
        spec = spec_of(
            model, side_px, *_machine(rates), PROFILE, "schedule=1f1b", "parallel.micro_batches=2",
            f"parallel.micro_batch_size={BATCH}", *OURS[way],
        )  # fmt: skip
        return ours_under(spec, outcome_of(spec, case_of_run(spec)))

    def theirs(way: str) -> Steps:
        if way == "torchtune" and not has_torchtune():
            raise ImportError("torchtune is not installed here")
        spec = spec_of(model, side_px, *_machine(rates))
        layers = layers_of(spec.model, spec.data)
        modules = nn.ModuleList(build_layers(layers, 0, len(layers), spec.seed, device=DEVICE))
        images = [torch.randn(input_spec(spec.data, BATCH).shape, device=DEVICE) for _ in range(2)]
        return PlainLoop(modules, images, way)

    made: dict[str, Callable[[], Steps]] = {way: lambda way=way: ours(way) for way in OURS}
    return made | {way: lambda way=way: theirs(way) for way in THEIRS}


def _machine(rates: dict[str, float]) -> list[str]:
    """Return the machine with the copy rates measured; its other rates are those of its data sheet where we have one."""
    name = torch.cuda.get_device_name().lower()
    known = next((machine for machine in SHEETS if machine in name), "cuda")
    return [f"machine={known}", *(f"machine.{name}={rate}" for name, rate in rates.items())]


def _limits() -> list[str]:
    device_bytes = round(DEVICE_SHARE * torch.cuda.mem_get_info()[1])
    return [f"machine.device_bytes={device_bytes}", f"machine.host_bytes={round(HOST_SHARE * _free_host_bytes())}"]


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:200]


def _free_host_bytes() -> int:
    with open("/proc/meminfo") as lines:
        kib = next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))
    return 1024 * kib


def _held_bytes(made: Steps) -> int:
    """Return the most that a step holds beyond what is there before it."""
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    made.step()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def _seconds(made: Steps) -> float:
    torch.cuda.synchronize()
    begin = time.perf_counter()
    made.step()
    torch.cuda.synchronize()
    return time.perf_counter() - begin


def _device_used_bytes() -> int:
    """Return what the driver says is in use on the device, by whomever; 0 where it does not tell."""
    gpu = _open_gpu(torch.device(DEVICE))
    return 0 if gpu is None else gpu.read()[0]

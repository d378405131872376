"""How near a predicted peak is to the allocator's: each stage of a model cut in four, alone in a process of its own.

Predicted: what the memory of a stage is by the tables over the layers' profile, taken on fake tensors: parameters,
gradients and momentum, buffers, inputs, and the larger of the peaks of forward and backward, with one micro-batch in
flight and with two. Measured: the engine's stage runs forward and backward with gradients in place; on a processor
torch's profiler gives every allocation and release of its allocator, on a GPU the allocator's own peak is taken, and
what it has reserved. `--device cuda` predicts by a profile measured there (`--source measured`). `--json` prints one
object; `--only WORD` and `--sizes PX,PX` do what they say. Gives 1 when an error of allocated bytes is above 5 %.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.engine.stage import Stage
from gems.models import layers_of
from gems.models.build import boundary_shapes, build_layers, input_spec
from gems.partition.even import even
from gems.profile.profilers.fake import fake_profile
from gems.profile.profilers.layer_run import training_loss
from gems.profile.profilers.measured import measured_profile
from gems.profile.spans import Spans

MODELS = ("resnet110_v2", "vgg16", "amoebanet_d", "unet")
SIZES_PX = (256, 512)
NUM_STAGES = 4
LARGEST_ERROR = 0.05
STATE_COPIES = 3  # parameters, gradients, momentum


@dataclass(frozen=True, slots=True)
class Peaks:
    """Most bytes that a stage held: allocated, and reserved where the device tells."""

    allocated_bytes: int
    reserved_bytes: int | None


def spec_of(model: str, side_px: int, device: str) -> RunSpec:
    """Return the run that a row is about."""
    return compose(
        [
            f"model={model}",
            "data=synthetic",
            f"data.height_px={side_px}",
            f"data.width_px={side_px}",
            f"machine={device}",
        ]
    )


def predicted_bytes(spans: Spans, first: int, end: int, num_in_flight: int) -> int:
    """Return the peak of a stage of layers first up to end, from the tables."""
    at = (first, end)
    moving = max(spans.forward_peak[at], spans.backward_peak[at])
    static = STATE_COPIES * spans.params[at] + spans.buffers[at]
    return round(static + num_in_flight * spans.given[at] + (num_in_flight - 1) * spans.stash[at] + moving)


class Alone:
    """One stage on this process's device."""

    def __init__(self, spec: RunSpec, first: int, end: int) -> None:
        layers = layers_of(spec.model, spec.data)
        self._device = torch.device(spec.machine.device)
        kind: torch.dtype = getattr(torch, spec.train.dtype)
        given = input_spec(spec.data, spec.parallel.micro_batch_size, kind)
        shapes = boundary_shapes(layers, given.shape, kind, given.dtype)
        self._given = shapes[first - 1] if first else (given,)
        self._handed = shapes[end - 1]
        self._modules = nn.ModuleList(build_layers(layers, first, end, spec.seed, kind, self._device))
        parameters = list(self._modules.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._momentum = [torch.zeros_like(parameter) for parameter in parameters]
        self._loss = training_loss if end == len(layers) else None
        self._stage = Stage(self._modules, first == 0, lambda: None)
        held = [*parameters, *parameters, *self._momentum, *self._modules.buffers()]
        self._static_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)

    def peaks(self, num_in_flight: int) -> Peaks:
        """Run so many forwards, then their backwards, and gives the most that was held."""
        self._step(1)  # kernels and the engine's own meter are warm then
        if self._device.type == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            self._step(num_in_flight)
            return Peaks(torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved())
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as seen:
            self._step(num_in_flight)
        events = [event for event in seen.profiler.kineto_results.events() if event.name() == "[memory]"]
        held = most = 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            held += event.nbytes()
            most = max(most, held)
        return Peaks(self._static_bytes + most, None)

    def _step(self, num_in_flight: int) -> None:
        for micro_batch in range(num_in_flight):
            self._stage.forward(micro_batch, [self._tensor(spec) for spec in self._given], self._loss)
        for micro_batch in range(num_in_flight):
            self._stage.backward(micro_batch, self._gradients())

    def _tensor(self, spec: Any) -> Tensor:
        make = torch.randn if spec.dtype.is_floating_point else torch.zeros
        return make(spec.shape, dtype=spec.dtype, device=self._device)

    def _gradients(self) -> list[Tensor]:
        if self._loss is not None:
            return [torch.ones((), device=self._device)]
        return [self._tensor(spec) for spec in self._handed if spec.dtype.is_floating_point]


def run_child(model: str, side_px: int, device: str, first: int, end: int, num_in_flight: int) -> Peaks:
    """Measure one stage in a process of its own."""
    words = [model, str(side_px), device, str(first), str(end), str(num_in_flight)]
    ended = subprocess.run(
        [sys.executable, "-m", "scripts.bench.profile", "--stage", *words], capture_output=True, text=True
    )
    if ended.returncode:
        raise RuntimeError(ended.stderr[-2000:])
    return Peaks(**json.loads(ended.stdout.splitlines()[-1]))


def rows_of(model: str, side_px: int, device: str, source: str, threads: int) -> list[dict[str, Any]]:
    """Return the rows of one model at one size: a stage and a number of micro-batches in flight each."""
    spec = spec_of(model, side_px, device)
    torch.set_num_threads(threads)
    run = (spec.model, spec.data, spec.parallel.micro_batch_size, spec.train.dtype, spec.machine)
    taken = measured_profile(*run) if source == "measured" else fake_profile(*run)
    if device == "cuda":
        torch.cuda.empty_cache()
    spans, cut = Spans(taken), even(taken.num_layers, NUM_STAGES)
    rows = []
    for stage, (first, end) in enumerate(pairwise(cut)):
        for num_in_flight in (1, 2):
            predicted = predicted_bytes(spans, first, end, num_in_flight)
            found = run_child(model, side_px, device, first, end, num_in_flight)
            row = {
                "model": model, "side_px": side_px, "stage": stage, "micro_batches": num_in_flight,
                "predicted_bytes": predicted, "allocated_bytes": found.allocated_bytes,
                "reserved_bytes": found.reserved_bytes, "error": predicted / found.allocated_bytes - 1,
            }  # fmt: skip
            rows.append(row)
            print(_text(row), file=sys.stderr, flush=True)
    return rows


def main(argv: Sequence[str]) -> int:
    """Print the table, or with --json one object."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    parser.add_argument("--source", default="fake", choices=("fake", "measured"))
    parser.add_argument("--sizes", default=",".join(str(size) for size in SIZES_PX))
    parser.add_argument("--only", default="")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--stage", nargs=6, help=argparse.SUPPRESS)
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    if given.stage:
        model, side_px, device, first, end, num_in_flight = given.stage
        found = Alone(spec_of(model, int(side_px), device), int(first), int(end)).peaks(int(num_in_flight))
        print(json.dumps({"allocated_bytes": found.allocated_bytes, "reserved_bytes": found.reserved_bytes}))
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        print("bench-profile: torch sees no GPU here: unmeasured", file=sys.stderr)
        return 0
    print(
        f"{'model':14s}{'px':>6s}{'stage':>7s}{'flight':>8s}{'predicted':>12s}{'allocated':>12s}{'error':>8s}",
        file=sys.stderr,
    )
    rows = []
    for model in MODELS:
        for side_px in (int(word) for word in given.sizes.split(",")):
            if given.only in model:
                rows += rows_of(model, side_px, given.device, given.source, given.threads)
    if given.json:
        name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        print(json.dumps({"device": name, "torch": torch.__version__, "source": given.source, "rows": rows}))
    return 0 if all(abs(row["error"]) <= LARGEST_ERROR for row in rows) else 1


def _text(row: dict[str, Any]) -> str:
    reserved = "" if row["reserved_bytes"] is None else f"   reserved {row['reserved_bytes'] / 2**20:.1f} MiB"
    return (
        f"{row['model']:14s}{row['side_px']:6d}{row['stage']:7d}{row['micro_batches']:8d}"
        f"{row['predicted_bytes'] / 2**20:8.1f} MiB{row['allocated_bytes'] / 2**20:8.1f} MiB{100 * row['error']:7.2f}%{reserved}"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

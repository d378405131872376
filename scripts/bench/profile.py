"""How near a predicted peak is to the allocator's: each stage of a model cut in four, alone in a process of its own.

Predicted: the memory of a stage by the tables over the layers' profile, taken on fake tensors: parameters, gradients
and momentum, buffers, inputs, and the larger of the peaks of forward and backward, with one micro-batch in flight and
with two. Measured: the engine's stage runs forward and backward with gradients in place; on a processor torch's
profiler records every allocation and release of its allocator, on a GPU the allocator's own peak and what it has
reserved are read. `--device cuda` predicts by a profile measured there (`--source measured`). The exit code is 1 if an
error of allocated bytes is above 5 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

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
from scripts.bench.rig import MIB, Table, allocator_peaks, child, log, machine, parser

MODELS = ("resnet110_v2", "vgg16", "amoebanet_d", "unet")
SIZES_PX = (256, 512)
NUM_STAGES = 4
MAX_ERROR = 0.05
STATE_COPIES = 3  # parameters, gradients, momentum


def model_run(model: str, side_px: int, device: str) -> RunSpec:
    """Return the run that a row is about."""
    sizes = [f"data.height_px={side_px}", f"data.width_px={side_px}"]
    return compose([f"model={model}", "data=synthetic", *sizes, f"machine={device}"])


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
        self._inputs = shapes[first - 1] if first else (given,)
        self._outputs = shapes[end - 1]
        self._modules = nn.ModuleList(build_layers(layers, first, end, spec.seed, kind, self._device))
        parameters = list(self._modules.parameters())
        for parameter in parameters:
            parameter.grad = torch.zeros_like(parameter)
        self._momentum = [torch.zeros_like(parameter) for parameter in parameters]
        self._loss = training_loss if end == len(layers) else None
        self._stage = Stage(self._modules, first == 0, lambda: None)
        held = [*parameters, *parameters, *self._momentum, *self._modules.buffers()]
        self._static_bytes = sum(tensor.numel() * tensor.element_size() for tensor in held)

    def peaks(self, num_in_flight: int) -> dict[str, int | None]:
        """Run so many forwards, then their backwards, and return the most that was allocated and reserved."""
        self._step(1)  # kernels and the engine's own meter are warm then
        found = allocator_peaks(self._device, self._static_bytes, lambda: self._step(num_in_flight))
        return {"allocated_bytes": found[0], "reserved_bytes": found[1]}

    def _step(self, num_in_flight: int) -> None:
        for micro_batch in range(num_in_flight):
            self._stage.forward(micro_batch, [self._tensor(spec) for spec in self._inputs], self._loss)
        for micro_batch in range(num_in_flight):
            self._stage.backward(micro_batch, self._gradients())

    def _tensor(self, spec: Any) -> Tensor:
        make = torch.randn if spec.dtype.is_floating_point else torch.zeros
        return make(spec.shape, dtype=spec.dtype, device=self._device)

    def _gradients(self) -> list[Tensor]:
        if self._loss is not None:
            return [torch.ones((), device=self._device)]
        return [self._tensor(spec) for spec in self._outputs if spec.dtype.is_floating_point]


def measure_model(table: Table, model: str, side_px: int, device: str, source: str) -> list[dict[str, Any]]:
    """Return the rows of one model at one size: a stage and a number of micro-batches in flight each."""
    spec = model_run(model, side_px, device)
    run = (spec.model, spec.data, spec.parallel.micro_batch_size, spec.train.dtype, spec.machine)
    taken = measured_profile(*run) if source == "measured" else fake_profile(*run)
    if device == "cuda":
        torch.cuda.empty_cache()
    spans, cut = Spans(taken), even(taken.num_layers, NUM_STAGES)
    rows = []
    for stage, (first, end) in enumerate(pairwise(cut)):
        for num_in_flight in (1, 2):
            words = [model, str(side_px), device, str(first), str(end), str(num_in_flight)]
            found = child("scripts.bench.profile", "--stage", *words)
            if "failed" in found:
                raise RuntimeError(found["failed"])
            predicted = predicted_bytes(spans, first, end, num_in_flight)
            row = {
                "model": model, "side_px": side_px, "stage": stage, "micro_batches": num_in_flight,
                "predicted_bytes": predicted, **found, "error": predicted / found["allocated_bytes"] - 1,
            }  # fmt: skip
            rows.append(row)
            reserved = found["reserved_bytes"]
            table.row(
                model, side_px, stage, num_in_flight, predicted / MIB, found["allocated_bytes"] / MIB,
                100 * row["error"],
                note="" if reserved is None else f"reserved {reserved / MIB:.1f} MiB",
            )  # fmt: skip
    return rows


def main(argv: Sequence[str]) -> int:
    """Print the table, or with --json one object."""
    options = parser(__doc__, "json", "only", "threads")
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument("--source", default="fake", choices=("fake", "measured"))
    options.add_argument("--sizes", default=",".join(map(str, SIZES_PX)), help="sides of the images in px")
    options.add_argument("--stage", nargs=6, help=argparse.SUPPRESS)
    given = options.parse_args(argv)
    torch.set_num_threads(given.threads)
    if given.stage:
        model, side_px, device, *numbers = given.stage
        first, end, num_in_flight = map(int, numbers)
        print(json.dumps(Alone(model_run(model, int(side_px), device), first, end).peaks(num_in_flight)))
        return 0
    if given.device == "cuda" and not torch.cuda.is_available():
        log("bench-profile: torch sees no GPU here: unmeasured")
        return 0
    machine()
    table = Table(
        "model:<14", "px:6d", "stage:7d", "flight:8d", "predicted MiB:15.1f", "allocated MiB:15.1f", "error %:9.2f"
    )
    rows = []
    for model in MODELS:
        for side_px in (int(word) for word in given.sizes.split(",")):
            if given.only in model:
                rows += measure_model(table, model, side_px, given.device, given.source)
    if given.json:
        name = torch.cuda.get_device_name() if given.device == "cuda" else "cpu"
        print(json.dumps({"device": name, "torch": torch.__version__, "source": given.source, "rows": rows}))
    return int(any(abs(row["error"]) > MAX_ERROR for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Errors of predictions on this device: peaks of stages, and times and bytes of layers.

`--part peaks`: each stage of a model cut in four, alone in a process of its own. Predicted: the
memory of a stage by the tables over the layers' profile, taken on fake tensors: parameters,
gradients and momentum, buffers, inputs, and the larger of the peaks of forward and backward, with
one micro-batch in flight and with two. Measured: the engine's stage runs forward and backward with
gradients in place; on a processor torch's profiler records every allocation and release of its
allocator, on a GPU the allocator's own peak and what it has reserved are read. `--device cuda`
predicts by a profile measured there (`--source measured`). `--sizes` are the sides of the images in
px. The exit code is 1 if an error of allocated bytes is above 5 %.

`--part layers`: a profile on fake tensors, by the rates of this machine in conf/, over one measured
here: seconds of forward and backward and bytes kept for backward, of all layers together, and the
least and the most of any layer that takes a hundredth of the time or bytes.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise, product
from typing import Any

import torch
from torch import Tensor, nn

from gems.config.schema import RunSpec
from gems.engine.stages.whole import WholeStage
from gems.models import layers_of
from gems.models.build import boundary_shapes, build_layers, input_spec
from gems.partition.even import even
from gems.profile.model_profile import LayerProfile, ModelProfile
from gems.profile.profilers.fake import fake_profile
from gems.profile.profilers.layer_run import training_loss
from gems.profile.profilers.measured import measured_profile
from gems.profile.spans import Spans
from scripts.bench.rig import (
    Table,
    allocator_peaks,
    answered,
    composed,
    gpu_machine,
    in_child,
    log,
    machine,
    options,
    spread,
    square,
)

MODELS = ("resnet110_v2", "vgg16", "amoebanet_d", "unet")
NUM_STAGES = 4
MAX_ERROR = 0.05
STATE_COPIES = 3  # parameters, gradients, momentum
LARGE_SHARE = 0.01  # of a layer that counts on its own
PARTS = ("peaks", "layers")
OF_A_LAYER: dict[str, Callable[[LayerProfile], float]] = {
    "forward_s": lambda layer: layer.forward_s,
    "backward_s": lambda layer: layer.input_grad_s + layer.weight_grad_s,
    "kept_bytes": lambda layer: layer.kept_bytes,
}


def _model_run(model: str, side_px: int, device: str) -> RunSpec:
    return composed(f"model={model} data=synthetic {square(side_px)} machine={device}")


def predicted_bytes(spans: Spans, first: int, end: int, num_in_flight: int) -> int:
    """Return the peak of a stage of layers first up to end, from the tables."""
    at = (first, end)
    moving = max(spans.forward_peak[at], spans.backward_peak[at])
    static = STATE_COPIES * spans.params[at] + spans.buffers[at]
    return round(
        static + num_in_flight * spans.given[at] + (num_in_flight - 1) * spans.stash[at] + moving
    )


def measured_stage(
    model: str, side_px: int, kind: str, first: int, end: int, num_in_flight: int
) -> dict[str, int | None]:
    """Run forwards of a stage, then their backwards; return the peaks allocated and reserved."""
    spec = _model_run(model, side_px, kind)
    device = torch.device(kind)
    layers = layers_of(spec.model, spec.data)
    dtype: torch.dtype = getattr(torch, spec.train.layer_dtype)
    given = input_spec(spec.data, spec.parallel.micro_batch_size, dtype)
    shapes = boundary_shapes(layers, given.shape, dtype, given.dtype)
    inputs = shapes[first - 1] if first else (given,)
    outputs = shapes[end - 1]
    modules = nn.ModuleList(build_layers(layers, first, end, spec.seed, dtype, device))
    parameters = list(modules.parameters())
    for parameter in parameters:
        parameter.grad = torch.zeros_like(parameter)
    momentum = [torch.zeros_like(parameter) for parameter in parameters]
    static = [*parameters, *parameters, *momentum, *modules.buffers()]
    loss = training_loss if end == len(layers) else None
    stage = WholeStage(modules, first == 0, lambda: None)

    def tensor(shape: Any) -> Tensor:
        make = torch.randn if shape.dtype.is_floating_point else torch.zeros
        return make(shape.shape, dtype=shape.dtype, device=device)

    def step(num: int) -> None:
        for micro_batch in range(num):
            stage.forward(micro_batch, [tensor(shape) for shape in inputs], loss)
        for micro_batch in range(num):
            ones = [torch.ones((), device=device)] if loss else None
            stage.backward(
                micro_batch,
                ones or [tensor(shape) for shape in outputs if shape.dtype.is_floating_point],
            )

    step(1)  # kernels and the engine's own meter are warm then
    static_bytes = sum(each.numel() * each.element_size() for each in static)
    allocated, reserved = allocator_peaks(device, static_bytes, lambda: step(num_in_flight))
    return {"allocated_bytes": allocated, "reserved_bytes": reserved}


def model_rows(model: str, side_px: int, device: str, source: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of one model at one size.

    A stage and a number of micro-batches in flight each.
    """
    spec = _model_run(model, side_px, device)
    take = measured_profile if source == "measured" else fake_profile
    taken = take(
        spec.model, spec.data, spec.parallel.micro_batch_size, spec.train.layer_dtype, spec.machine
    )
    if device == "cuda":
        torch.cuda.empty_cache()
    spans = Spans(taken)
    cut = even(taken.num_layers, NUM_STAGES)
    for (stage, (first, end)), num_in_flight in product(enumerate(pairwise(cut)), (1, 2)):
        row = in_child(measured_stage, model, side_px, device, first, end, num_in_flight, threads=1)
        if "failed" in row:
            raise RuntimeError(row["failed"])
        predicted = predicted_bytes(spans, first, end, num_in_flight)
        yield {
            "model": model,
            "side_px": side_px,
            "stage": stage,
            "micro_batches": num_in_flight,
            "predicted_bytes": predicted,
            **row,
            "error": predicted / row["allocated_bytes"] - 1,
        }


def layer_rows(model: str, side_px: int, device: str) -> Iterator[dict[str, Any]]:
    """Yield each quantity of a model's layers by a fake profile beside a measured one."""
    spec = _model_run(model, side_px, device)
    sheet = composed(gpu_machine()).machine if device == "cuda" else spec.machine
    parts = (spec.model, spec.data, spec.parallel.micro_batch_size, spec.train.layer_dtype)
    fake = fake_profile(*parts, sheet)
    real = measured_profile(*parts, replace(spec.machine, name=sheet.name))
    for quantity in OF_A_LAYER:
        yield {"model": model, "side_px": side_px, **compared(fake, real, quantity)}


def compared(fake: ModelProfile, real: ModelProfile, quantity: str) -> dict[str, Any]:
    """Return a quantity of all layers by both profiles, and the spread of their ratio.

    Raises:
        ValueError: Nothing was measured.
    """
    of, (_, unit) = OF_A_LAYER[quantity], quantity.rsplit("_", 1)
    pairs = [
        (of(predicted), of(measured))
        for predicted, measured in zip(fake.layers, real.layers, strict=True)
    ]
    predicted, measured = map(sum, zip(*pairs, strict=True))
    if not measured:
        raise ValueError(f"{quantity}: nothing was measured")
    large = spread(
        [max(one, 1e-12) / other for one, other in pairs if other > LARGE_SHARE * measured]
    )
    return {
        "quantity": quantity,
        f"predicted_{unit}": predicted,
        f"measured_{unit}": measured,
        "ratio": predicted / measured,
        "least_ratio": large["least"],
        "most_ratio": large["most"],
    }


def main(argv: list[str]) -> int:
    """Print the table, or with --json one object."""
    arguments = options(
        __doc__,
        argv,
        json=False,
        only="",
        threads=1,
        device=("cpu", "cuda"),
        source=("fake", "measured"),
        sizes=[256, 512],
        part=PARTS,
    )
    torch.set_num_threads(arguments.threads)
    if arguments.device == "cuda" and not torch.cuda.is_available():
        log("bench-profile: torch sees no GPU here: unmeasured")
        return 0
    machine()
    cases = [
        (model, side_px)
        for model, side_px in product(MODELS, arguments.sizes)
        if arguments.only in model
    ]
    name = torch.cuda.get_device_name() if arguments.device == "cuda" else "cpu"
    answer = {"device": name, "torch": torch.__version__, "source": arguments.source}
    if arguments.part == "layers":
        table = Table(
            "model:<14",
            "px=side_px:6d",
            "quantity:>12",
            "predicted ms=predicted_s:>14.2f",
            "measured ms=measured_s:>13.2f",
            "predicted MiB=predicted_bytes:>15.1f",
            "measured MiB=measured_bytes:>14.1f",
            "ratio:>7.2f",
            "least=least_ratio:>7.2f",
            "most=most_ratio:>7.2f",
        )
        results = table.rows(row for case in cases for row in layer_rows(*case, arguments.device))
        return answered(answer | {"rows": results}, False, arguments.json)
    table = Table(
        "model:<14",
        "px=side_px:6d",
        "stage:7d",
        "flight=micro_batches:8d",
        "predicted MiB=predicted_bytes:15.1f",
        "allocated MiB=allocated_bytes:15.1f",
        "error %=error:9.2f",
        "reserved MiB=reserved_bytes:14.1f",
    )
    rows = table.rows(
        row
        for model, side_px in cases
        for row in model_rows(model, side_px, arguments.device, arguments.source)
    )
    return answered(
        answer | {"rows": rows}, any(abs(row["error"]) > MAX_ERROR for row in rows), arguments.json
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

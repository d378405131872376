"""One training step of an image by `gems.streaming`, beside others, on one core or on a GPU.

Methods: the whole image; torch's checkpoint around each block; lightstream (Pinckaers et al. 2019,
arXiv 1911.04432), by the side of its tile; and strips or blocks of `gems.streaming`: `8` is 8
strips, `8:3` keeps the graphs of the last 3 for backward, `4x4` is 16 blocks. Every measurement
has a process of its own, in turn (A B A B), with a first step that is not timed. Time on a
processor is that of the process, on one thread. Peaks are the growth of resident memory, and the
bytes of tensors by torch's profiler; on a GPU, those of its allocator. `error` is the largest
difference of a parameter's gradient from that of the whole image, over its largest value, with the
parameter that has it. Norms of the ResNets are frozen, which lightstream needs. Each measurement is
printed as it comes on stderr, then medians and ratios beside targets; JSON on stdout.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gems.models import layers_of
from gems.models.build import build_layers
from gems.utils.host_memory import release_freed_memory, resident_bytes
from scripts.bench.rig import (
    Table,
    allocator_peaks,
    answered,
    composed,
    in_child,
    in_turns,
    log,
    machine,
    options,
    square,
)

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

MODELS = {
    "resnet34": "model=resnet34 model.norm=frozen_batch",
    "resnet50": "model=resnet50 model.norm=frozen_batch",
    "convnext_tiny": "model=convnext_tiny",
}
WHOLE, CHECKPOINT, LIGHTSTREAM, STREAM = "whole", "checkpoint", "lightstream", "stream"
LIMIT_S = 7200.0
HALF = 0.5
WRONG = 1e-2
# most time over that of lightstream, by side, and over the whole image with 8 divisions
OVER_LIGHTSTREAM = {2048: 0.5, 4096: 0.7}
OVER_WHOLE = {"resnet34": 1.25, "resnet50": 1.10}
OVER_CHECKPOINT = 0.8
Step = Callable[[], None]
Row = dict[str, Any]


def main(argv: list[str] | None = None) -> int:
    """Measure all methods for each network and side, and print them beside the targets."""
    chosen = options(
        __doc__,
        argv,
        models=["resnet34", "resnet50", "convnext_tiny"],
        sides=[1024],
        divisions=["8", "16"],
        tiles={"nargs": "*", "type": int, "help": "sides of tiles; default: 3/4 and all of a side"},
        methods=[WHOLE, CHECKPOINT, LIGHTSTREAM, STREAM],
        dtype=("float32", "float64"),
        rounds=2,
        steps=1,
    )
    facts = machine()
    rows: list[Row] = []
    for model in chosen.models:
        for side in chosen.sides:
            tiles = chosen.tiles or [side * 3 // 4, side]
            ways = [(WHOLE, ""), (CHECKPOINT, "")]
            ways += [(LIGHTSTREAM, str(tile)) for tile in tiles]
            ways += [(STREAM, division) for division in chosen.divisions]
            rows += _raced(model, side, [way for way in ways if way[0] in chosen.methods], chosen)
    return answered({"machine": facts, "rows": rows}, False)


def _raced(model: str, side: int, ways: list[tuple[str, str]], chosen: Any) -> list[Row]:
    """Measure methods in turn, print the rows and a summary, and return the medians."""
    columns = ["model:<14", "side=side_px:<6", "method=way:<18", "step s=step_s:>8.2f"]
    columns += ["resident MB=resident_bytes:>13.0f", "tensors MB=tensor_bytes:>12.0f"]
    table = Table(*columns, "error:>10.1e")
    with tempfile.TemporaryDirectory() as scratch:

        def measure(way: tuple[str, str]) -> Row:
            results = in_child(
                measured,
                [model, side, chosen.dtype],
                *way,
                chosen.steps,
                scratch,
                limit_s=LIMIT_S,
                threads=1,
            )
            row = {"model": model, "side_px": side, "way": " ".join(way), **results}
            return table.row(row, results.get("failed") or results["worst"])

        results = in_turns({way: partial(measure, way) for way in ways}, chosen.rounds)
    log("medians; ratios of times, medians over rounds")
    table = Table(*columns, "over whole=whole:>12.3f", "over checkpoint=checkpoint:>17.3f")
    rows = []
    for runs in results.values():
        row = {key: _median([run.get(key) for run in runs]) for key in runs[0]}
        for other in (WHOLE, CHECKPOINT):
            pairs = zip(runs, results.get((other, ""), []), strict=False)
            row[other] = _median([_ratio(run, base, "step_s") for run, base in pairs])
        rows.append(table.row(row, row.get("failed") or ""))
    for line in targets(model, side, rows):
        log(line)
    return rows


def _median(values: list[Any]) -> Any:
    """Return the median of numbers, or the first of other values."""
    numbers = [value for value in values if isinstance(value, int | float)]
    return statistics.median(numbers) if numbers else values[0] if values else None


def _ratio(run: Row, base: Row, key: str) -> float | None:
    return run[key] / base[key] if key in run and key in base else None


def _peak(row: Row) -> float:
    return float(row["tensor_bytes"])


def _is_wrong(row: Row) -> bool:
    return row["error"] is not None and row["error"] > WRONG


def targets(model: str, side: int, rows: list[Row]) -> Iterator[str]:
    """Yield the results of the rows beside the targets."""
    done = [row for row in rows if "step_s" in row]
    ours = [row for row in done if row["way"].startswith(STREAM)]
    theirs = [row for row in done if row["way"].startswith(LIGHTSTREAM) and not _is_wrong(row)]
    others = [(CHECKPOINT, [row for row in done if row["way"].strip() == CHECKPOINT])]
    others.append((LIGHTSTREAM, theirs))
    for name, rivals in others:
        most = OVER_CHECKPOINT if name == CHECKPOINT else OVER_LIGHTSTREAM.get(side)
        rival = min(rivals, key=lambda row: row["step_s"], default=None)
        small = [row for row in ours if rival and _peak(row) <= HALF * _peak(rival)]
        if rival is not None:
            best = min(small, key=lambda row: row["step_s"], default=None)
            said = "nothing of ours has half of its bytes"
            if best is not None:
                ratio, share = best["step_s"] / rival["step_s"], _peak(best) / _peak(rival)
                said = f"{best['way']} takes {ratio:.2f} of its time, with {share:.2f} of its bytes"
            goal = "no target at this side" if most is None else f"target: at most {most}"
            yield f"{model}, {side} px, beside {rival['way'].strip()}: {said} ({goal})"
    eight = next((row for row in ours if row["way"] == f"{STREAM} 8"), None)
    if eight and eight.get(WHOLE) and model in OVER_WHOLE:
        yield (
            f"{model}, {side} px: {eight['way']} takes {eight[WHOLE]:.2f} of the whole image's time"
            f" (target: at most {OVER_WHOLE[model]})"
        )


def measured(case: tuple[str, int, str], way: str, how: str, steps: int, scratch: str) -> Row:
    """Return time, peaks and the error of a method; the whole image leaves its gradients.

    A case is a network, the side of the image and the type of its values.
    """
    import torch

    model, side, dtype = case
    torch.set_num_threads(1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(0)
    network = network_of(model, side).to(device, getattr(torch, dtype))
    image = torch.randn(1, 3, side, side).to(device, getattr(torch, dtype))
    step = _STEPS[way](network, image, how)

    def run() -> float:
        for parameter in network.parameters():
            parameter.grad = None
        begin_s = _now(device)
        step()
        return _now(device) - begin_s

    row: Row = {}
    if device.type == "cuda":
        run()
        row["tensor_bytes"] = allocator_peaks(device, 0, run)[0]
    else:
        release_freed_memory()
        before = resident_bytes("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        run()
        row["resident_bytes"] = resident_bytes("VmHWM") - before
    row["step_s"] = statistics.median(run() for _ in range(steps))
    if device.type == "cpu":
        row["tensor_bytes"] = allocator_peaks(device, 0, run)[0]
    return row | _error(network, Path(scratch) / "whole.pt", is_whole=way == WHOLE)


def network_of(model: str, side: int) -> nn.Sequential:
    """Return a network with the values of its seed, as a chain of blocks; frozen norms stay."""
    from torch import nn

    spec = composed(MODELS[model], square(side))
    layers = layers_of(spec.model, spec.data)
    network = nn.Sequential(*build_layers(layers, 0, len(layers), 0))
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.requires_grad_(False)
        if hasattr(module, "scale") and isinstance(module.scale, nn.Parameter):
            nn.init.constant_(module.scale, 0.1)  # of ConvNeXt: at 1e-6 branches count for nothing
    return network


def _error(network: nn.Module, path: Path, is_whole: bool) -> Row:
    """Keep the gradients of the whole image, or compare with them."""
    import torch

    gradients = {
        name: parameter.grad
        for name, parameter in network.named_parameters()
        if parameter.requires_grad
    }
    if is_whole:
        torch.save(gradients, path)
    if not path.exists():
        return {"error": None, "worst": ""}
    errors = {}
    for name, wanted in torch.load(path, map_location="cpu").items():
        own = gradients[name]
        difference = wanted if own is None else own.cpu() - wanted
        errors[name] = float(difference.abs().max() / wanted.abs().max())
    worst = max(errors, key=errors.__getitem__)
    return {"error": errors[worst], "worst": worst}


def _now(device: torch.device) -> float:
    """Return the time: on a processor that of the process, so that others disturb less."""
    import torch

    if device.type == "cpu":
        return time.process_time()
    torch.cuda.synchronize()
    return time.perf_counter()


def _learn(logits: Tensor) -> None:
    logits.square().mean().backward()  # gradients that rounding of large logits does not swamp


def _whole(network: nn.Sequential, image: Tensor, how: str) -> Step:
    return lambda: _learn(network(image))


def _checkpoint(network: nn.Sequential, image: Tensor, how: str) -> Step:
    from torch.utils.checkpoint import checkpoint

    def step() -> None:
        x = image
        for block in network:
            x = checkpoint(block, x, use_reentrant=False)
        _learn(x)

    return step


def _stream(network: nn.Sequential, image: Tensor, how: str) -> Step:
    from gems.streaming import stream

    parts, _, keep = how.partition(":")
    grid = [int(part) for part in parts.split("x")]
    streamed = stream(network, image, grid, kept=int(keep or 1))
    return lambda: _learn(streamed(image))


def _lightstream(network: nn.Sequential, image: Tensor, how: str) -> Step:
    """Return lightstream's step: the blocks in tiles, and the head on their whole map."""
    from torch import nn

    package = ModuleType(LIGHTSTREAM)  # its own imports Lightning, which its core does not need
    spec = find_spec(LIGHTSTREAM)
    if spec is None:
        raise SystemExit("not installed: make bench-streaming, or pip install lightstream==1.0.7")
    package.__path__ = spec.submodule_search_locations or []
    sys.modules[LIGHTSTREAM] = package
    from lightstream.core.constructor import StreamingConstructor

    device = image.device
    trunk, head = network[:-1].cpu(), network[-1]

    def even(module: nn.Module) -> None:
        for block in module.modules():
            if hasattr(block, "scale") and isinstance(block.scale, nn.Parameter):
                nn.init.ones_(block.scale)  # while it looks for the edges, as it does for timm's

    constructor = StreamingConstructor(
        trunk,
        int(how),
        verbose=False,
        add_keep_modules=[nn.BatchNorm2d],
        normalize_on_gpu=False,
        before_streaming_init_callbacks=[even],
    )
    constructor.statistics_on_cpu = False  # would move the network to a GPU afterwards
    streaming = constructor.prepare_streaming_model()
    streaming.stream_module.to(device)
    streaming.device = device

    def step() -> None:
        spec = streaming.forward(image).requires_grad_()
        _learn(head(spec))
        streaming.backward(image, spec.grad)

    return step


_STEPS: dict[str, Callable[..., Step]] = {
    WHOLE: _whole,
    CHECKPOINT: _checkpoint,
    LIGHTSTREAM: _lightstream,
    STREAM: _stream,
}


if __name__ == "__main__":
    sys.exit(main())

"""What train.compile brings.

Forward and backward of a micro-batch of a ResNet, with compiled layers and without.
A B A B interleaved in one process, after two rounds in which kernels are made. The ratio of a pair
of neighbours in time is taken, and the median of those printed. On a processor with one thread the
time is the process's own, so that other processes disturb less. `--device cuda` runs the same on a
GPU. The exit code is 1 if a gradient differs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from gems.config.schema import DataConfig, ModelConfig
from gems.engine.stage import CompiledStage, Stage
from gems.models import layers_of
from gems.models.build import build_layers
from scripts.bench.rig import Table, answered, in_turns, machine, opened_device, options, quartiles

WRONG = 1e-3  # of the largest gradient, in float32
CASES = ((20, 32, 16), (20, 64, 4), (20, 128, 2), (56, 32, 8))  # depth, side in pixels, images


class Bench:
    """A ResNet as one stage, twice."""

    def __init__(self, depth: int, side_px: int, images: int, device: torch.device) -> None:
        model = ModelConfig(depth=depth)
        data = DataConfig(height_px=side_px, width_px=side_px)
        has_own_clock = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.process_time if has_own_clock else time.perf_counter
        self._device = device
        torch.manual_seed(0)
        self._images = torch.randn(images, 3, side_px, side_px).to(device)
        self._gradient = torch.randn(()).to(device)

        def built() -> nn.ModuleList:
            layers = layers_of(model, data)
            return nn.ModuleList(
                build_layers(layers, 0, len(layers), 0, torch.float32, device)
            ).train()

        self.plain = Stage(built(), True, lambda: None)
        self.compiled = CompiledStage(built(), True, lambda: None, device, lambda layer: False)

    def timed(self, stage: Stage) -> float:
        """Return the seconds of forward and backward."""
        for parameter in stage.modules.parameters():
            parameter.grad = None
        start_s = self._now()
        stage.forward(0, (self._images,), lambda output: output.square().mean())
        stage.backward(0, (self._gradient,))
        return self._now() - start_s

    def error(self) -> float:
        """Return the largest error of a gradient, as a share of the largest gradient of all."""
        pairs = zip(
            self.plain.modules.parameters(), self.compiled.modules.parameters(), strict=True
        )
        found = [
            (one.grad, other.grad)
            for one, other in pairs
            if one.grad is not None and other.grad is not None
        ]
        return max(float((one - other).abs().max()) for one, other in found) / max(
            float(one.abs().max()) for one, _ in found
        )

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()


def _run_case(case: tuple[int, int, int], device: torch.device, rounds: int) -> dict[str, Any]:
    bench = Bench(*case, device)
    ways: dict[str, Callable[[], float]] = {
        "plain": lambda: bench.timed(bench.plain),
        "compiled": lambda: bench.timed(bench.compiled),
    }
    begin_s = time.perf_counter()
    bench.timed(bench.compiled)
    made_s = time.perf_counter() - begin_s
    bench.timed(bench.plain)
    error = bench.error()
    in_turns(ways, 1)
    times = in_turns(ways, rounds)
    ratios = [
        after / before for before, after in zip(times["plain"], times["compiled"], strict=True)
    ]
    depth, side_px, images = case
    return {
        "case": f"ResNet-{depth}, {side_px} px, {images} images",
        "first_s": made_s,
        "plain_ms": statistics.median(times["plain"]) * 1e3,
        "compiled_ms": statistics.median(times["compiled"]) * 1e3,
        "ratio": statistics.median(ratios),
        **quartiles(ratios),
        "error": error,
        "bytes_ratio": (bench.compiled.stash_bytes or 0) / (bench.plain.stash_bytes or 1),
    }


def main(argv: list[str]) -> int:
    """Print the table, or with --json one object; return 1 if a gradient differs."""
    given = options(
        __doc__, argv, json=False, only="", threads=1, device=("cpu", "cuda"), rounds=15
    )
    if (device := opened_device("bench-compile", given.device, given.threads)) is None:
        return 0
    facts = machine()
    table = Table(
        "forward and backward=case:<32",
        "plain (ms)=plain_ms:12.1f",
        "compiled (ms)=compiled_ms:15.1f",
        "ratio=ratio:8.2f",
        "kept bytes=bytes_ratio:12.2f",
        "first (s)=first_s:11.0f",
    )
    rows = table.rows(
        (
            _run_case(case, device, given.rounds)
            for case in CASES
            if given.only in f"ResNet-{case[0]}, {case[1]} px"
        ),
        lambda row: "" if row["error"] < WRONG else "GRADIENTS DIFFER",
    )
    answer = {"machine": facts, "torch": torch.__version__, "rounds": given.rounds, "cases": rows}
    return answered(answer, not all(row["error"] < WRONG for row in rows), given.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

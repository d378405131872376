"""What a split backward costs: (I then W) over the full backward, for each layer kind and for a ResNet stage.

A B A B interleaved in one process: a full backward, then ours (input gradient now, weight gradient later), then torch's
own helper (torch.distributed.pipelining's stage_backward_input and stage_backward_weight). The ratio of a pair of
neighbours in time is taken, and the median of those printed. On a processor with one thread the time is the process's
own, so that other processes disturb less. `--device cuda` runs the same on a GPU. The exit code is 1 if a gradient
differs.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gems.config.schema import DataConfig, ModelConfig
from gems.engine.stage import Stage
from gems.models import layers_of
from gems.models.build import build_layers
from gems.utils.host_memory import keep_freed_memory
from scripts.bench.rig import Table, in_turns, log, machine, parser

WRONG = 1e-3
Timed = Callable[[], tuple[float, float]]  # seconds of a whole backward, and of its first part


@dataclass(frozen=True, slots=True)
class Case:
    """A row of the table: some layers and the shape of their input; `is_indices` for an embedding."""

    name: str
    make: Callable[[], list[nn.Module]]
    shape: tuple[int, ...]
    is_indices: bool = False


def has_own_clock(device: torch.device) -> bool:
    """Return whether the process's own time is that of the work: on one thread of a processor."""
    return device.type == "cpu" and torch.get_num_threads() == 1


class SelfAttention(nn.Module):
    """Attention of a sequence (N, L, E) to itself."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended sequence."""
        made: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return made


def conv(channels: int, kernel: int, out: int | None = None) -> Callable[[], list[nn.Module]]:
    """Build a convolution as in a residual block."""
    return lambda: [nn.Conv2d(channels, out or channels, kernel, padding=kernel // 2, bias=False)]


def resnet_stage(depth: int, version: int, height_px: int, part: int, num_parts: int) -> list[nn.Module]:
    """Build one of equal parts of a ResNet."""
    layers = layers_of(ModelConfig(depth=depth, version=version), DataConfig(height_px=height_px, width_px=height_px))
    first, last = part * len(layers) // num_parts, (part + 1) * len(layers) // num_parts
    return build_layers(layers, first, last, seed=0)


def cases(scale: int) -> list[Case]:
    """Return all rows; `scale` multiplies the batch, for a GPU."""
    return [
        Case("conv 3x3, 16 ch, 32 px (ResNet)", conv(16, 3), (16 * scale, 16, 32, 32)),
        Case("conv 3x3, 64 ch, 8 px (ResNet)", conv(64, 3), (16 * scale, 64, 8, 8)),
        Case("conv 1x1, 64 ch, 32 px (ResNet)", conv(64, 1), (8 * scale, 64, 32, 32)),
        Case("conv 1x1, 256 ch, 14 px (ResNet)", conv(256, 1), (8 * scale, 256, 14, 14)),
        Case("conv 3x3, 64 ch, 112 px (VGG)", conv(64, 3), (scale, 64, 112, 112)),
        Case("conv 3x3, 256 ch, 28 px (VGG)", conv(256, 3), (2 * scale, 256, 28, 28)),
        Case("linear 512 -> 512", lambda: [nn.Linear(512, 512)], (256 * scale, 512)),
        Case("linear 4096 -> 1024 (VGG)", lambda: [nn.Linear(4096, 1024)], (32 * scale, 4096)),
        Case("batch norm, 64 ch", lambda: [nn.BatchNorm2d(64)], (8 * scale, 64, 32, 32)),
        Case("group norm, 64 ch", lambda: [nn.GroupNorm(8, 64)], (8 * scale, 64, 32, 32)),
        Case("layer norm, 512", lambda: [nn.LayerNorm(512)], (8 * scale, 128, 512)),
        Case("embedding, 1000 x 256", lambda: [nn.Embedding(1000, 256)], (8 * scale, 256), is_indices=True),
        Case("attention, 256 wide, 128 long", lambda: [SelfAttention(256, 8)], (4 * scale, 128, 256)),
        Case("ResNet-20 v1, stage 2 of 4, 32 px", lambda: resnet_stage(20, 1, 32, 1, 4), (32 * scale, 16, 32, 32)),
        Case("ResNet-56 v1, stage 2 of 4, 32 px", lambda: resnet_stage(56, 1, 32, 1, 4), (8 * scale, 16, 32, 32)),
        Case("ResNet-110 v2, stage 2 of 4, 32 px", lambda: resnet_stage(110, 2, 32, 1, 4), (4 * scale, 64, 32, 32)),
        Case("ResNet-56 v1, stage 2 of 4, 128 px", lambda: resnet_stage(56, 1, 128, 1, 4), (scale, 16, 128, 128)),
    ]  # fmt: skip


class Bench:
    """Runs the backward of one case in three ways, on copies of the same layers."""

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        self._device = device
        self._clock = time.process_time if has_own_clock(device) else time.perf_counter
        self._case = case
        self._input = (
            torch.randint(0, 1000, case.shape, device=device)
            if case.is_indices
            else torch.randn(case.shape, device=device)
        )
        self._layers = {way: self._build() for way in ("full", "ours", "torch")}
        self._stages = {way: Stage(self._layers[way], case.is_indices, lambda: None) for way in ("full", "ours")}
        (output,) = self._stages["full"].infer((self._input,))
        self._gradient = torch.randn_like(output)
        self.stage = self._stages["ours"]

    def _build(self) -> nn.ModuleList:
        torch.manual_seed(0)
        layers = nn.ModuleList(self._case.make()).to(self._device)
        for parameter in layers.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return layers

    def full(self) -> tuple[float, float]:
        """Time a full backward."""
        stage = self._stages["full"]
        stage.forward(0, (self._input,))
        begin = self._now()
        stage.backward(0, (self._gradient,))
        end = self._now()
        return end - begin, end - begin

    def ours(self) -> tuple[float, float]:
        """Time our two parts, one after the other."""
        stage = self._stages["ours"]
        stage.forward(0, (self._input,), None, True)
        begin = self._now()
        stage.backward_input(0, (self._gradient,))
        middle = self._now()
        stage.backward_weight(0)
        return self._now() - begin, middle - begin

    def torch(self) -> tuple[float, float]:
        """Time the two functions of torch.distributed.pipelining, one after the other."""
        from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

        layers = self._layers["torch"]
        leaf = self._input.detach().requires_grad_(not self._case.is_indices)
        value = leaf
        for layer in layers:
            value = layer(value)
        begin = self._now()
        _, groups = stage_backward_input([value], [self._gradient], [leaf], layers.parameters())
        middle = self._now()
        stage_backward_weight(layers.parameters(), groups)
        return self._now() - begin, middle - begin

    def error(self, way: str) -> float:
        """Return the largest relative error of the gradients of one way against the full backward's."""
        pairs = zip(self._layers["full"].parameters(), self._layers[way].parameters(), strict=True)
        found = [(a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None]
        return max(float((a - b).abs().max() / a.abs().max()) for a, b in found)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()


def run_case(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    """Measure one case and return its row."""
    bench = Bench(case, device)
    ways: dict[str, Timed] = {"full": bench.full, "ours": bench.ours, "torch": bench.torch}
    failed = ""
    for _ in range(2):
        for way in list(ways):
            try:
                ways[way]()
            except RuntimeError as error:
                if way != "torch":
                    raise
                failed = " ".join(str(error).split())
                del ways[way]
    if "torch" in ways and bench.error("torch") > WRONG:
        failed = "its gradients are wrong"
        del ways["torch"]
    times = in_turns(ways, rounds)
    full = [whole for whole, _ in times["full"]]
    row: dict[str, Any] = {"case": case.name, "full_ms": statistics.median(full) * 1e3}
    for way in ("ours", "torch"):
        if way in times:
            ratios = [both / whole for (both, _), whole in zip(times[way], full, strict=True)]
            row[f"{way}_ratio"] = statistics.median(ratios)
            row[f"{way}_input_share"] = statistics.median(
                first / whole for (_, first), whole in zip(times[way], full, strict=True)
            )
    row |= {
        "bit_equal": bench.error("ours") == 0.0,
        "stash_bytes": bench.stage.stash_bytes,
        "held_for_weights_bytes": bench.stage.held_for_weights_bytes,
    }
    return row | ({"torch_failed": failed} if failed else {})


def main(argv: list[str]) -> int:
    """Print the table, or with --json one object; return 1 if a gradient differs."""
    options = parser(__doc__, "json", "only", "threads")
    options.add_argument("--device", default="cpu", choices=("cpu", "cuda"))
    options.add_argument("--rounds", type=int, default=15)
    given = options.parse_args(argv)
    if given.device == "cuda" and not torch.cuda.is_available():
        log("bench-split: torch sees no GPU here: unmeasured")
        return 0
    machine()
    torch.set_num_threads(given.threads)
    device = torch.device(given.device)
    if device.type == "cpu":
        keep_freed_memory()  # as the ranks of a run
    table = Table(
        "(I then W) over the full backward:<36", "full ms:9.2f", "ours:8.2f", "of it I:9.2f", "torch:8.2f",
        "of it I:9.2f",
        "held/stash MB:>16",
    )  # fmt: skip
    rows = []
    for case in cases(16 if given.device == "cuda" else 1):
        if given.only not in case.name:
            continue
        row = run_case(case, device, given.rounds)
        rows.append(row)
        shares = (row.get(f"{way}_{what}", "fails") for way in ("ours", "torch") for what in ("ratio", "input_share"))
        held = f"{row['held_for_weights_bytes'] / 1e6:.1f}/{row['stash_bytes'] / 1e6:.1f}"
        table.row(case.name, row["full_ms"], *shares, held, note="" if row["bit_equal"] else "GRADIENTS DIFFER")
    if given.json:
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
        print(json.dumps({"device": name, "torch": torch.__version__, "rounds": given.rounds, "cases": rows}))
    return int(not all(row["bit_equal"] for row in rows))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

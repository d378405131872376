"""Cost of a split backward (I then W) over the full one, by layer kind and for a ResNet stage.

A B A B interleaved in one process: a full backward, then ours (input gradient now, weight gradient
later), then torch's own helper (torch.distributed.pipelining's stage_backward_input and
stage_backward_weight). The ratio of a pair of neighbours in time is taken, and the median of those
printed. On a processor with one thread the time is the process's own, so that other processes
disturb less. `--device cuda` runs the same on a GPU. The exit code is 1 if a gradient differs.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from gems.autograd.outputs import as_tuple
from gems.config.schema import DataConfig, ModelConfig
from gems.engine.stages.whole import WholeStage
from gems.models import layers_of
from gems.models.build import build_layers
from scripts.bench.rig import Table, answered, in_turns, machine, opened_device, options

WRONG = 1e-3


class SelfAttention(nn.Module):
    """Attention of a sequence (N, L, E) to itself."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(width, num_heads, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        """Return the attended sequence."""
        output: Tensor = self.attention(x, x, x, need_weights=False)[0]
        return output


# A row of the table: its layers and the shape of their input, whose batch is 16 times as large on a
# GPU.
Case = tuple[str, Callable[[], nn.Module | list[nn.Module]], tuple[int, ...]]
EMBEDDING = "embedding, 1000 x 256"


def conv(side: int, channels: int, side_px: int, batch: int, network: str) -> Case:
    """Return the case of a convolution of `side` x `side`."""
    return (
        f"conv {side}x{side}, {channels} ch, {side_px} px ({network})",
        lambda: nn.Conv2d(channels, channels, side, padding=side // 2, bias=False),
        (batch, channels, side_px, side_px),
    )


def resnet_stage(depth: int, version: int, side_px: int, batch: int, channels: int) -> Case:
    """Return the case of the second of four equal parts of a ResNet."""

    def build() -> list[nn.Module]:
        data = DataConfig(height_px=side_px, width_px=side_px)
        layers = layers_of(ModelConfig(depth=depth, version=version), data)
        return build_layers(layers, len(layers) // 4, len(layers) // 2, seed=0)

    name = f"ResNet-{depth} v{version}, stage 2 of 4, {side_px} px"
    return name, build, (batch, channels, side_px, side_px)


CASES: tuple[Case, ...] = (
    conv(3, 16, 32, 16, "ResNet"),
    conv(3, 64, 8, 16, "ResNet"),
    conv(1, 64, 32, 8, "ResNet"),
    conv(1, 256, 14, 8, "ResNet"),
    conv(3, 64, 112, 1, "VGG"),
    conv(3, 256, 28, 2, "VGG"),
    ("linear 512 -> 512", lambda: nn.Linear(512, 512), (256, 512)),
    ("linear 4096 -> 1024 (VGG)", lambda: nn.Linear(4096, 1024), (32, 4096)),
    ("batch norm, 64 ch", lambda: nn.BatchNorm2d(64), (8, 64, 32, 32)),
    ("group norm, 64 ch", lambda: nn.GroupNorm(8, 64), (8, 64, 32, 32)),
    ("layer norm, 512", lambda: nn.LayerNorm(512), (8, 128, 512)),
    (EMBEDDING, lambda: nn.Embedding(1000, 256), (8, 256)),
    ("attention, 256 wide, 128 long", lambda: SelfAttention(256, 8), (4, 128, 256)),
    resnet_stage(20, 1, 32, 32, 16),
    resnet_stage(56, 1, 32, 8, 16),
    resnet_stage(110, 2, 32, 4, 64),
    resnet_stage(56, 1, 128, 1, 16),
)


class Bench:
    """Runs the backward of one case in three ways, on copies of the same layers.

    A way returns the seconds of its whole backward, and of its first part.
    """

    def __init__(self, case: Case, device: torch.device) -> None:
        torch.manual_seed(0)
        name, self._make, (batch, *rest) = case
        self._device = device
        self._is_indices = name == EMBEDDING
        # on one thread of a processor the process's own time is that of the work
        has_own_clock = device.type == "cpu" and torch.get_num_threads() == 1
        self._clock = time.process_time if has_own_clock else time.perf_counter
        shape = (batch * (16 if device.type == "cuda" else 1), *rest)
        draw = torch.randint(0, 1000, shape) if self._is_indices else torch.randn(shape)
        self._input = draw.to(device)
        self._layers = {way: self._build() for way in ("full", "ours", "torch")}
        self._full, self.stage = (
            WholeStage(self._layers[way], self._is_indices, lambda: None)
            for way in ("full", "ours")
        )
        (output,) = as_tuple(self._full.infer((self._input,)))
        self._gradient = torch.randn_like(output)

    def _build(self) -> nn.ModuleList:
        torch.manual_seed(0)
        module = self._make()
        layers = nn.ModuleList(module if isinstance(module, list) else [module]).to(self._device)
        for parameter in layers.parameters():
            parameter.grad = torch.zeros_like(parameter)
        return layers

    def _timed(self, *parts: Callable[[], object]) -> tuple[float, float]:
        times = [self._now()]
        for part in parts:
            part()
            times.append(self._now())
        return times[-1] - times[0], times[1] - times[0]

    def full(self) -> tuple[float, float]:
        """Time a full backward."""
        self._full.forward(0, (self._input,))
        return self._timed(lambda: self._full.backward(0, (self._gradient,)))

    def ours(self) -> tuple[float, float]:
        """Time our two parts, one after the other."""
        self.stage.forward(0, (self._input,), None, True)
        return self._timed(
            lambda: self.stage.backward_input(0, (self._gradient,)),
            lambda: self.stage.backward_weight(0),
        )

    def torch(self) -> tuple[float, float]:
        """Time the two functions of torch.distributed.pipelining, one after the other."""
        from torch.distributed.pipelining._backward import (
            stage_backward_input,
            stage_backward_weight,
        )

        layers = self._layers["torch"]
        groups = []
        leaf = self._input.detach().requires_grad_(not self._is_indices)
        value = leaf
        for layer in layers:
            value = layer(value)
        return self._timed(
            lambda: groups.extend(
                stage_backward_input([value], [self._gradient], [leaf], layers.parameters())[1]
            ),
            lambda: stage_backward_weight(layers.parameters(), groups),
        )

    def error(self, way: str) -> float:
        """Return the largest relative error of a method's gradients to the full backward's."""
        pairs = zip(self._layers["full"].parameters(), self._layers[way].parameters(), strict=True)
        pairs_of_grads = [
            (a.grad, b.grad) for a, b in pairs if a.grad is not None and b.grad is not None
        ]
        return max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs_of_grads)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return self._clock()


def _run_case(case: Case, device: torch.device, rounds: int) -> dict[str, Any]:
    bench = Bench(case, device)
    ways = {"full": bench.full, "ours": bench.ours, "torch": bench.torch}
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
    full = [whole for whole, _ in times.pop("full")]
    row: dict[str, Any] = {"case": case[0], "full_ms": statistics.median(full) * 1e3}
    for way, pairs in times.items():
        for number, name in enumerate(("ratio", "input_share")):
            ratios = [pair[number] / whole for pair, whole in zip(pairs, full, strict=True)]
            row[f"{way}_{name}"] = statistics.median(ratios)
    row |= {
        "bit_equal": bench.error("ours") == 0.0,
        "stash_bytes": bench.stage.stash_bytes,
        "held_for_weights_bytes": bench.stage.held_for_weights_bytes,
    }
    return row | ({"torch_failed": failed} if failed else {})


def main(argv: list[str]) -> int:
    """Print the table, or with --json one object; return 1 if a gradient differs."""
    arguments = options(
        __doc__, argv, json=False, only="", threads=1, device=("cpu", "cuda"), rounds=15
    )
    if (device := opened_device("bench-split", arguments.device, arguments.threads)) is None:
        return 0
    machine()
    table = Table(
        "(I then W) over the full backward=case:<36",
        "full (ms)=full_ms:11.2f",
        "ours=ours_ratio:8.2f",
        "of it I=ours_input_share:9.2f",
        "torch=torch_ratio:8.2f",
        "of it I=torch_input_share:9.2f",
        "held MB=held_for_weights_bytes:9.1f",
        "stash MB=stash_bytes:10.1f",
    )
    rows = table.rows(
        (_run_case(case, device, arguments.rounds) for case in CASES if arguments.only in case[0]),
        lambda row: row.get("torch_failed", "")[:60] if row["bit_equal"] else "GRADIENTS DIFFER",
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    answer = {"device": name, "torch": torch.__version__, "rounds": arguments.rounds, "cases": rows}
    return answered(answer, not all(row["bit_equal"] for row in rows), arguments.json)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Simulated step of a pipeline of GPUs by transport; derived, not measured.

Transports: `free`, links that take no time; `device`, from GPU to GPU (NCCL, or MPI that takes device
memory); `staged`, through pinned host memory by copies on streams of their own, as the engine does;
`staged, blocking`, the same copies on the compute stream, for which the host waits, as it did until
2026-11. Takes Hydra overrides. Prints a table on stderr and JSON on stdout.
"""

from __future__ import annotations

import sys
from dataclasses import replace

from gems.config.schema import MachineConfig, RunSpec
from gems.plan.evaluate import Plan, evaluate
from gems.schedule.costs import FREE, Network, StageCosts
from gems.schedule.simulate import simulate
from scripts.bench.rig import Table, answered, composed, square

DEFAULTS = (
    "machine=h200 machine.link_bytes_per_s=45e9 data=synthetic cost=profile profile=fake"
    " schedule=1f1b parallel.partitions=4 parallel.micro_batches=8 parallel.micro_batch_size=1"
)
MODELS = (
    ("ResNet-110-v2", "model=resnet110_v2"),
    ("ResNet-50", "model=resnet50"),
    ("VGG-16", "model=vgg16"),
    ("U-Net", "model=unet data.task=segmentation data.num_classes=2"),
)
SIDES_PX = (1024, 2048)


def main(overrides: list[str]) -> int:
    """Simulate each model and resolution by each way."""
    table = Table("model:<14", "px:<6", "way:<18", "step ms=step_s:>9.1f", "over free=ratio:>10.2f")
    rows = []
    for name, model in MODELS:
        for side_px in SIDES_PX:
            steps = _steps(composed(DEFAULTS, model, square(side_px), overrides))
            for way, step_s in steps.items():
                row = {
                    "model": name,
                    "px": side_px,
                    "way": way,
                    "step_s": step_s,
                    "ratio": step_s / steps["free"],
                }
                rows.append(table.row(row))
    return answered(rows, False)


def _steps(spec: RunSpec) -> dict[str, float]:
    """Return the seconds of a step by way."""
    direct, staged = (
        evaluate(replace(spec, machine=replace(spec.machine, transport=transport)), runs=False)
        for transport in ("nccl", "host")
    )
    costs = direct.memory.costs

    def step_s(plan: Plan, costs: StageCosts, network: Network) -> float:
        return simulate(plan.schedule, costs, network).span

    return {
        "free": step_s(direct, costs, FREE),
        "device": step_s(direct, costs, direct.memory.links),
        "staged": step_s(staged, costs, staged.memory.links),
        "staged, blocking": step_s(direct, _with_copies(costs, spec.machine), direct.memory.links),
    }


def _with_copies(costs: StageCosts, machine: MachineConfig) -> StageCosts:
    """Return costs whose compute includes the copies of incoming and outgoing messages."""
    out_s = 1.0 / machine.d2h_bytes_per_s
    in_s = 1.0 / machine.h2d_bytes_per_s
    boundary_bytes = (*costs.boundary_bytes[: costs.num_stages - 1], 0.0)
    read = (0.0, *boundary_bytes[:-1])
    forward = (
        f + b * out_s + a * in_s
        for f, a, b in zip(costs.forward, read, boundary_bytes, strict=True)
    )
    backward = (
        i + a * out_s + b * in_s
        for i, a, b in zip(costs.input_grad, read, boundary_bytes, strict=True)
    )
    return replace(costs, forward=tuple(forward), input_grad=tuple(backward))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

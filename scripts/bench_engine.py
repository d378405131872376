"""Engine speed: images/s of our 1f1b beside torch.distributed.pipelining's Schedule1F1B, A B A B in one run.

Both run in the same two processes on the same ResNet, cut, micro-batches and images, with one thread each and SGD with
momentum; ours moves data by MPI, theirs by gloo. A case with little compute shows the engines, one with more shows what
is left of that. Takes Hydra overrides, for every case; prints both medians and their ratio, as JSON on stdout.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

CASES = {
    "32 px": ["data.height_px=32", "data.width_px=32"],
    "64 px": ["data.height_px=64", "data.width_px=64"],
}
DEFAULTS = [
    "schedule=1f1b",
    "data=synthetic",
    "parallel.partitions=2",
    "parallel.boundaries=[0,4,11]",  # nearer to equal work than the even cut
    "parallel.micro_batches=8",
    "parallel.micro_batch_size=4",
    "machine=cpu",
]
ROUNDS = 15
STEPS = 4


def start(overrides: list[str]) -> int:
    """Runs all cases and prints their results."""
    results = {}
    for name, case in CASES.items():
        results[name] = found = _run_case([*DEFAULTS, *case, *overrides])
        print(
            f"{name}: ours {found['ours_images_per_s']:.1f} images/s, torch.distributed.pipelining "
            f"{found['torch_images_per_s']:.1f} images/s, ratio {found['ratio']:.3f} (medians of {ROUNDS} rounds of "
            f"{STEPS} steps, A B A B; middle half of the rounds' ratios {found['ratio_p25']:.3f} to {found['ratio_p75']:.3f})",
            file=sys.stderr,
        )
    print(json.dumps(results))
    return 0


def _run_case(overrides: list[str]) -> dict[str, Any]:
    """Starts the ranks of one case and gives what rank 0 found."""
    from gems.compose import compose
    from gems.ranks import mpiexec_argv, rank_environment, run_ranks
    from gems.runfolder import prepare, read_json

    spec = compose(overrides)
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        folder = prepare(replace(spec, runs_dir=scratch))
        free.close()
        environment = rank_environment(1) | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        program = [sys.executable, "-m", "scripts.bench_engine", "--rank", str(folder.path)]
        ended = run_ranks(mpiexec_argv(spec.world_size, program), environment, log=None, timeout_s=550.0)
        found = read_json(folder.result_json)
    if ended.returncode or not found:
        raise SystemExit(ended.returncode or 1)
    return found


def run_rank(path: Path) -> None:
    """Runs both engines in turn on one rank; rank 0 writes the figures."""
    import torch
    import torch.distributed as dist

    from gems.engine.device import open_device
    from gems.engine.executor import Batch
    from gems.engine.pipeline import build_pipeline
    from gems.engine.transport import world
    from gems.resolve import global_batch
    from gems.runfolder import RunFolder, write_json

    comm = world()
    folder = RunFolder(path)
    spec = folder.read_spec()
    device = open_device(spec.machine)
    torch.manual_seed(0)
    num, size = spec.parallel.micro_batches or 1, spec.parallel.micro_batch_size
    images = torch.randn(num * size, spec.data.channels, spec.data.height_px, spec.data.width_px)
    labels = torch.randint(spec.data.num_classes, (num * size,))
    pipeline = build_pipeline(spec, comm, device)
    pipeline.set_training(True)
    batch = Batch(
        dict(enumerate(images.split(size))) if comm.rank == 0 else {},
        dict(enumerate(labels.split(size))) if comm.rank == comm.size - 1 else {},
    )

    def ours() -> None:
        pipeline.train.run(0, batch)

    os.environ |= {"RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}
    dist.init_process_group("gloo")
    theirs = _torch_step(spec, comm.rank, comm.size, images, labels)
    for step in (ours, theirs, ours, theirs):
        step()
    seconds: dict[Callable[[], None], list[float]] = {ours: [], theirs: []}
    for _ in range(ROUNDS):
        for step, times in seconds.items():
            comm.Barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            comm.Barrier()
            times.append((time.perf_counter() - begin) / STEPS)
    ratios = [b / a for a, b in zip(seconds[ours], seconds[theirs], strict=True)]
    quartiles = statistics.quantiles(ratios, n=4)
    if comm.rank == 0:
        count = global_batch(spec)
        write_json(folder.result_json, {
            "ours_images_per_s": count / statistics.median(seconds[ours]),
            "torch_images_per_s": count / statistics.median(seconds[theirs]),
            "ratio": statistics.median(seconds[theirs]) / statistics.median(seconds[ours]),
            "ratio_p25": quartiles[0], "ratio_p75": quartiles[2],
            "model": f"{spec.model.name}{spec.model.depth}-v{spec.model.version}", "height_px": spec.data.height_px,
            "micro_batches": num, "micro_batch_size": size, "torch": torch.__version__,
        })  # fmt: skip
    dist.destroy_process_group()


def _torch_step(spec, rank, size, images, labels):  # type: ignore[no-untyped-def]
    """Builds one optimizer step of torch.distributed.pipelining's 1F1B for this rank's part of the same model."""
    import torch
    import torch.nn.functional as functional
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    from gems.engine.optimizer import build_optimizer
    from gems.models import layers_of
    from gems.models.build import build_layers

    cuts = spec.parallel.boundaries
    modules = build_layers(layers_of(spec.model, spec.data), cuts[rank], cuts[rank + 1], spec.seed)
    module = nn.Sequential(*modules).train()
    optimizer = build_optimizer(spec.train, module.parameters())
    stage = PipelineStage(module, rank, size, torch.device("cpu"))
    schedule = Schedule1F1B(stage, spec.parallel.micro_batches, loss_fn=functional.cross_entropy)

    def step() -> None:
        optimizer.zero_grad()
        if rank == 0:
            schedule.step(images)
        else:
            schedule.step(target=labels, losses=[])
        optimizer.step()

    return step


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(Path(sys.argv[2]))
    else:
        sys.exit(start(sys.argv[1:]))

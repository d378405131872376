"""Engine speed: images/s of our 1f1b beside torch.distributed.pipelining's Schedule1F1B, A B A B in one run.

Both run on the same ResNet, cut, micro-batches and images, with one thread each and SGD with momentum; ours moves data by
MPI, theirs by gloo. First in the same two processes, so that the memory settings that our engine makes serve both and the
engines alone are compared; then each in processes of its own, started in turn, as a user of either has it. A case with
little compute shows the engines, one with more shows what is left of that; then our best schedule stands beside theirs
(`bench_best`). Takes Hydra overrides, for every case; prints both medians and their ratio, as JSON on stdout.
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

CASES = {"32 px": ["data.height_px=32", "data.width_px=32"], "64 px": ["data.height_px=64", "data.width_px=64"]}
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
STARTS = 5
ROUNDS_A_START = 5
OURS, THEIRS = "ours", "torch"


def start(overrides: list[str]) -> int:
    """Run all cases and prints their results."""
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        words = [*DEFAULTS, *case, *overrides]
        results[name] = found = _together(words)
        print(
            f"{name}: ours {found['ours_images_per_s']:.1f} images/s, torch.distributed.pipelining "
            f"{found['torch_images_per_s']:.1f} images/s, ratio {found['ratio']:.3f} (medians of {ROUNDS} rounds of "
            f"{STEPS} steps, A B A B; middle half of the rounds' ratios {found['ratio_p25']:.3f} to {found['ratio_p75']:.3f})",
            file=sys.stderr,
        )
        found["apart"] = apart = _apart(words)
        print(
            f"{name}, each in its own processes: ratio {apart['ratio']:.3f} (medians of {STARTS} starts of each, in turn; "
            f"ours {apart['ours_images_per_s']:.1f}, torch {apart['torch_images_per_s']:.1f} images/s)",
            file=sys.stderr,
        )
    from scripts.bench.best import compete

    results["best"] = compete(overrides)
    print(json.dumps(results))
    return 0


def _together(overrides: list[str]) -> dict[str, Any]:
    """Compare both engines in the same processes."""
    found = _run_case(overrides, (OURS, THEIRS), ROUNDS)
    ours, theirs = found["seconds"][OURS], found["seconds"][THEIRS]
    quartiles = statistics.quantiles((b / a for a, b in zip(ours, theirs, strict=True)), n=4)
    return _rates(found, ours, theirs) | {"ratio_p25": quartiles[0], "ratio_p75": quartiles[2]}


def _apart(overrides: list[str]) -> dict[str, Any]:
    """Compare the engines in processes of their own, started in turn."""
    seconds: dict[str, list[float]] = {OURS: [], THEIRS: []}
    for _ in range(STARTS):
        for engine, times in seconds.items():
            found = _run_case(overrides, (engine,), ROUNDS_A_START)
            times.append(statistics.median(found["seconds"][engine]))
    return _rates(found, seconds[OURS], seconds[THEIRS])


def _rates(found: dict[str, Any], ours: list[float], theirs: list[float]) -> dict[str, Any]:
    facts = {name: value for name, value in found.items() if name != "seconds"}
    return facts | {
        "ours_images_per_s": found["images"] / statistics.median(ours),
        "torch_images_per_s": found["images"] / statistics.median(theirs),
        "ratio": statistics.median(theirs) / statistics.median(ours),
    }


def _run_case(overrides: list[str], engines: tuple[str, ...], num_rounds: int) -> dict[str, Any]:
    """Start the ranks of one case and gives what rank 0 found: seconds of a step by engine and round."""
    from gems.config.compose import compose
    from gems.launch.local_launcher import mpiexec_argv, rank_environment, run_ranks
    from gems.runs.prepare import prepare
    from gems.utils.atomic_io import read_json

    spec = compose(overrides)
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        folder = prepare(replace(spec, runs_dir=scratch))
        free.close()
        environment = rank_environment(1) | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        program = [sys.executable, "-m", "scripts.bench.engine", "--rank", str(folder.path), str(num_rounds), *engines]
        ended = run_ranks(mpiexec_argv(spec.world_size, program), environment, log=None, timeout_s=550.0)
        found = read_json(folder.result_json)
    if ended.returncode or not found:
        raise SystemExit(ended.returncode or 1)
    return found


def run_rank(path: Path, num_rounds: int, engines: list[str]) -> None:
    """Run the engines in turn on one rank; rank 0 writes the figures."""
    import torch
    import torch.distributed as dist

    from gems.config.resolve import global_batch
    from gems.engine.transport.mpi import world
    from gems.runs.folder import RunFolder
    from gems.utils.atomic_io import write_json

    comm = world()
    folder = RunFolder(path)
    spec = folder.read_spec()
    torch.manual_seed(0)
    num, size = spec.parallel.micro_batches or 1, spec.parallel.micro_batch_size
    images = torch.randn(num * size, spec.data.channels, spec.data.height_px, spec.data.width_px)
    labels = torch.randint(spec.data.num_classes, (num * size,))
    steps: dict[str, Callable[[], None]] = {}
    if OURS in engines:
        steps[OURS] = _our_step(spec, comm, images, labels)
    if THEIRS in engines:
        os.environ |= {"RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}
        dist.init_process_group("gloo")
        steps[THEIRS] = _torch_step(spec, comm.rank, comm.size, images, labels)
    for step in (*steps.values(), *steps.values()):
        step()
    seconds: dict[str, list[float]] = {engine: [] for engine in steps}
    for _ in range(num_rounds):
        for engine, step in steps.items():
            comm.Barrier()
            begin = time.perf_counter()
            for _ in range(STEPS):
                step()
            comm.Barrier()
            seconds[engine].append((time.perf_counter() - begin) / STEPS)
    if comm.rank == 0:
        write_json(folder.result_json, {
            "seconds": seconds, "images": global_batch(spec),
            "model": f"{spec.model.name}{spec.model.depth}-v{spec.model.version}", "height_px": spec.data.height_px,
            "micro_batches": num, "micro_batch_size": size, "torch": torch.__version__,
        })  # fmt: skip
    if THEIRS in engines:
        dist.destroy_process_group()


def _our_step(spec, comm, images, labels):  # type: ignore[no-untyped-def]
    """Build one optimizer step of our engine for this rank's part of the model."""
    from gems.engine.device import open_device
    from gems.engine.executor import Batch
    from gems.engine.pipeline import build_pipeline

    pipeline = build_pipeline(spec, comm, open_device(spec.machine))
    pipeline.set_training(True)
    size = spec.parallel.micro_batch_size
    batch = Batch(
        dict(enumerate(images.split(size))) if comm.rank == 0 else {},
        dict(enumerate(labels.split(size))) if comm.rank == comm.size - 1 else {},
    )

    def step() -> None:
        pipeline.train.run(0, batch)

    return step


def _torch_step(spec, rank, size, images, labels):  # type: ignore[no-untyped-def]
    """Build one optimizer step of torch.distributed.pipelining's 1F1B for this rank's part of the same model."""
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
        run_rank(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    else:
        sys.exit(start(sys.argv[1:]))

"""Our best schedule beside the best of torch.distributed.pipelining, at equal or lower measured peak, in one run.

Every contender trains the same ResNet on the same two ranks, images and micro-batches; stages are cut alike where there
are as many. Times are medians over rounds in which all take turns. A peak is the most bytes of all tensors at once,
weights and optimizer with them, of the first step of each, seen by the same count of torch's storages. The schedules
of both that cannot run are named with the reason. Takes Hydra overrides; prints a table on stderr and JSON on stdout.
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
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

DEFAULTS = [
    "data=synthetic", "data.height_px=32", "data.width_px=32", "parallel.partitions=2", "parallel.micro_batches=8",
    "parallel.micro_batch_size=4", "machine=cpu",
]  # fmt: skip
CUTS = {2: "[0,5,11]", 4: "[0,2,4,7,11]"}  # nearest to equal work for this network
OURS = {
    "gpipe": 2, "1f1b": 2, "zb_h1": 2, "zb_h2": 2, "chimera": 2, "gems_master": 2, "gems_zb": 2,
    "interleaved_1f1b": 4, "looped_bfs": 4, "zb_v": 4, "v_half": 4, "v_min": 4, "dualpipe_v": 4,
}  # fmt: skip
THEIRS = {
    "ScheduleGPipe": "linear", "Schedule1F1B": "linear", "ScheduleInterleaved1F1B": "looped",
    "ScheduleLoopedBFS": "looped", "ScheduleInterleavedZeroBubble": "looped", "ScheduleZBVZeroBubble": "v",
}  # fmt: skip
ROUNDS = 11
MIB = 1 << 20


@dataclass(slots=True)
class Contender:
    """One schedule of one engine on this rank."""

    engine: str
    schedule: str
    step: Callable[[], object]
    peak_bytes: int


def compete(overrides: list[str]) -> dict[str, Any]:
    """Start the ranks, prints the table on stderr and gives what they found."""
    from gems.config.compose import compose
    from gems.errors import GemsError
    from gems.launch.local_launcher import mpiexec_argv, rank_environment, run_ranks
    from gems.runs.prepare import prepare
    from gems.schedule import FAMILIES
    from gems.utils.atomic_io import read_json, write_json

    folders: dict[str, str] = {}
    failed: dict[str, str] = {name: "is not among the families" for name in OURS if name not in FAMILIES}
    with tempfile.TemporaryDirectory() as scratch, socket.socket() as free:
        for name, num_stages in OURS.items():
            if name in failed:
                continue
            words = [*DEFAULTS, f"schedule={name}", f"parallel.boundaries={CUTS[num_stages]}", *overrides]
            try:
                spec = compose(words)
                folders[name] = str(prepare(replace(spec, runs_dir=scratch, name=name)).path)
            except GemsError as error:
                failed[name] = str(error)
        work = Path(scratch) / "work.json"
        write_json(work, {"folders": folders, "failed": failed})
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        environment = rank_environment(1) | {
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        program = [sys.executable, "-m", "scripts.bench.best", "--rank", str(work)]
        ended = run_ranks(mpiexec_argv(2, program), environment, timeout_s=580.0)
        found = read_json(work.with_name("found.json"))
    if ended.returncode or not found:
        raise SystemExit(ended.returncode or 1)
    show(found)
    return found


def show(found: dict[str, Any]) -> None:
    """Print the table and the answer."""
    lines = [f"{'engine':<7}{'schedule':<32}{'ms a step':>10}{'peak MiB':>10}"]
    for one in sorted(found["contenders"], key=lambda one: one["step_s"]):
        lines.append(
            f"{one['engine']:<7}{one['schedule']:<32}{one['step_s'] * 1e3:>10.1f}{one['peak_bytes'] / MIB:>10.2f}"
        )
    lines += [f"{name} does not run: {why}" for name, why in found["failed"].items()]
    for one in found["answers"]:
        lines.append(
            f"at most the peak of torch's {one['theirs']}: ours {one['ours']}, {one['ratio']:.3f} times as fast "
            f"(middle half of {ROUNDS} rounds {one['ratio_p25']:.3f} to {one['ratio_p75']:.3f})"
            if one["ours"]
            else f"at most the peak of torch's {one['theirs']}: none of ours"
        )
    print("\n".join(lines), file=sys.stderr)


def run_rank(work: Path) -> None:
    """Build all contenders on one rank, times them in turn, and lets rank 0 write what was found."""
    import torch
    import torch.distributed as dist

    from gems.engine.device import open_device
    from gems.engine.transport.mpi import world
    from gems.runs.folder import RunFolder
    from gems.utils.atomic_io import read_json, write_json

    comm = world()
    given = read_json(work)
    folders = {name: RunFolder(Path(path)) for name, path in given["folders"].items()}
    specs = {name: folder.read_spec() for name, folder in folders.items()}
    spec = next(iter(specs.values()))
    device = open_device(spec.machine)
    os.environ |= {"RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    num = (spec.parallel.micro_batches or 1) * spec.parallel.micro_batch_size
    images = torch.randn(num, spec.data.channels, spec.data.height_px, spec.data.width_px)
    labels = torch.randint(spec.data.num_classes, (num,))
    failed, contenders = dict(given["failed"]), []
    made: list[tuple[str, str, Callable[[], Callable[[], object]]]] = [
        ("ours", name, lambda f=folder: _ours(f, comm, device, images, labels)) for name, folder in folders.items()
    ]  # fmt: skip
    made += [("torch", name, lambda n=name: _theirs(n, spec, comm, images, labels)) for name in THEIRS]
    for engine, name, build in made:
        try:
            with LiveBytes() as live:
                step = build()
                step()
            contenders.append(Contender(engine, name, step, live.peak_bytes))
            why = ""
        except Exception as error:  # whatever their schedules raise on this model
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        if any(whys := comm.allgather(why)):
            failed[name] = next(filter(None, whys))
            contenders = [one for one in contenders if (one.engine, one.schedule) != (engine, name)]
    times = _times(comm, contenders)
    peaks = comm.allgather([one.peak_bytes for one in contenders])
    if comm.rank == 0:
        most = [max(rank[i] for rank in peaks) for i in range(len(contenders))]
        write_json(work.with_name("found.json"), _judge(contenders, times, most, failed))
    dist.destroy_process_group()


def _times(comm: Any, contenders: list[Contender]) -> list[list[float]]:
    """Return the seconds of a step of each contender, in rounds in which all take turns."""
    times: list[list[float]] = [[] for _ in contenders]
    for round_ in range(ROUNDS + 1):
        for contender, mine in zip(contenders, times, strict=True):
            comm.Barrier()
            begin = time.perf_counter()
            contender.step()
            comm.Barrier()
            if round_:  # the first one warms up
                mine.append(time.perf_counter() - begin)
    return times


def _judge(
    contenders: list[Contender], times: list[list[float]], peaks: list[int], failed: dict[str, str]
) -> dict[str, Any]:
    """Find for each of theirs the fastest of ours at equal or lower peak; their fastest comes first."""
    median = [statistics.median(mine) for mine in times]
    order = sorted(range(len(contenders)), key=lambda i: median[i])
    answers = []
    for theirs in (i for i in order if contenders[i].engine == "torch"):
        ours = next((i for i in order if contenders[i].engine == "ours" and peaks[i] <= peaks[theirs]), None)
        answer: dict[str, Any] = {
            "theirs": contenders[theirs].schedule,
            "ours": None if ours is None else contenders[ours].schedule,
        }
        if ours is not None:
            ratios = [a / b for a, b in zip(times[theirs], times[ours], strict=True)]
            low, _, high = statistics.quantiles(ratios, n=4)
            answer |= {"ratio": statistics.median(ratios), "ratio_p25": low, "ratio_p75": high}
        answers.append(answer)
    return {
        "contenders": [
            {"engine": one.engine, "schedule": one.schedule, "step_s": median[i], "peak_bytes": peaks[i]}
            for i, one in enumerate(contenders)
        ],
        "answers": answers, "failed": failed,
    }  # fmt: skip


def _ours(folder: Any, comm: Any, device: Any, images: Any, labels: Any) -> Callable[[], object]:
    from gems.engine.executor import Batch
    from gems.engine.pipeline import build_pipeline

    spec = folder.read_spec()
    pipeline = build_pipeline(spec, comm, device, schedule=folder.read_schedule())
    pipeline.set_training(True)
    size = spec.parallel.micro_batch_size
    batch = Batch(
        {m: part for m, part in enumerate(images.split(size)) if m in pipeline.image_micro_batches},
        {m: part for m, part in enumerate(labels.split(size)) if m in pipeline.label_micro_batches},
    )
    return lambda: pipeline.train.run(0, batch)


def _theirs(name: str, spec: Any, comm: Any, images: Any, labels: Any) -> Callable[[], object]:
    """Build one optimizer step of a schedule of torch.distributed.pipelining for this rank's part of the model."""
    import torch
    import torch.distributed.pipelining as pipelining
    import torch.nn.functional as functional
    from torch import nn

    from gems.engine.optimizer import build_optimizer
    from gems.models import layers_of
    from gems.models.build import build_layers

    placement, rank, size = THEIRS[name], comm.rank, comm.size
    held = {"linear": [rank], "looped": [rank, rank + size], "v": [rank, 2 * size - 1 - rank]}[placement]
    num_stages = size * len(held)
    cuts = json.loads(CUTS[num_stages])
    layers = layers_of(spec.model, spec.data)
    modules = [nn.Sequential(*build_layers(layers, cuts[s], cuts[s + 1], spec.seed)).train() for s in held]
    optimizer = build_optimizer(spec.train, (p for module in modules for p in module.parameters()))
    stages = [
        pipelining.PipelineStage(module, stage, num_stages, torch.device("cpu"))
        for module, stage in zip(modules, held, strict=True)
    ]
    make: Any = getattr(pipelining, name)
    schedule = make(
        stages if len(stages) > 1 else stages[0], spec.parallel.micro_batches, loss_fn=functional.cross_entropy
    )
    has_last = num_stages - 1 in held

    def step() -> None:
        optimizer.zero_grad()
        words = {"target": labels, "losses": []} if has_last else {}
        schedule.step(*([images] if 0 in held else []), **words)
        optimizer.step()

    return step


class LiveBytes:
    """Counts the bytes of storages that come into being inside a `with` block and still live, and their peak."""

    def __init__(self) -> None:
        import weakref

        from torch.utils._python_dispatch import TorchDispatchMode
        from torch.utils._pytree import tree_leaves

        self.live_bytes = self.peak_bytes = 0
        known: weakref.WeakSet[Any] = weakref.WeakSet()
        counter = self

        def see(value: object, is_new: bool) -> None:
            storage = getattr(value, "untyped_storage", lambda: None)()
            if storage is None or storage in known:
                return
            known.add(storage)
            if is_new:
                counter._came(storage.nbytes())
                weakref.finalize(storage, counter._came, -storage.nbytes())

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                for value in tree_leaves((args, kwargs)):  # what is given was there before
                    see(value, False)
                made = func(*args, **(kwargs or {}))
                for value in tree_leaves(made):
                    see(value, True)
                return made

        self._mode = Mode()

    def _came(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def __enter__(self) -> LiveBytes:
        self._mode.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._mode.__exit__(*details)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(Path(sys.argv[2]))
    else:
        print(json.dumps(compete(sys.argv[1:])))

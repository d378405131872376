"""Engine speed beside torch.distributed.pipelining.

The engines alone, and the best schedules of both at equal peak.
Engines: images/s of our 1f1b beside Schedule1F1B, in turn. Both run the same ResNet, partition,
micro-batches and images, with one thread each and SGD with momentum; ours moves data by MPI, and by
gloo as theirs. First in the same two processes, so that the memory settings of our engine serve
all; then each in processes of its own, started in turn, as a user of either has it.

Best: our best schedule beside theirs at equal or lower measured peak. Every contender trains the
same ResNet on the same two ranks, images and micro-batches; stages are equal if there are as many.
Times are medians over rounds in which all take turns. A peak is the most bytes of all tensors at
once, weights and optimizer included, in the first step of each, counted from torch's storages alike
for both. Schedules that cannot run are named with the reason.

Takes Hydra overrides, for every case; prints medians and ratios on stderr and JSON on stdout.
"""

from __future__ import annotations

import os
import statistics
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed import pipelining
from torch.nn import functional

from gems.autograd.torch_internals import TorchDispatchMode, tree_leaves
from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.engine.optimization.optimizer import build_optimizer
from gems.engine.optimization.parameter_groups import NumberedLayer
from gems.errors import GemsError
from gems.models import layers_of
from gems.models.build import build_layers
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.atomic_io import read_json, write_json
from scripts.bench import rig

DEFAULTS = (
    "data=synthetic parallel.partitions=2 parallel.micro_batches=8 parallel.micro_batch_size=4"
    " machine=cpu"
)
SIDES_PX = (32, 64)
CUTS = (0, 4, 11)  # nearer to equal work than the even partition
ROUNDS = 15
STEPS = 4
STARTS = 5
ROUNDS_A_START = 5
OURS = "ours"
OVER_GLOO = "ours over gloo"
THEIRS = "torch"

BEST_CUTS = {2: (0, 5, 11), 4: (0, 2, 4, 7, 11)}  # nearest to equal work for this network
OUR_SCHEDULES = {
    "gpipe": 2,
    "1f1b": 2,
    "zb_h1": 2,
    "zb_h2": 2,
    "chimera": 2,
    "gems_master": 2,
    "gems_zb": 2,
    "interleaved_1f1b": 4,
    "looped_bfs": 4,
    "zb_v": 4,
    "v_half": 4,
    "v_min": 4,
    "dualpipe_v": 4,
}
THEIR_SCHEDULES = {
    "ScheduleGPipe": "linear",
    "Schedule1F1B": "linear",
    "ScheduleInterleaved1F1B": "looped",
    "ScheduleLoopedBFS": "looped",
    "ScheduleInterleavedZeroBubble": "looped",
    "ScheduleZBVZeroBubble": "v",
}
BEST_ROUNDS = 11
Contender = tuple[str, str]  # the engine, and its schedule
Step = Callable[[], object]
Layers = Mapping[int, nn.Module]  # those of a rank, by their number in the network


def main(overrides: list[str]) -> int:
    """Run all cases and print their results."""
    rig.machine()
    results: dict[str, Any] = {}
    for side_px in SIDES_PX:
        name = f"{side_px} px"
        words = (DEFAULTS, "schedule=1f1b", _boundaries(CUTS), rig.square(side_px), overrides)
        results[name] = found = _compared(words, ROUNDS, 1, is_apart=False)
        rig.log(
            f"{name}: ours {found['ours_images_per_s']:.1f} images/s, over gloo"
            f" {found['gloo_images_per_s']:.1f}, torch.distributed.pipelining"
            f" {found['torch_images_per_s']:.1f}; over torch's {found['ratio']:.3f} and"
            f" {found['gloo_ratio']:.3f} (medians of {ROUNDS} rounds of {STEPS} steps, in turn;"
            f" middle half of the rounds' ratios {found['ratio_p25']:.3f} to"
            f" {found['ratio_p75']:.3f}, over gloo {found['gloo_ratio_p25']:.3f} to"
            f" {found['gloo_ratio_p75']:.3f})"
        )
        found["apart"] = apart = _compared(words, ROUNDS_A_START, STARTS, is_apart=True)
        rig.log(
            f"{name}, each in its processes: over torch's {apart['ratio']:.3f}, by gloo"
            f" {apart['gloo_ratio']:.3f} (medians of {STARTS} starts of each, in turn; ours"
            f" {apart['ours_images_per_s']:.1f}, over gloo {apart['gloo_images_per_s']:.1f}, torch"
            f" {apart['torch_images_per_s']:.1f} images/s)"
        )
    results["best"] = compete(overrides)
    return rig.answered(results, False)


def _boundaries(cuts: Sequence[int]) -> str:
    return f"parallel.boundaries=[{','.join(map(str, cuts))}]"


def _compared(
    words: Sequence[str | list[str]], rounds: int, starts: int, is_apart: bool
) -> dict[str, Any]:
    """Compare 1F1B of both engines, in the same processes or each in processes of its own that are started in turn."""
    spec = rig.composed(*words)
    over_gloo = rig.composed(*words, "machine.transport=gloo")
    engines = [OURS, OVER_GLOO, THEIRS]
    groups = [[engine] for engine in engines] if is_apart else [engines]

    def run(engines: list[str]) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as scratch:
            path, gloo_path = (
                str(prepare(replace(each, runs_dir=scratch)).path) for each in (spec, over_gloo)
            )
            contenders = {
                OURS: (OURS, "1f1b", path),
                OVER_GLOO: (OVER_GLOO, "1f1b", gloo_path),
                THEIRS: (THEIRS, "Schedule1F1B", spec.parallel.boundaries),
            }
            found = _raced(spec, path, [contenders[engine] for engine in engines], rounds, STEPS)
        if found["failed"]:
            raise SystemExit(str(found["failed"]))
        return found

    runs = rig.in_turns({"+".join(engines): partial(run, engines) for engines in groups}, starts)
    times: dict[str, list[float]] = {engine: [] for engine in engines}
    for found in (each for all_of_group in runs.values() for each in all_of_group):
        for (engine, _), times_s in zip(found["contenders"], found["seconds"], strict=True):
            times[engine] += [statistics.median(times_s)] if is_apart else times_s
    images = global_batch(spec)
    torch_version = found["torch"]
    ours_s, gloo_s, theirs_s = (statistics.median(times[engine]) for engine in engines)
    answer = {
        "images": images,
        "model": f"{spec.model.name}{spec.model.depth}-v{spec.model.version}",
        "height_px": spec.data.height_px,
        "micro_batches": spec.parallel.micro_batches,
        "micro_batch_size": spec.parallel.micro_batch_size,
        "torch": torch_version,
        "ours_images_per_s": images / ours_s,
        "gloo_images_per_s": images / gloo_s,
        "torch_images_per_s": images / theirs_s,
        "ratio": theirs_s / ours_s,
        "gloo_ratio": theirs_s / gloo_s,
    }
    if is_apart:
        return answer
    for engine, prefix in ((OURS, ""), (OVER_GLOO, "gloo_")):
        ratios = [theirs / ours for ours, theirs in zip(times[engine], times[THEIRS], strict=True)]
        answer |= {prefix + name: value for name, value in rig.quartiles(ratios).items()}
    return answer


def compete(overrides: list[str]) -> dict[str, Any]:
    """Let all schedules take turns on the same ranks, print the table, and return what was found."""
    contenders: list[tuple[str, str, object]] = []
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as scratch:
        for name, num_stages in OUR_SCHEDULES.items():
            try:
                words = f"schedule={name} {_boundaries(BEST_CUTS[num_stages])}"
                spec = rig.composed(DEFAULTS, rig.square(SIDES_PX[0]), words, overrides)
                contenders.append(
                    (OURS, name, str(prepare(replace(spec, runs_dir=scratch, name=name)).path))
                )
            except GemsError as error:
                failed[name] = str(error)
        first = contenders[0][2]
        for name, placement in THEIR_SCHEDULES.items():
            contenders.append((THEIRS, name, BEST_CUTS[2 if placement == "linear" else 4]))
        made = _raced(spec, str(first), contenders, BEST_ROUNDS, 1)
    found = judge(made["contenders"], made["seconds"], made["peaks"], failed | made["failed"])
    table = rig.Table(
        "engine:<7", "schedule:<32", "ms a step=step_ms:>10.1f", "peak MiB=peak_bytes:>10.2f"
    )
    for one in sorted(found["contenders"], key=lambda one: float(one["step_s"])):
        table.row({**one, "step_ms": 1e3 * one["step_s"]})
    for name, why in found["failed"].items():
        rig.log(f"{name} does not run: {why}")
    for one in found["answers"]:
        middle = one["ours"] and (
            f"{one['ours']}, {one['ratio']:.3f} times as fast (middle half of {BEST_ROUNDS} rounds "
            f"{one['ratio_p25']:.3f} to {one['ratio_p75']:.3f})"
        )
        rig.log(
            f"at most the peak of torch's {one['theirs']}: "
            + (f"ours {middle}" if middle else "none of ours")
        )
    return found


def _raced(
    spec: RunSpec, folder: str, contenders: Sequence[object], rounds: int, steps: int
) -> dict[str, Any]:
    """Let contenders take turns on ranks of their own.

    `folder` is a prepared run with their model and data.
    """
    rig.start_ranks(
        spec.world_size, *rig.call_argv(race, folder, contenders, rounds, steps), timeout_s=580.0
    )
    return read_json(RunFolder(Path(folder)).result_json)


def race(path: str, contenders: list[tuple[str, str, Any]], rounds: int, num_steps: int) -> None:
    """Build all contenders on this rank and time their steps in turn; rank 0 writes what was found.

    A contender is its engine, its schedule, and the prepared run of ours or the boundaries of
    torch's. One that raises on a rank is left out, with the reason.
    """
    from gems.engine.transport.mpi import allgather, world

    comm = world()
    folder = RunFolder(Path(path))
    has_gloo = any(engine == THEIRS for engine, *_ in contenders)
    if has_gloo:
        open_gloo(comm, path)
    spec = folder.read_spec()
    images, labels = batch_of(spec)
    running: dict[Contender, Step] = {}
    peaks: list[int] = []
    failed: dict[str, str] = {}
    for engine, name, how in contenders:
        why = ""
        try:
            with LiveBytes() as live:
                if engine != THEIRS:
                    step, _ = of_ours(RunFolder(Path(how)), comm, images, labels)
                else:
                    step, _ = of_torch(name, how, spec, comm, images, labels)
                step()
        except Exception as error:  # whatever their schedules raise on this model
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
        if any(whys := allgather(comm, why)):
            failed[name] = next(filter(None, whys))
            continue
        running[engine, name] = step
        peaks.append(max(allgather(comm, live.peak_bytes)))
    rig.in_turns(running, 1)  # warms up
    times = rig.in_turns(
        {one: partial(timed, comm, step, num_steps) for one, step in running.items()}, rounds
    )
    if comm.rank == 0:
        write_json(
            folder.result_json,
            {
                "contenders": list(running),
                "seconds": list(times.values()),
                "peaks": peaks,
                "failed": failed,
                "torch": torch.__version__,
            },
        )
    if has_gloo:
        distributed.destroy_process_group()


def open_gloo(comm: Any, path: str) -> None:
    """Open torch's process group over gloo, by a file in a run folder."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{path}/gloo", rank=comm.rank, world_size=comm.size
    )


def batch_of(spec: RunSpec) -> tuple[Tensor, Tensor]:
    """Return the images and labels of a step, the same on each rank."""
    torch.manual_seed(0)
    images = torch.randn(
        global_batch(spec), spec.data.channels, spec.data.height_px, spec.data.width_px
    )
    return images, torch.randint(spec.data.num_classes, (len(images),))


def timed(comm: Any, step: Step, count: int) -> float:
    """Return the mean seconds of `count` steps, which all ranks begin and end together."""
    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    comm.Barrier()
    return (time.perf_counter() - begin) / count


def judge(
    contenders: Sequence[Sequence[str]],
    times: list[list[float]],
    peaks: list[int],
    failed: Mapping[str, str],
) -> dict[str, Any]:
    """Find for each of theirs the fastest of ours at equal or lower peak.

    Their fastest comes first.
    A contender is an engine and its schedule.
    """
    median = [statistics.median(mine) for mine in times]
    order = sorted(range(len(contenders)), key=lambda i: median[i])
    answers = []
    for theirs in (i for i in order if contenders[i][0] == THEIRS):
        ours = next(
            (i for i in order if contenders[i][0] == OURS and peaks[i] <= peaks[theirs]), None
        )
        answer: dict[str, Any] = {
            "theirs": contenders[theirs][1],
            "ours": None if ours is None else contenders[ours][1],
        }
        if ours is not None:
            ratios = [a / b for a, b in zip(times[theirs], times[ours], strict=True)]
            answer |= {"ratio": statistics.median(ratios), **rig.quartiles(ratios)}
        answers.append(answer)
    shown = [
        {"engine": engine, "schedule": schedule, "step_s": median[i], "peak_bytes": peaks[i]}
        for i, (engine, schedule) in enumerate(contenders)
    ]
    return {"contenders": shown, "answers": answers, "failed": failed}


def of_ours(folder: RunFolder, comm: Any, images: Tensor, labels: Tensor) -> tuple[Step, Layers]:
    """Return the step of a prepared run of ours, and the layers of this rank."""
    from gems.engine.device import open_device
    from gems.engine.executor import Batch
    from gems.engine.pipeline import build_pipeline

    spec = folder.read_spec()
    pipeline = build_pipeline(
        spec, comm, open_device(spec.machine), schedule=folder.read_schedule()
    )
    pipeline.set_training(True)
    size = spec.parallel.micro_batch_size
    batch = Batch(
        {m: part for m, part in enumerate(images.split(size)) if m in pipeline.image_micro_batches},
        {m: part for m, part in enumerate(labels.split(size)) if m in pipeline.label_micro_batches},
    )
    layers = {layer.place: layer.module for layer in pipeline.layers}
    return lambda: pipeline.train.run(0, batch), layers


def of_torch(
    name: str, cuts: Sequence[int], spec: RunSpec, comm: Any, images: Tensor, labels: Tensor
) -> tuple[Step, Layers]:
    """Return the step of a schedule of torch's, and the layers of this rank."""
    rank = comm.rank
    size = comm.size
    num_stages = len(cuts) - 1
    held = {"linear": [rank], "looped": [rank, rank + size], "v": [rank, 2 * size - 1 - rank]}[
        THEIR_SCHEDULES[name]
    ]
    layers = layers_of(spec.model, spec.data)
    modules = [
        nn.Sequential(*build_layers(layers, cuts[s], cuts[s + 1], spec.seed)).train() for s in held
    ]
    optimizer = optimizer_of(spec, modules)
    stages = [
        pipelining.PipelineStage(module, stage, num_stages, torch.device("cpu"))
        for module, stage in zip(modules, held, strict=True)
    ]
    make: Any = getattr(pipelining, name)
    schedule = make(
        stages if len(stages) > 1 else stages[0],
        spec.parallel.micro_batches,
        loss_fn=functional.cross_entropy,
    )
    inputs = [images] if 0 in held else []
    has_last = num_stages - 1 in held

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*inputs, **({"target": labels, "losses": []} if has_last else {}))
        optimizer.step()

    return step, {
        cuts[s] + i: layer
        for s, module in zip(held, modules, strict=True)
        for i, layer in enumerate(module)
    }


def optimizer_of(spec: RunSpec, modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """Return the optimizer of a run for some modules."""
    layers = [NumberedLayer(i, str(i), module) for i, module in enumerate(modules)]
    return build_optimizer(spec.optimizer, layers, len(modules))


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of storages that come into being inside a `with` block and still live, and their peak.

    A mode is of one thread; in another one `in_thread` counts on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0
        self._known: weakref.WeakSet[Any] = weakref.WeakSet()
        self._lock = threading.RLock()

    def in_thread(self) -> LiveBytes:
        """Return a mode for another thread that adds to the same count."""
        return _OtherThread(self)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._see((args, kwargs), is_new=False)
        made = func(*args, **(kwargs or {}))
        self._see(made, is_new=True)
        return made

    def _see(self, values: object, is_new: bool) -> None:
        for value in tree_leaves(values):
            if not isinstance(value, torch.Tensor) or value.is_meta:
                continue
            storage = value.untyped_storage()
            if storage not in self._known:
                self._known.add(storage)
                if is_new:
                    self._add(storage.nbytes())
                    weakref.finalize(storage, self._add, -storage.nbytes())

    def _add(self, size: int) -> None:
        with self._lock:
            self.live_bytes += size
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)


class _OtherThread(LiveBytes):
    def __init__(self, of: LiveBytes) -> None:
        super().__init__()
        self._known = of._known
        self._of = of

    def _add(self, size: int) -> None:
        self._of._add(size)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

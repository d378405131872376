"""Engine speed beside torch.distributed.pipelining.

Images/s, bytes and exactness of 1F1B, each in its own processes.
Both train the same ResNet on two ranks, with the same partition, micro-batches and images, one
thread each and SGD with momentum; ours moves data by MPI, and by gloo as theirs. Each has processes
of its own, as a user of either has, which are started in turn, A B C A B C. Shown are medians of
images/s, the ratio over torch's in the same turn, the most bytes of all tensors at once, counted
from torch's storages alike for all, and how far the weights after the first step are from those of
one unsplit process, relative to the largest change. `scripts.bench.peers` races more engines.

Takes Hydra overrides, for every case; prints tables and ratios on stderr and JSON on stdout.
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
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, distributed, nn
from torch.nn import functional

from gems.autograd.torch_internals import TorchDispatchMode, tree_leaves
from gems.config.schema import DataConfig, OptimizerConfig
from gems.engine.optimization.optimizer import build_optimizer
from gems.engine.optimization.parameter_groups import NumberedLayer
from gems.models import Layer, layers_of
from gems.models.build import build_layers
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.atomic_io import read_json, write_json
from gems.utils.host_memory import keep_freed_memory
from scripts.bench import rig

DEFAULTS = (
    "data=synthetic parallel.partitions=2 parallel.micro_batches=8 parallel.micro_batch_size=4"
    " machine=cpu"
)
SIDES_PX = (32, 64)
CUTS = {
    2: (0, 4, 11),
    4: (0, 2, 4, 7, 11),
}  # by stages, nearer to equal work than the even partition
STARTS = 5
ROUNDS = 5
STEPS = 4
OURS = "ours"
OVER_GLOO = "ours, gloo"
THEIRS = "torch"
PLACEMENTS = {
    "ScheduleGPipe": "linear",
    "Schedule1F1B": "linear",
    "ScheduleInterleaved1F1B": "looped",
    "ScheduleZBVZeroBubble": "v",
}
Step = Callable[[], object]
Layers = Mapping[int, nn.Module]  # those of a rank, by their number in the network


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with one of its schedules; `num_stages` of the network."""

    engine: str
    schedule: str
    num_stages: int = 2
    num_processes: int = 2


def main(overrides: list[str]) -> int:
    """Run both sizes and print their results."""
    contenders = [
        Contender(OURS, "1f1b"),
        Contender(OVER_GLOO, "1f1b"),
        Contender(THEIRS, "Schedule1F1B"),
    ]
    return rig.answered(compare(contenders, overrides), False)


def compare(
    contenders: Sequence[Contender], overrides: list[str], is_alike: bool = False
) -> dict[str, Any]:
    """Race contenders at each size; with `is_alike` all have the memory settings of our engine."""
    rig.machine()
    return {
        f"{side_px} px": race(contenders, [DEFAULTS, rig.square(side_px), *overrides], is_alike)
        for side_px in SIDES_PX
    }


def race(contenders: Sequence[Contender], words: Sequence[str], is_alike: bool) -> dict[str, Any]:
    """Start contenders in turn; return a row for each, and our fastest at the peak of theirs."""
    rig.log(words[1])
    ways = {one: partial(measured, one, words, is_alike) for one in contenders}
    runs = rig.in_turns(ways, STARTS)
    times = {
        one: [step_s for start in starts for step_s in start["seconds"]]
        for one, starts in runs.items()
    }
    table = rig.Table(
        "engine:<12",
        "schedule:<26",
        "images/s=images_per_s:>10.1f",
        "over torch=ratio:>10.3f",
        "peak MiB=peak_bytes:>10.2f",
        "error:>10.1e",
    )
    first = next((one for one in contenders if one.engine == THEIRS), contenders[0])
    rows = []
    for one, starts in runs.items():
        step_s = statistics.median(times[one])
        ratios = [theirs / ours for theirs, ours in zip(times[first], times[one], strict=True)]
        row = {
            "engine": one.engine,
            "schedule": one.schedule,
            "step_s": step_s,
            "images_per_s": starts[0]["images"] / step_s,
        }
        row |= {name: max(each[name] for each in starts) for name in ("peak_bytes", "error")}
        rows.append(row | {"ratio": statistics.median(ratios), **rig.quartiles(ratios)})
    table.rows(sorted(rows, key=lambda row: float(row["step_s"])))
    answers = judge(contenders, list(times.values()), [row["peak_bytes"] for row in rows])
    for answer in answers:
        best = "none of ours"
        if answer["ours"]:
            middle = f"middle half {answer['ratio_p25']:.3f} to {answer['ratio_p75']:.3f}"
            best = f"ours {answer['ours']}, {answer['ratio']:.3f} times as fast ({middle})"
        rig.log(f"at most the peak of {answer['theirs']}: {best}")
    return {"rows": rows, "answers": answers}


def judge(
    contenders: Sequence[Contender], times: Sequence[Sequence[float]], peaks: Sequence[int]
) -> list[dict[str, Any]]:
    """Find for each of theirs the fastest of ours at equal or lower peak.

    Their fastest comes first.
    """
    order = sorted(range(len(contenders)), key=lambda i: statistics.median(times[i]))
    answers = []
    for theirs in (i for i in order if not contenders[i].engine.startswith(OURS)):
        ours = next(
            (i for i in order if contenders[i].engine == OURS and peaks[i] <= peaks[theirs]), None
        )
        answer: dict[str, Any] = {
            "theirs": f"{contenders[theirs].engine} {contenders[theirs].schedule}",
            "ours": None if ours is None else contenders[ours].schedule,
        }
        if ours is not None:
            ratios = [a / b for a, b in zip(times[theirs], times[ours], strict=True)]
            answer |= {"ratio": statistics.median(ratios), **rig.quartiles(ratios)}
        answers.append(answer)
    return answers


def measured(
    contender: Contender,
    words: Sequence[str],
    is_alike: bool,
    rounds: int = ROUNDS,
    steps: int = STEPS,
) -> dict[str, Any]:
    """Start a contender's processes, and return its times, its peak and its error."""
    is_ours = contender.engine.startswith(OURS)
    cuts = CUTS[contender.num_stages if is_ours else 2]
    own = (
        f"schedule={contender.schedule if is_ours else '1f1b'}"
        f" parallel.boundaries=[{','.join(map(str, cuts))}]"
    )
    own += " machine.transport=gloo" if contender.engine == OVER_GLOO else ""
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(replace(rig.composed(*words, own), runs_dir=scratch))
        call = rig.call_argv(
            run,
            str(folder.path),
            contender.engine,
            contender.schedule,
            CUTS[contender.num_stages],
            is_alike,
            rounds,
            steps,
        )
        rig.start_ranks(contender.num_processes, *call)
        return read_json(folder.result_json)


def run(
    path: str,
    name: str,
    schedule: str,
    cuts: Sequence[int],
    is_alike: bool,
    rounds: int,
    num_steps: int,
) -> None:
    """Train with one contender on this rank: compare its first step, then time others.

    Rank 0 writes the result.
    """
    from gems.engine.transport.mpi import allgather, world
    from scripts.bench import peers

    comm = world()
    folder = RunFolder(Path(path))
    if is_alike or name.startswith(OURS):
        keep_freed_memory()  # as the ranks of a run
    spec = folder.read_spec()
    training = Training(
        layers_of(spec.model, spec.data),
        spec.seed,
        spec.optimizer,
        spec.parallel.micro_batches or 1,
        *batch_of(spec.data, spec.parallel.global_batch),
    )
    with LiveBytes() as live:
        if name.startswith(OURS):
            step, layers = of_ours(folder, comm, training.images, training.labels)
        elif name == THEIRS:
            step, layers = of_torch(schedule, cuts, training, comm, path)
        else:
            step, layers = peers.BUILDERS[name](schedule, cuts, training, comm, live)
        step()
    error = max(allgather(comm, error_of(layers, training)))
    timed(comm, step, num_steps)  # warms up
    measured = {
        "seconds": [timed(comm, step, num_steps) for _ in range(rounds)],
        "peak_bytes": max(allgather(comm, live.peak_bytes)),
        "error": error,
        "images": spec.parallel.global_batch,
        "torch": torch.__version__,
    }
    if comm.rank == 0:
        write_json(folder.result_json, measured)


class Training(NamedTuple):
    """What every contender trains, and one batch of it."""

    layers: Sequence[Layer]
    seed: int
    optimizer: OptimizerConfig
    micro_batches: int
    images: Tensor
    labels: Tensor

    def modules(self, first: int, end: int) -> nn.Sequential:
        """Build some layers."""
        return nn.Sequential(*build_layers(self.layers, first, end, self.seed)).train()


def batch_of(data: DataConfig, size: int) -> tuple[Tensor, Tensor]:
    """Return the images and labels of a step, the same on each rank."""
    torch.manual_seed(0)
    images = torch.randn(size, data.channels, data.height_px, data.width_px)
    return images, torch.randint(data.num_classes, (size,))


def timed(comm: Any, step: Step, count: int) -> float:
    """Return the mean seconds of `count` steps, which all ranks begin and end together."""
    comm.Barrier()
    begin = time.perf_counter()
    for _ in range(count):
        step()
    comm.Barrier()
    return (time.perf_counter() - begin) / count


def of_ours(folder: RunFolder, comm: Any, images: Tensor, labels: Tensor) -> tuple[Step, Layers]:
    """Return the step of a prepared run of ours, and the layers of this rank."""
    from gems.engine.batch_loader import ReadShare
    from gems.engine.device import open_device
    from gems.engine.executor import Batch
    from gems.engine.rank import Rank

    plan = folder.read_plan()
    rank = Rank.open(plan, comm, open_device(plan.spec.machine))
    rank.stages.set_training(True)
    size = plan.spec.parallel.micro_batch_size
    share = ReadShare.of(plan, comm.rank)
    batch = Batch(
        {m: part for m, part in enumerate(images.split(size)) if m in share.images},
        {m: part for m, part in enumerate(labels.split(size)) if m in share.labels},
    )
    layers = {layer.place: layer.module for layer in rank.stages.layers}
    return lambda: rank.train.run(0, batch), layers


def of_torch(
    name: str, cuts: Sequence[int], training: Training, comm: Any, path: str
) -> tuple[Step, Layers]:
    """Return the step of a schedule of torch's, and the layers of this rank."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    distributed.init_process_group(
        "gloo", init_method=f"file://{path}/gloo", rank=comm.rank, world_size=comm.size
    )
    from torch.distributed import pipelining  # takes seconds to load

    rank = comm.rank
    size = comm.size
    num_stages = len(cuts) - 1
    held = {"linear": [rank], "looped": [rank, rank + size], "v": [rank, 2 * size - 1 - rank]}[
        PLACEMENTS[name]
    ]
    modules = [training.modules(cuts[s], cuts[s + 1]) for s in held]
    optimizer = optimizer_of(training.optimizer, modules)
    stages = [
        pipelining.PipelineStage(module, stage, num_stages, torch.device("cpu"))
        for module, stage in zip(modules, held, strict=True)
    ]
    make: Any = getattr(pipelining, name)
    schedule = make(
        stages if len(stages) > 1 else stages[0],
        training.micro_batches,
        loss_fn=functional.cross_entropy,
    )
    inputs = [training.images] if 0 in held else []
    has_last = num_stages - 1 in held

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*inputs, **({"target": training.labels, "losses": []} if has_last else {}))
        optimizer.step()

    return step, {
        cuts[s] + i: layer
        for s, module in zip(held, modules, strict=True)
        for i, layer in enumerate(module)
    }


def optimizer_of(config: OptimizerConfig, modules: Sequence[nn.Module]) -> torch.optim.Optimizer:
    """Return the optimizer of a run for some modules."""
    layers = [NumberedLayer(i, str(i), module) for i, module in enumerate(modules)]
    return build_optimizer(config, layers, len(modules))


def error_of(layers: Layers, training: Training) -> float:
    """Return the error of weights after a step of one process, relative to the largest change."""
    model = training.modules(0, len(training.layers))
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = optimizer_of(training.optimizer, [model])
    count = training.micro_batches
    parts = training.images.chunk(count)
    for part, truth in zip(parts, training.labels.chunk(count), strict=True):
        (functional.cross_entropy(model(part), truth) / count).backward()
    optimizer.step()
    changes = (
        parameter.detach() - old for parameter, old in zip(model.parameters(), before, strict=True)
    )
    largest = max(float(change.abs().max()) for change in changes)
    pairs = ((layer, model[place]) for place, layer in layers.items())
    errors = (
        (ours.detach() - theirs.detach()).abs().max()
        for layer, truth in pairs
        for ours, theirs in zip(layer.parameters(), truth.parameters(), strict=True)
    )
    return max(map(float, errors)) / largest


class LiveBytes(TorchDispatchMode):
    """Count the live bytes of storages that are created in a `with` block, and their peak.

    A mode belongs to one thread; use `in_thread` in another one.
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
        result = func(*args, **(kwargs or {}))
        self._see(result, is_new=True)
        return result

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

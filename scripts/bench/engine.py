"""Engine speed beside torch.distributed.pipelining: the engines alone, and the best schedules of both at equal peak.

Engines: images/s of our 1f1b beside Schedule1F1B, A B A B. Both run the same ResNet, partition, micro-batches and
images, with one thread each and SGD with momentum; ours moves data by MPI, theirs by gloo. First in the same two
processes, so that the memory settings of our engine serve both; then each in processes of its own, started in turn, as
a user of either has it.

Best: our best schedule beside theirs at equal or lower measured peak. Every contender trains the same ResNet on the
same two ranks, images and micro-batches; stages are equal if there are as many. Times are medians over rounds in which
all take turns. A peak is the most bytes of all tensors at once, weights and optimizer included, in the first step of
each, counted from torch's storages alike for both. Schedules that cannot run are named with the reason.

Takes Hydra overrides, for every case; prints medians and ratios on stderr and JSON on stdout.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from gems.config.compose import compose
from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.errors import GemsError
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.schedule import FAMILIES
from gems.utils.atomic_io import read_json, write_json
from scripts.bench.rig import MIB, Table, in_turns, log, machine, quartiles, seconds, start_ranks

DEFAULTS = [
    "data=synthetic", "parallel.partitions=2", "parallel.micro_batches=8", "parallel.micro_batch_size=4", "machine=cpu",
]  # fmt: skip
CASES = {f"{side} px": [f"data.height_px={side}", f"data.width_px={side}"] for side in (32, 64)}
CUTS = (0, 4, 11)  # nearer to equal work than the even partition
ROUNDS, STEPS = 15, 4
STARTS, ROUNDS_A_START = 5, 5
OURS, THEIRS = "ours", "torch"

BEST_CUTS = {2: (0, 5, 11), 4: (0, 2, 4, 7, 11)}  # nearest to equal work for this network
OUR_SCHEDULES = {
    "gpipe": 2, "1f1b": 2, "zb_h1": 2, "zb_h2": 2, "chimera": 2, "gems_master": 2, "gems_zb": 2,
    "interleaved_1f1b": 4, "looped_bfs": 4, "zb_v": 4, "v_half": 4, "v_min": 4, "dualpipe_v": 4,
}  # fmt: skip
THEIR_SCHEDULES = {
    "ScheduleGPipe": "linear", "Schedule1F1B": "linear", "ScheduleInterleaved1F1B": "looped",
    "ScheduleLoopedBFS": "looped", "ScheduleInterleavedZeroBubble": "looped", "ScheduleZBVZeroBubble": "v",
}  # fmt: skip
BEST_ROUNDS = 11


@dataclass(slots=True)
class Contender:
    """One schedule of one engine on this rank."""

    engine: str
    schedule: str
    step: Callable[[], object]
    peak_bytes: int


def main(overrides: list[str]) -> int:
    """Run all cases and print their results."""
    machine()
    results: dict[str, Any] = {}
    for name, case in CASES.items():
        cuts = f"parallel.boundaries={list(CUTS)}".replace(" ", "")
        words = ["schedule=1f1b", *DEFAULTS, cuts, *case, *overrides]
        results[name] = found = _together(words)
        log(
            f"{name}: ours {found['ours_images_per_s']:.1f} images/s, torch.distributed.pipelining "
            f"{found['torch_images_per_s']:.1f} images/s, ratio {found['ratio']:.3f} (medians of {ROUNDS} rounds of "
            f"{STEPS} steps, A B A B; "
            f"middle half of the rounds' ratios {found['ratio_p25']:.3f} to {found['ratio_p75']:.3f})"
        )
        found["apart"] = apart = _apart(words)
        log(
            f"{name}, each in its own processes: ratio {apart['ratio']:.3f} "
            f"(medians of {STARTS} starts of each, in turn; ours {apart['ours_images_per_s']:.1f}, "
            f"torch {apart['torch_images_per_s']:.1f} images/s)"
        )
    results["best"] = compete(overrides)
    print(json.dumps(results))
    return 0


def _together(overrides: list[str]) -> dict[str, Any]:
    """Compare both engines in the same processes."""
    found = _run_engines(overrides, (OURS, THEIRS), ROUNDS)
    ours, theirs = found["seconds"][OURS], found["seconds"][THEIRS]
    return _rates(found, ours, theirs) | quartiles([b / a for a, b in zip(ours, theirs, strict=True)])


def _apart(overrides: list[str]) -> dict[str, Any]:
    """Compare the engines in processes of their own, started in turn."""
    runs = in_turns(
        {engine: lambda e=engine: _run_engines(overrides, (e,), ROUNDS_A_START) for engine in (OURS, THEIRS)}, STARTS
    )  # type: ignore[misc]
    medians = {engine: [statistics.median(found["seconds"][engine]) for found in runs[engine]] for engine in runs}
    return _rates(runs[THEIRS][-1], medians[OURS], medians[THEIRS])


def _rates(found: dict[str, Any], ours: list[float], theirs: list[float]) -> dict[str, Any]:
    return {name: value for name, value in found.items() if name != "seconds"} | {
        "ours_images_per_s": found["images"] / statistics.median(ours),
        "torch_images_per_s": found["images"] / statistics.median(theirs),
        "ratio": statistics.median(theirs) / statistics.median(ours),
    }


def _run_engines(overrides: list[str], engines: tuple[str, ...], num_rounds: int) -> dict[str, Any]:
    """Start the ranks of one case and return what rank 0 found: seconds of a step by engine and round."""
    spec = compose(overrides)
    with tempfile.TemporaryDirectory() as scratch:
        folder = prepare(replace(spec, runs_dir=scratch))
        program = ("scripts.bench.engine", "--rank", str(folder.path), str(num_rounds), *engines)
        start_ranks(spec.world_size, *program, gloo=True)
        return read_json(folder.result_json)


def run_rank(path: Path, num_rounds: int, engines: list[str]) -> None:
    """Run the engines in turn on one rank; rank 0 writes the figures."""
    import torch

    folder = RunFolder(path)
    spec = folder.read_spec()
    with _ranks(THEIRS in engines) as comm:
        images, labels = _samples(spec)
        steps: dict[str, Callable[[], object]] = {}
        if OURS in engines:
            steps[OURS] = _ours(folder, comm, images, labels)
        if THEIRS in engines:
            steps[THEIRS] = _theirs("Schedule1F1B", spec.parallel.boundaries or CUTS, spec, comm, images, labels)
        in_turns(steps, 2)  # warms up
        found = in_turns({name: _between_barriers(comm, step, STEPS) for name, step in steps.items()}, num_rounds)
        if comm.rank == 0:
            write_json(folder.result_json, {
                "seconds": found, "images": global_batch(spec),
                "model": f"{spec.model.name}{spec.model.depth}-v{spec.model.version}", "height_px": spec.data.height_px,
                "micro_batches": spec.parallel.micro_batches, "micro_batch_size": spec.parallel.micro_batch_size,
                "torch": torch.__version__,
            })  # fmt: skip


def compete(overrides: list[str]) -> dict[str, Any]:
    """Start the ranks on which all schedules take turns, print the table, and return what they found."""
    folders: dict[str, str] = {}
    failed: dict[str, str] = {name: "is not among the families" for name in OUR_SCHEDULES if name not in FAMILIES}
    with tempfile.TemporaryDirectory() as scratch:
        for name, num_stages in OUR_SCHEDULES.items():
            if name in failed:
                continue
            cuts = f"parallel.boundaries={list(BEST_CUTS[num_stages])}".replace(" ", "")
            try:
                spec = compose([*DEFAULTS, *CASES["32 px"], f"schedule={name}", cuts, *overrides])
                folders[name] = str(prepare(replace(spec, runs_dir=scratch, name=name)).path)
            except GemsError as error:
                failed[name] = str(error)
        work = Path(scratch) / "work.json"
        write_json(work, {"folders": folders, "failed": failed})
        start_ranks(2, "scripts.bench.engine", "--best", str(work), timeout_s=580.0, gloo=True)
        found: dict[str, Any] = read_json(work.with_name("found.json"))
    show(found)
    return found


def show(found: dict[str, Any]) -> None:
    """Print the table and the answer."""
    table = Table("engine:<7", "schedule:<32", "ms a step:>10.1f", "peak MiB:>10.2f")
    for one in sorted(found["contenders"], key=lambda one: float(one["step_s"])):
        table.row(one["engine"], one["schedule"], one["step_s"] * 1e3, one["peak_bytes"] / MIB)
    for name, why in found["failed"].items():
        log(f"{name} does not run: {why}")
    for one in found["answers"]:
        middle = one["ours"] and (
            f"{one['ours']}, {one['ratio']:.3f} times as fast (middle half of {BEST_ROUNDS} rounds "
            f"{one['ratio_p25']:.3f} to {one['ratio_p75']:.3f})"
        )
        log(f"at most the peak of torch's {one['theirs']}: " + (f"ours {middle}" if middle else "none of ours"))


def run_best_rank(work: Path) -> None:
    """Build all contenders on one rank, time them in turn, and let rank 0 write what was found."""
    given = read_json(work)
    folders = {name: RunFolder(Path(path)) for name, path in given["folders"].items()}
    spec = next(iter(folders.values())).read_spec()
    failed: dict[str, str] = dict(given["failed"])
    contenders: list[Contender] = []
    with _ranks(True) as comm:
        images, labels = _samples(spec)

        def theirs(name: str) -> Callable[[], object]:
            cuts = BEST_CUTS[2 if THEIR_SCHEDULES[name] == "linear" else 4]
            return _theirs(name, cuts, spec, comm, images, labels)

        made: list[tuple[str, str, Callable[[], Callable[[], object]]]] = [
            (OURS, name, lambda f=folder: _ours(f, comm, images, labels)) for name, folder in folders.items()  # type: ignore[misc]
        ]  # fmt: skip
        made += [(THEIRS, name, lambda n=name: theirs(n)) for name in THEIR_SCHEDULES]  # type: ignore[misc]
        for engine, name, build in made:
            why = ""
            try:
                with LiveBytes() as live:
                    step = build()
                    step()
                contenders.append(Contender(engine, name, step, live.peak_bytes))
            except Exception as error:  # whatever their schedules raise on this model
                why = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            if any(whys := comm.allgather(why)):
                failed[name] = next(filter(None, whys))
                contenders = [one for one in contenders if (one.engine, one.schedule) != (engine, name)]
        steps = {str(number): _between_barriers(comm, one.step, 1) for number, one in enumerate(contenders)}
        times = [all_s[1:] for all_s in in_turns(steps, BEST_ROUNDS + 1).values()]  # the first round warms up
        peaks = comm.allgather([one.peak_bytes for one in contenders])
        if comm.rank == 0:
            most = [max(rank[i] for rank in peaks) for i in range(len(contenders))]
            write_json(work.with_name("found.json"), judge(contenders, times, most, failed))


def judge(
    contenders: list[Contender], times: list[list[float]], peaks: list[int], failed: dict[str, str]
) -> dict[str, Any]:
    """Find for each of theirs the fastest of ours at equal or lower peak; their fastest comes first."""
    median = [statistics.median(mine) for mine in times]
    order = sorted(range(len(contenders)), key=lambda i: median[i])
    answers = []
    for theirs in (i for i in order if contenders[i].engine == THEIRS):
        ours = next((i for i in order if contenders[i].engine == OURS and peaks[i] <= peaks[theirs]), None)
        answer: dict[str, Any] = {
            "theirs": contenders[theirs].schedule, "ours": None if ours is None else contenders[ours].schedule,
        }  # fmt: skip
        if ours is not None:
            ratios = [a / b for a, b in zip(times[theirs], times[ours], strict=True)]
            answer |= {"ratio": statistics.median(ratios), **quartiles(ratios)}
        answers.append(answer)
    return {
        "contenders": [
            {"engine": one.engine, "schedule": one.schedule, "step_s": median[i], "peak_bytes": peaks[i]}
            for i, one in enumerate(contenders)
        ],
        "answers": answers, "failed": failed,
    }  # fmt: skip


@contextmanager
def _ranks(has_gloo: bool) -> Iterator[Any]:
    """Yield this rank's communicator, and open torch.distributed's process group beside it."""
    import torch.distributed as dist

    from gems.engine.transport.mpi import world

    comm = world()
    if has_gloo:
        os.environ |= {"RANK": str(comm.rank), "WORLD_SIZE": str(comm.size)}
        dist.init_process_group("gloo")
    yield comm
    if has_gloo:
        dist.destroy_process_group()


def _samples(spec: RunSpec) -> tuple[Any, Any]:
    """Return the images and labels of a step, the same on each rank."""
    import torch

    torch.manual_seed(0)
    num = (spec.parallel.micro_batches or 1) * spec.parallel.micro_batch_size
    images = torch.randn(num, spec.data.channels, spec.data.height_px, spec.data.width_px)
    return images, torch.randint(spec.data.num_classes, (num,))


def _between_barriers(comm: Any, step: Callable[[], object], count: int) -> Callable[[], float]:
    """Return a call that times a step: the mean of `count` of them, which all ranks begin and end together."""

    def steps() -> None:
        for _ in range(count):
            step()
        comm.Barrier()

    def timed() -> float:
        comm.Barrier()
        return seconds(steps) / count

    return timed


def _ours(folder: RunFolder, comm: Any, images: Any, labels: Any) -> Callable[[], object]:
    """Build one optimizer step of our engine for this rank's part of the model."""
    from gems.engine.device import open_device
    from gems.engine.executor import Batch
    from gems.engine.pipeline import build_pipeline

    spec = folder.read_spec()
    pipeline = build_pipeline(spec, comm, open_device(spec.machine), schedule=folder.read_schedule())
    pipeline.set_training(True)
    size = spec.parallel.micro_batch_size
    batch = Batch(
        {m: part for m, part in enumerate(images.split(size)) if m in pipeline.image_micro_batches},
        {m: part for m, part in enumerate(labels.split(size)) if m in pipeline.label_micro_batches},
    )
    return lambda: pipeline.train.run(0, batch)


def _theirs(name: str, cuts: Sequence[int], spec: RunSpec, comm: Any, images: Any, labels: Any) -> Callable[[], object]:
    """Build one optimizer step of a schedule of torch.distributed.pipelining for this rank's part of the model."""
    import torch
    import torch.distributed.pipelining as pipelining
    import torch.nn.functional as functional
    from torch import nn

    from gems.engine.optimizer import build_optimizer
    from gems.models import layers_of
    from gems.models.build import build_layers

    rank, size, num_stages = comm.rank, comm.size, len(cuts) - 1
    held = {"linear": [rank], "looped": [rank, rank + size], "v": [rank, 2 * size - 1 - rank]}[THEIR_SCHEDULES[name]]
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
    inputs = [images] if 0 in held else []
    has_last = num_stages - 1 in held

    def step() -> None:
        optimizer.zero_grad()
        schedule.step(*inputs, **({"target": labels, "losses": []} if has_last else {}))
        optimizer.step()

    return step


class LiveBytes:
    """Counts the bytes of storages that come into being inside a `with` block and still live, and their peak."""

    def __init__(self) -> None:
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
                counter._add(storage.nbytes())
                weakref.finalize(storage, counter._add, -storage.nbytes())

        class Mode(TorchDispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                for value in tree_leaves((args, kwargs)):  # arguments were there before
                    see(value, False)
                made = func(*args, **(kwargs or {}))
                for value in tree_leaves(made):
                    see(value, True)
                return made

        self._mode = Mode()

    def _add(self, size: int) -> None:
        self.live_bytes += size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def __enter__(self) -> LiveBytes:
        self._mode.__enter__()
        return self

    def __exit__(self, *details: Any) -> None:
        self._mode.__exit__(*details)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        run_rank(Path(sys.argv[2]), int(sys.argv[3]), sys.argv[4:])
    elif sys.argv[1:2] == ["--best"]:
        run_best_rank(Path(sys.argv[2]))
    else:
        sys.exit(main(sys.argv[1:]))

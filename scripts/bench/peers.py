"""Peers in one run: what others train the same network with on two ranks, beside ours.

Every contender trains the same ResNet on two cores, with the same images, cut, micro-batches and
optimizer, one thread a rank (torchgpipe: one process with a thread for each part), and the memory
settings of our engine. Each has processes of its own, as a user of it has, which are started in
turn, A B C A B C. Shown are medians of images/s, the most bytes of all tensors at once, counted
from torch's storages alike for all, and how far the weights after the first step are from those of
one unsplit process, relative to the largest change.

Peers: torch.distributed.pipelining over gloo; torchgpipe (`pip install torchgpipe==0.0.7`); a plain
1F1B loop with mpi4py, written by hand as one would. DeepSpeed's pipeline is not among them: PyPI
has no wheel of it.

Takes Hydra overrides, for every case; prints a table and ratios on stderr and JSON on stdout.
"""

from __future__ import annotations

import importlib.util
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from gems.config.resolve import global_batch
from gems.config.schema import RunSpec
from gems.models import layers_of
from gems.models.build import build_layers
from gems.runs.folder import RunFolder
from gems.runs.prepare import prepare
from gems.utils.atomic_io import read_json, write_json
from gems.utils.host_memory import keep_freed_memory
from scripts.bench import engine, rig
from scripts.bench.engine import CUTS, DEFAULTS, OURS, SIDES_PX, THEIRS, Layers, LiveBytes, Step

TORCHGPIPE = "torchgpipe"
LOOP = "MPI loop"
STARTS = 5
ROUNDS = 3
STEPS = 4
FOUR_CUTS = (0, 2, 4, 7, 11)  # of two stages a rank


@dataclass(frozen=True, slots=True)
class Contender:
    """An engine with one of its schedules; `num_stages` of the network."""

    engine: str
    schedule: str
    num_stages: int = 2

    @property
    def cuts(self) -> tuple[int, ...]:
        """The boundaries between the stages."""
        return CUTS if self.num_stages == 2 else FOUR_CUTS

    @property
    def num_processes(self) -> int:
        """How many processes it has."""
        return 1 if self.engine == TORCHGPIPE else 2


CONTENDERS = (
    Contender(OURS, "1f1b"),
    Contender(OURS, "chimera"),
    Contender(OURS, "gpipe"),
    Contender(OURS, "gems_master"),
    Contender(OURS, "interleaved_1f1b", 4),
    Contender(OURS, "zb_v", 4),
    Contender(THEIRS, "Schedule1F1B"),
    Contender(THEIRS, "ScheduleGPipe"),
    Contender(THEIRS, "ScheduleInterleaved1F1B", 4),
    Contender(THEIRS, "ScheduleZBVZeroBubble", 4),
    Contender(TORCHGPIPE, "never"),
    Contender(TORCHGPIPE, "except_last"),
    Contender(LOOP, "1f1b"),
)


def main(overrides: list[str]) -> int:
    """Run all contenders at each size, print the tables, and say by how much ours is faster at equal or lower peak."""
    rig.machine()
    contenders = CONTENDERS
    if importlib.util.find_spec("torchgpipe") is None:
        rig.log("torchgpipe is not installed: pip install torchgpipe==0.0.7")
        contenders = tuple(one for one in CONTENDERS if one.engine != TORCHGPIPE)
    answers = {
        f"{side_px} px": race(contenders, rig.square(side_px), overrides) for side_px in SIDES_PX
    }
    return rig.answered(answers, False)


def race(
    contenders: Sequence[Contender], size: str, overrides: Sequence[str], starts: int = STARTS
) -> dict[str, Any]:
    """Start the contenders in turn at one size.

    Return the rows of the table, and for each of theirs our fastest.
    """
    rig.log(size)
    ways = {one: partial(measured, one, [DEFAULTS, size, *overrides]) for one in contenders}
    runs = rig.in_turns(ways, starts)
    table = rig.Table(
        "engine:<12",
        "schedule:<26",
        "images/s=images_per_s:>10.1f",
        "peak MiB=peak_bytes:>10.2f",
        "error:>10.1e",
    )
    rows = [
        {
            "engine": one.engine,
            "schedule": one.schedule,
            "step_s": statistics.median(step_s_of(found)),
            "images_per_s": found[0]["images"] / statistics.median(step_s_of(found)),
            "peak_bytes": max(each["peak_bytes"] for each in found),
            "error": max(each["error"] for each in found),
        }
        for one, found in runs.items()
    ]
    table.rows(sorted(rows, key=lambda row: float(row["step_s"])))
    judged = engine.judge(
        [
            (THEIRS if one.engine != OURS else OURS, f"{one.engine} {one.schedule}")
            for one in contenders
        ],
        [step_s_of(found) for found in runs.values()],
        [row["peak_bytes"] for row in rows],
        {},
    )
    for answer in judged["answers"]:
        middle = (
            answer["ours"]
            and f"{answer['ours']}, {answer['ratio']:.3f} times as fast (middle half of the rounds "
        )
        middle = middle and middle + f"{answer['ratio_p25']:.3f} to {answer['ratio_p75']:.3f})"
        rig.log(f"at most the peak of {answer['theirs']}: {middle or 'none of ours'}")
    return {"rows": rows, "answers": judged["answers"]}


def step_s_of(starts: Sequence[dict[str, Any]]) -> list[float]:
    """Return the seconds a step of all rounds of all starts."""
    return [step_s for found in starts for step_s in found["seconds"]]


def measured(
    contender: Contender, words: Sequence[str], rounds: int = ROUNDS, steps: int = STEPS
) -> dict[str, Any]:
    """Start a contender's processes, and return its times, its peak and its error."""
    with tempfile.TemporaryDirectory() as scratch:
        schedule = contender.schedule if contender.engine == OURS else "1f1b"
        cuts = contender.cuts if contender.engine == OURS else CUTS
        boundaries = f"parallel.boundaries=[{','.join(map(str, cuts))}]"
        spec = rig.composed(*words, f"schedule={schedule} {boundaries}")
        folder = prepare(replace(spec, runs_dir=scratch))
        call = rig.call_argv(
            run,
            str(folder.path),
            contender.engine,
            contender.schedule,
            contender.cuts,
            rounds,
            steps,
        )
        rig.start_ranks(contender.num_processes, *call)
        return read_json(folder.result_json)


def run(
    path: str, name: str, schedule: str, cuts: Sequence[int], rounds: int, num_steps: int
) -> None:
    """Train with one contender on this rank: compare its first step, then time others.

    Rank 0 writes what was found.
    """
    from gems.engine.transport.mpi import allgather, world

    comm = world()
    folder = RunFolder(Path(path))
    keep_freed_memory()  # the memory settings of our engine
    spec = folder.read_spec()
    images, labels = engine.batch_of(spec)
    with LiveBytes() as live:
        if name == OURS:
            step, layers = engine.of_ours(folder, comm, images, labels)
        elif name == THEIRS:
            engine.open_gloo(comm, path)
            step, layers = engine.of_torch(schedule, cuts, spec, comm, images, labels)
        elif name == TORCHGPIPE:
            step, layers = of_torchgpipe(schedule, cuts, spec, images, labels, live)
        else:
            step, layers = of_mpi_loop(cuts, spec, comm, images, labels)
        step()
    error = max(allgather(comm, error_of(layers, spec, images, labels)))
    engine.timed(comm, step, num_steps)  # warms up
    seconds = [engine.timed(comm, step, num_steps) for _ in range(rounds)]
    peak = max(allgather(comm, live.peak_bytes))
    if comm.rank == 0:
        write_json(
            folder.result_json,
            {
                "seconds": seconds,
                "peak_bytes": peak,
                "error": error,
                "images": global_batch(spec),
                "torch": torch.__version__,
            },
        )


def error_of(layers: Layers, spec: RunSpec, images: Tensor, labels: Tensor) -> float:
    """Return how far weights are from those of one unsplit process after a step, relative to the largest change."""
    names = layers_of(spec.model, spec.data)
    model = nn.Sequential(*build_layers(names, 0, len(names), spec.seed)).train()
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = engine.optimizer_of(spec, [model])
    count = spec.parallel.micro_batches
    for part, truth in zip(images.chunk(count), labels.chunk(count), strict=True):
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


def of_torchgpipe(
    checkpoint: str,
    cuts: Sequence[int],
    spec: RunSpec,
    images: Tensor,
    labels: Tensor,
    live: LiveBytes,
) -> tuple[Step, Layers]:
    """Return the step of torchgpipe, which has a thread for each part.

    Bytes of its threads are counted too.
    """
    from torchgpipe import GPipe, worker

    names = layers_of(spec.model, spec.data)
    model = nn.Sequential(*build_layers(names, 0, len(names), spec.seed)).train()
    optimizer = engine.optimizer_of(spec, [model])
    balance = [end - begin for begin, end in itertools.pairwise(cuts)]
    piped = GPipe(
        model,
        balance,
        devices=["cpu"] * len(balance),
        chunks=spec.parallel.micro_batches,
        checkpoint=checkpoint,
    )
    compute = worker.Task.compute

    def counted(task: Any) -> Any:
        with live.in_thread():
            return compute(task)

    worker.Task.compute = counted

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(piped(images), labels).backward()
        optimizer.step()
        worker.Task.compute = compute  # only the first step is counted

    return step, dict(enumerate(model))


def of_mpi_loop(
    cuts: Sequence[int], spec: RunSpec, comm: Any, images: Tensor, labels: Tensor
) -> tuple[Step, Layers]:
    """Return the step of a 1F1B loop over two ranks with blocking calls of mpi4py, and the layers of this rank."""
    rank = comm.rank
    count = spec.parallel.micro_batches
    names = layers_of(spec.model, spec.data)
    module = nn.Sequential(*build_layers(names, cuts[rank], cuts[rank + 1], spec.seed)).train()
    optimizer = engine.optimizer_of(spec, [module])
    parts = images.chunk(count)
    truths = labels.chunk(count)
    with torch.no_grad():
        shape = nn.Sequential(*build_layers(names, 0, cuts[1], spec.seed)).train()(parts[0]).shape

    def first() -> None:
        output = module(parts[0])
        comm.Send(output.detach().numpy(), 1)
        for part in parts[1:]:
            following = module(part)
            grad = torch.empty(shape)
            comm.Sendrecv(following.detach().numpy(), 1, recvbuf=grad.numpy(), source=1)
            output.backward(grad)
            output = following
        grad = torch.empty(shape)
        comm.Recv(grad.numpy(), 1)
        output.backward(grad)

    def last() -> None:
        received = torch.empty(shape)
        comm.Recv(received.numpy(), 0)
        for m, truth in enumerate(truths):
            received.requires_grad_()
            (functional.cross_entropy(module(received), truth) / count).backward()
            grad = received.grad
            assert grad is not None
            if m == count - 1:
                comm.Send(grad.numpy(), 0)
            else:
                received = torch.empty(shape)
                comm.Sendrecv(grad.numpy(), 0, recvbuf=received.numpy(), source=0)

    def step() -> None:
        optimizer.zero_grad()
        (last if rank else first)()
        optimizer.step()

    return step, {cuts[rank] + i: layer for i, layer in enumerate(module)}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Peers in one run: other engines that train a network on two ranks, for `bench.engine`.

All have the memory settings of our engine, and one thread a rank (torchgpipe: one process with a
thread for each part). Peers: torch.distributed.pipelining over gloo; torchgpipe (`pip install
torchgpipe==0.0.7`); a plain 1F1B loop with mpi4py, written by hand as one would. DeepSpeed's
pipeline is not among them: PyPI has no wheel of it. Takes Hydra overrides, for every case.
"""

from __future__ import annotations

import importlib.util
import itertools
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional

from scripts.bench import rig
from scripts.bench.engine import (
    OURS,
    THEIRS,
    Contender,
    Layers,
    LiveBytes,
    Step,
    Training,
    compare,
    optimizer_of,
)

TORCHGPIPE = "torchgpipe"
LOOP = "MPI loop"
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
    Contender(TORCHGPIPE, "never", num_processes=1),
    Contender(TORCHGPIPE, "except_last", num_processes=1),
    Contender(LOOP, "1f1b"),
)


def main(overrides: list[str]) -> int:
    """Race all contenders at each size."""
    contenders = CONTENDERS
    if importlib.util.find_spec("torchgpipe") is None:
        rig.log("torchgpipe is not installed: pip install torchgpipe==0.0.7")
        contenders = tuple(one for one in CONTENDERS if one.engine != TORCHGPIPE)
    return rig.answered(compare(contenders, overrides, is_alike=True), False)


def of_torchgpipe(
    checkpoint: str, cuts: Sequence[int], training: Training, comm: Any, live: LiveBytes
) -> tuple[Step, Layers]:
    """Return the step of torchgpipe, which has a thread for each part.

    Bytes of its threads are counted too.
    """
    from torchgpipe import GPipe, worker

    model = training.modules(0, len(training.layers))
    optimizer = optimizer_of(training.optimizer, [model])
    balance = [end - begin for begin, end in itertools.pairwise(cuts)]
    piped = GPipe(
        model,
        balance,
        devices=["cpu"] * len(balance),
        chunks=training.micro_batches,
        checkpoint=checkpoint,
    )
    compute = worker.Task.compute

    def counted(task: Any) -> Any:
        with live.in_thread():
            return compute(task)

    worker.Task.compute = counted

    def step() -> None:
        optimizer.zero_grad()
        functional.cross_entropy(piped(training.images), training.labels).backward()
        optimizer.step()
        worker.Task.compute = compute  # only the first step is counted

    return step, dict(enumerate(model))


def of_mpi_loop(
    schedule: str, cuts: Sequence[int], training: Training, comm: Any, live: LiveBytes
) -> tuple[Step, Layers]:
    """Return the step of a 1F1B loop over two ranks by blocking mpi4py, and the rank's layers."""
    rank = comm.rank
    count = training.micro_batches
    module = training.modules(cuts[rank], cuts[rank + 1])
    optimizer = optimizer_of(training.optimizer, [module])
    parts = training.images.chunk(count)
    truths = training.labels.chunk(count)
    with torch.no_grad():
        shape = training.modules(0, cuts[1])(parts[0]).shape

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


BUILDERS = {TORCHGPIPE: of_torchgpipe, LOOP: of_mpi_loop}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

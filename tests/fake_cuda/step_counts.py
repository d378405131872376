"""Count what a training step costs the host on four ranks of the fake device.

`python -m tests.fake_cuda.step_counts` prints the counts of ResNet-110-v2 under 1F1B, eager and with
CUDA graphs: `--help` shows what else it can count.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any

from gems.launch.local_launcher import Output, mpiexec_argv, run_ranks

NUM_RANKS = 4
STEPS = 4  # of which graphs are captured in the first three
LIMIT_S = 600
WAIT = "wait: "
COPIES = ("copies in", "copies out", "copies within")
OPERATORS = "operators"
GRAPHS = "graph launches"


@dataclass(frozen=True, slots=True)
class StepCounts:
    """The counts of one step.

    Attributes:
        waits: The waits of each rank by what the host waited for.
        work: Of all ranks: kernels and copies beside graphs, graph launches, and operators that
            the host dispatched, those of the backward and views included.
        num_actions: The actions of all ranks that compute.
    """

    waits: Sequence[Mapping[str, int]]
    work: Mapping[str, int]
    num_actions: int

    @property
    def all_waits(self) -> Counter[str]:
        """The waits of all ranks."""
        return sum(map(Counter, self.waits), Counter())


def count_step(
    world: Any, schedule: str, memory: str, graphs: bool | str, **changes: object
) -> StepCounts:
    """Train some steps on the ranks of `world`, and return the counts of the last; collective."""
    from gems.autograd.torch_internals import TorchDispatchMode
    from gems.config.schema import MemoryConfig
    from gems.engine.batch_loader import BatchLoader
    from gems.engine.rank import Rank
    from gems.engine.transport.mpi import allgather, broadcast
    from gems.plan.evaluate import evaluate
    from gems.schedule.action import COMPUTE_KINDS
    from tests.fake_cuda.load import native
    from tests.helpers.device import DEVICE
    from tests.helpers.toys import make_spec

    class Operators(TorchDispatchMode):
        count = 0

        def __torch_dispatch__(
            self, operator: Any, _: Any, given: Any = (), named: Any = None
        ) -> Any:
            self.count += 1
            return operator(*given, **(named or {}))

    made = make_spec(schedule, NUM_RANKS, train__cuda_graphs=graphs, train__steps=STEPS, **changes)
    spec = replace(
        made, memory=MemoryConfig(memory, asynchronous=memory != "keep", min_offload_bytes=0)
    )
    plan = broadcast(world, evaluate(spec) if world.rank == 0 else None)
    rank = Rank.open(plan.for_ranks, world, DEVICE)
    loader = BatchLoader.open(rank.plan, rank.comm, DEVICE)
    rank.stages.set_training(True)
    for step in range(STEPS):
        batch = loader.batch(step)
        gc.collect()  # pinned memory of the case before waits for the device when it is freed
        native().clear_counts()
        with Operators() as operators:
            rank.train.run(step, batch)
    counts = Counter(native().counts())
    loader.close()
    waits = {name.removeprefix(WAIT): n for name, n in counts.items() if name.startswith(WAIT)}
    work = Counter(
        {
            "kernels": counts["kernels"],
            "copies": sum(n for name, n in counts.items() if name.startswith(COPIES)),
            GRAPHS: counts[GRAPHS],
            OPERATORS: operators.count,
        }
    )
    actions = chain.from_iterable(plan.schedule.rank_schedules)
    num_actions = sum(action.kind in COMPUTE_KINDS for action in actions)
    return StepCounts(allgather(world, waits), sum(allgather(world, work), Counter()), num_actions)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the counts of a step, eager and with graphs."""
    parser = argparse.ArgumentParser(prog="python -m tests.fake_cuda.step_counts")
    parser.add_argument("--depth", type=int, default=110, help="of ResNet v2, 9 n + 2")
    parser.add_argument("--schedule", default="1f1b", help="of 4 ranks")
    parser.add_argument("--micro-batches", type=int, default=8, help="of a step, of 1 image")
    parser.add_argument("--side", type=int, default=16, help="of an image, in pixels")
    parser.add_argument("--on-rank", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.on_rank:
        return _print_counts(args)
    from tests.fake_cuda.suite import environment
    from tests.fake_cuda.watch import DIRECT

    words = [*(sys.argv[1:] if argv is None else argv), "--on-rank"]
    command = ["-m", "tests.fake_cuda", "-m", "tests.fake_cuda.step_counts", *words]
    ended = run_ranks(
        mpiexec_argv(NUM_RANKS, [sys.executable, *command]),
        environment() | {DIRECT: "1"},  # staged, messages are cut into pieces for tests
        Output(None, False, lambda line: print(line, flush=True)),
        LIMIT_S,
    )
    return ended.returncode


def _print_counts(args: argparse.Namespace) -> int:
    from gems.engine.transport.mpi import world

    row = "{:<8}{:>10}{:>10}{:>16}{:>12}{:>12}  {}"
    comm = world()
    if comm.rank == 0:
        print(f"ResNet-{args.depth} v2, {args.side} px, {args.schedule}, {NUM_RANKS} ranks,")
        print(f"{args.micro_batches} micro-batches of 1 image, messages from device memory;")
        print("a step of all ranks together:")
        print(row.format("", "kernels", "copies", GRAPHS, OPERATORS, "actions", "host waits"))
    for graphs in (False, True):
        found = count_step(
            comm,
            args.schedule,
            "keep",
            graphs,
            model__depth=args.depth,
            model__version=2,
            data__height_px=args.side,
            data__width_px=args.side,
            parallel__micro_batches=args.micro_batches,
            parallel__micro_batch_size=1,
        )
        if comm.rank == 0:
            counts = (found.work[name] for name in ("kernels", "copies", GRAPHS, OPERATORS))
            waits = ", ".join(f"{name} {n}" for name, n in sorted(found.all_waits.items()))
            way = "graphs" if graphs else "eager"
            print(row.format(way, *counts, found.num_actions, waits), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())

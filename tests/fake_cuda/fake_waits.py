"""Host waits and launches in a step of four ranks: no wait for a micro-batch, one launch for an action.

For `make test-device`.
"""

from __future__ import annotations

import gc
import os
from collections import Counter
from dataclasses import replace
from itertools import chain

import pytest

from gems.config.schema import MemoryConfig
from gems.engine.batch_loader import BatchLoader
from gems.engine.rank import Rank
from gems.engine.transport.mpi import Comm, allgather, broadcast
from gems.plan.evaluate import evaluate
from gems.schedule.action import Kind
from tests.fake_cuda.load import native
from tests.fake_cuda.watch import DIRECT
from tests.helpers.device import DEVICE
from tests.helpers.toys import make_spec
from tests.mpi.conftest import comm  # noqa: F401

MICRO_BATCHES = 4, 8  # of a step; what the second waits for more is by the micro-batch
CASES = {
    "1f1b": ("1f1b", "keep", False),
    "zb_h1": ("zb_h1", "keep", False),
    "gems_master": ("gems_master", "keep", False),
    "1f1b, vdnn_all": ("1f1b", "vdnn_all", False),
    "1f1b, graphs": ("1f1b", "keep", "auto"),
    "zb_h1, graphs": ("zb_h1", "keep", True),
    "gems_master, graphs": ("gems_master", "keep", True),
}
STEPS = 4  # of which graphs are captured in the first three
# Waits of all ranks in a step, by what was waited for, staged and with device pointers alike: none
# for a micro-batch, but one at the beginning of a step for the time of events, and those for loss
# and gradient sums. Who saves some puts the new numbers here.
ONE_WAY = {"item": 7, "stream": 4}
TODAY = {
    "1f1b": ONE_WAY,
    "zb_h1": ONE_WAY,
    "gems_master": ONE_WAY | {"item": 10, "event": 4},
    "1f1b, vdnn_all": ONE_WAY,
    "1f1b, graphs": ONE_WAY,
    "zb_h1, graphs": ONE_WAY,
    "gems_master, graphs": ONE_WAY | {"item": 10, "event": 4},
}
WORK = ("kernels", "graph launches")


def counts_of(
    world: Comm, schedule: str, memory: str, graphs: bool | str, micro_batches: int
) -> tuple[list[Counter[str]], list[Counter[str]], int]:
    """Return the waits of the last step rank by rank, its work, and the number of graphs it could launch."""
    changes = {"parallel__micro_batches": micro_batches, "train__cuda_graphs": graphs}
    spec = replace(
        make_spec(schedule, 4, model__depth=20, train__steps=STEPS, **changes),
        memory=MemoryConfig(memory, asynchronous=memory != "keep", min_offload_bytes=0),
    )
    made = broadcast(world, evaluate(spec) if world.rank == 0 else None)
    rank = Rank.open(made.for_ranks, world, DEVICE)
    loader = BatchLoader.open(rank.plan, rank.comm, DEVICE)
    rank.stages.set_training(True)
    for step in range(STEPS):
        batch = loader.batch(step)
        gc.collect()  # pinned memory of the case before waits for the device when it is freed
        native().clear_counts()
        rank.train.run(step, batch)
    counts = native().counts()
    loader.close()
    mine = Counter(
        {name.removeprefix("wait: "): n for name, n in counts.items() if name.startswith("wait: ")}
    )
    work = Counter({name: counts.get(name, 0) for name in WORK})
    actions = chain.from_iterable(made.schedule.rank_schedules)
    computed = sum(action.kind in (Kind.F, Kind.B, Kind.I, Kind.W) for action in actions)
    return allgather(world, mine), allgather(world, work), computed


@pytest.mark.parametrize("case", CASES)
def test_host_waits_of_a_step(comm, case, capsys):  # noqa: F811
    (fewer, _, _), (ranks, work, computed) = (
        counts_of(comm, *CASES[case], number) for number in MICRO_BATCHES
    )
    total = sum(work, Counter())
    more = [
        sum(waits.values()) - sum(before.values())
        for waits, before in zip(ranks, fewer, strict=True)
    ]
    is_direct = DIRECT in os.environ
    if comm.rank == 0:
        with capsys.disabled():
            way = "device pointers" if is_direct else "staged"
            each = ", ".join(f"{count / (MICRO_BATCHES[1] - MICRO_BATCHES[0]):g}" for count in more)
            kinds = ", ".join(f"{name} {n}" for name, n in sorted(sum(ranks, Counter()).items()))
            print(
                f"\nhost waits a micro-batch, {case}, {way}: ranks {each}; in a step of all ranks:"
                f" {kinds}; {total['kernels']} kernels, {total['graph launches']} graph launches"
            )
    assert not any(more)
    assert total["graph launches"] == (computed if CASES[case][2] else 0)
    assert sum(ranks, Counter()) == Counter(TODAY[case])

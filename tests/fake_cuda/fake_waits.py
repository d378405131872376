"""How often the host waits for the device in a step of four ranks: never for a micro-batch.

For `make test-device`.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import replace

import pytest

from gems.config.schema import MemoryConfig
from gems.engine.batch_loader import BatchLoader
from gems.engine.rank import Rank
from gems.engine.transport.mpi import Comm, allgather, broadcast
from gems.plan.evaluate import evaluate
from tests.fake_cuda.load import native
from tests.fake_cuda.watch import DIRECT
from tests.helpers.device import DEVICE
from tests.helpers.toys import make_spec
from tests.mpi.conftest import comm  # noqa: F401

MICRO_BATCHES = 4, 8  # of a step; what the second waits for more is by the micro-batch
CASES = {
    "1f1b": ("1f1b", "keep"),
    "zb_h1": ("zb_h1", "keep"),
    "gems_master": ("gems_master", "keep"),
    "1f1b, vdnn_all": ("1f1b", "vdnn_all"),
}
# Waits of all ranks in a step, by what was waited for, staged and with device pointers alike: none
# for a micro-batch, but one at the beginning of a step for the time of events, and those for loss
# and gradient sums. Who saves some puts the new numbers here.
ONE_WAY = {"item": 7, "stream": 4}
TODAY = {
    "1f1b": ONE_WAY,
    "zb_h1": ONE_WAY,
    "gems_master": ONE_WAY | {"item": 10, "event": 4},
    "1f1b, vdnn_all": ONE_WAY,
}


def waits_of(world: Comm, schedule: str, memory: str, micro_batches: int) -> list[Counter[str]]:
    """Return the waits of the second step, rank by rank."""
    spec = replace(
        make_spec(schedule, 4, model__depth=20, parallel__micro_batches=micro_batches),
        memory=MemoryConfig(memory, asynchronous=memory != "keep", min_offload_bytes=0),
    )
    made = broadcast(world, evaluate(spec) if world.rank == 0 else None)
    rank = Rank.open(made.for_ranks, world, DEVICE)
    loader = BatchLoader.open(rank.plan, rank.comm, DEVICE)
    rank.stages.set_training(True)
    for step in range(2):
        batch = loader.batch(step)
        native().clear_counts()
        rank.train.run(step, batch)
    counts = native().counts()
    loader.close()
    mine = Counter(
        {name.removeprefix("wait: "): n for name, n in counts.items() if name.startswith("wait: ")}
    )
    return allgather(world, mine)


@pytest.mark.parametrize("case", CASES)
def test_host_waits_of_a_step(comm, case, capsys):  # noqa: F811
    fewer, ranks = (waits_of(comm, *CASES[case], number) for number in MICRO_BATCHES)
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
                f" {kinds}"
            )
    assert not any(more)
    assert sum(ranks, Counter()) == Counter(TODAY[case])

"""Host waits and launches in a step of four ranks: no wait for a micro-batch, one launch for an action.

For `make test-device`.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest

from tests.fake_cuda.step_counts import GRAPHS, NUM_RANKS, OPERATORS, count_step
from tests.fake_cuda.watch import DIRECT
from tests.mpi.conftest import comm  # noqa: F401

MICRO_BATCHES = 4, 8  # of a step; what the second waits for more is by the micro-batch
# Waits of all ranks in a step, by what was waited for, staged and with device pointers alike: none
# for a micro-batch, but one of each rank, which reads the norm and the losses together, and those
# for sums of gradients. A training waits once more, at the end of a step. Who saves some puts the
# new numbers here.
ONE_WAY = {"copy to the host": 4}
BOTH_WAYS = ONE_WAY | {"event": 4}
# Of all that may change a step: the lost steps of float16 and skip, clipping and averages.
CHANGES = {
    "train__precision": "fp16_mixed",
    "train__on_nonfinite": "skip",
    "train__max_grad_norm": 1.0,
    "train__ema_decay": 0.9,
    "optimizer__name": "adamw",
}
# With graphs: operators for an action, which copy its inputs and outputs, and for the step of a rank.
OPERATORS_PER_ACTION = 8
OPERATORS_PER_STEP = 40
MORE_LAUNCHES = 10  # than actions


@dataclass(frozen=True)
class Case:
    """A schedule and a memory policy, whether stages are captured, and what a step waits for."""

    schedule: str
    waits: Mapping[str, int]
    graphs: bool | str = False
    memory: str = "keep"
    changes: Mapping[str, object] = field(default_factory=dict)
    operators: int = OPERATORS_PER_ACTION


CASES = {
    "1f1b": Case("1f1b", ONE_WAY),
    "zb_h1": Case("zb_h1", ONE_WAY),
    "gems_master": Case("gems_master", BOTH_WAYS),
    "1f1b, vdnn_all": Case("1f1b", ONE_WAY, memory="vdnn_all"),
    "1f1b, graphs": Case("1f1b", ONE_WAY, "auto"),
    "zb_h1, graphs": Case("zb_h1", ONE_WAY, True),
    "gems_master, graphs": Case("gems_master", BOTH_WAYS, True),
    "1f1b, strips that run again, graphs": Case(
        "1f1b",
        ONE_WAY,
        True,
        "recompute",
        {"parallel__strips": 2, "model__norm": "ghost_batch"},
        operators=36,  # a few for each tensor that one strip leaves to the next
    ),
    "1f1b, float16, graphs": Case("1f1b", ONE_WAY, True, changes=CHANGES),
}


@pytest.mark.parametrize("name", CASES)
def test_host_waits_of_a_step(comm, name, capsys):  # noqa: F811
    case = CASES[name]
    few, many = (
        count_step(
            comm,
            case.schedule,
            case.memory,
            case.graphs,
            model__depth=20,
            parallel__micro_batches=number,
            **case.changes,
        )
        for number in MICRO_BATCHES
    )
    more = [
        sum(waits.values()) - sum(before.values())
        for waits, before in zip(many.waits, few.waits, strict=True)
    ]
    is_direct = DIRECT in os.environ
    if comm.rank == 0:
        with capsys.disabled():
            way = "device pointers" if is_direct else "staged"
            each = ", ".join(f"{count / (MICRO_BATCHES[1] - MICRO_BATCHES[0]):g}" for count in more)
            kinds = ", ".join(f"{kind} {n}" for kind, n in sorted(many.all_waits.items()))
            work = ", ".join(f"{n} {kind}" for kind, n in many.work.items())
            print(
                f"\nhost waits a micro-batch, {name}, {way}: ranks {each}; in a step of all ranks:"
                f" {kinds}; {work}"
            )
    assert not any(more)
    assert many.all_waits == case.waits
    if not case.graphs:
        assert many.work[GRAPHS] == 0
        return
    assert many.num_actions <= many.work[GRAPHS] <= many.num_actions + MORE_LAUNCHES
    if is_direct:  # staged, messages are cut into pieces for tests
        limit = case.operators * many.num_actions + OPERATORS_PER_STEP * NUM_RANKS
        assert many.work[OPERATORS] <= limit

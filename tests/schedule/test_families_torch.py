"""The generators beside torch.distributed.pipelining: its order, its validator and its simulator."""

from __future__ import annotations

from types import ModuleType

import pytest

from gems.schedule import generate
from gems.schedule.action import Kind
from gems.schedule.schedule import Schedule

SIZES = [(1, 2), (2, 4), (3, 6), (4, 8), (4, 12), (5, 10), (8, 16)]


def theirs(schedules: ModuleType, name: str, p: int, n: int) -> list[list[str]]:
    """Return torch's own order of compute actions, as words; overlapped pairs one after the other."""
    made = object.__new__(getattr(schedules, name))
    made.pp_group_size = p
    made.n_local_stages = 2
    made.num_stages = made._num_stages = 2 * p
    made.n_microbatches = made._n_microbatches = n
    made.number_of_rounds = max(1, n // p)
    made.microbatches_per_round = n // made.number_of_rounds
    rows = []
    for rank in range(p):
        made.rank = rank
        order = [
            action for action in made._calculate_single_rank_operations(rank) if action is not None
        ]
        rows.append([str(part) for action in order for part in action.sub_actions or (action,)])
    return rows


def ours(made: Schedule, *without: Kind) -> list[list[str]]:
    return [
        [str(action) for action in row if action.kind not in without] for row in made.rank_schedules
    ]


@pytest.mark.parametrize(("p", "n"), [*SIZES, (4, 10), (4, 3)])
def test_interleaved_1f1b_is_in_the_order_of_torch(schedules: ModuleType, p: int, n: int) -> None:
    assert ours(generate("interleaved_1f1b", p, n)) == theirs(
        schedules, "ScheduleInterleaved1F1B", p, n
    )


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_zb_v_has_the_order_of_torch_but_for_weight_gradients(
    schedules: ModuleType, p: int, n: int
) -> None:
    """F and I word for word; W has a place of its own here, where a rank would wait."""
    order = [
        [word for word in row if "W" not in word]
        for row in theirs(schedules, "ScheduleZBVZeroBubble", p, n)
    ]
    assert ours(generate("zb_v", p, n), Kind.W) == order


@pytest.mark.parametrize(("p", "n"), SIZES)
def test_dualpipe_v_is_in_the_order_of_torch(schedules: ModuleType, p: int, n: int) -> None:
    assert ours(generate("dualpipe_v", p, n)) == theirs(schedules, "ScheduleDualPipeV", p, n)

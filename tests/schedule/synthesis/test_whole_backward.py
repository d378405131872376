"""gems.schedule.synthesis.whole_backward.

Backwards are whole where that is faster, and no more is held then.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.schedule import FAMILIES
from gems.schedule.action import Kind
from gems.schedule.costs import FREE, StageCosts, uniform
from gems.schedule.ledger import peaks
from gems.schedule.registry import Request
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from gems.schedule.synthesis import find_schedule
from gems.schedule.synthesis.whole_backward import with_whole_backwards
from gems.schedule.validate import validate


class FixedCosts:
    """The same costs on every placement of as many stages."""

    def __init__(self, costs: StageCosts) -> None:
        self.costs = costs

    def of(self, placement: object) -> StageCosts:
        return self.costs


def costs_with(split: float, ranks: int = 4) -> StageCosts:
    return replace(uniform(ranks, ranks), split=(split,) * ranks)


def zb_h1(ranks: int = 4, micro_batches: int = 8) -> Schedule:
    return FAMILIES["zb_h1"].build(
        Request(num_ranks=ranks, num_micro_batches=micro_batches, num_parts=1)
    )


def kinds(schedule: Schedule) -> set[Kind]:
    return {action.kind for _, action in schedule.actions()}


def test_nothing_changes_where_a_split_backward_takes_no_longer() -> None:
    made = zb_h1()
    assert with_whole_backwards(made, costs_with(0.0), FREE, None) is made


@pytest.mark.parametrize("split", [0.1, 0.5, 2.0])
def test_the_step_is_never_longer_and_the_list_stays_valid(split: float) -> None:
    made = zb_h1()
    costs = costs_with(split)
    joined = with_whole_backwards(made, costs, FREE, None)
    assert simulate(joined, costs).span < simulate(made, costs).span
    assert max(peaks(joined, costs)) <= max(peaks(made, costs))
    validate(joined, costs)


def test_what_costs_much_apart_is_whole_everywhere_and_what_costs_little_stays_where_it_fills_a_wait() -> (
    None
):
    assert Kind.I not in kinds(with_whole_backwards(zb_h1(), costs_with(9.0), FREE, None))
    little = with_whole_backwards(zb_h1(), costs_with(0.01), FREE, None)
    assert {Kind.I, Kind.B} <= kinds(little), (
        "the first stage hands on no gradient, so its backward is whole"
    )


def test_the_search_takes_whole_backwards_and_simulates_their_own_time() -> None:
    spans = {}
    for split in (0.0, 1.0):
        costs = costs_with(split, 2)
        request = Request(
            2, 4, 1, cap=1.0, costs=FixedCosts(costs), placements=("linear",), budget_s=0.05
        )
        found = find_schedule(request)
        spans[split] = found.span
        assert found.span == pytest.approx(simulate(found.schedule, costs).span)
        assert found.efficiency <= found.bound
    assert spans[0.0] < spans[1.0]
    assert Kind.B in kinds(found.schedule)

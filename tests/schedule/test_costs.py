"""Costs of stages, cut from costs over the depth, and the time of messages."""

from __future__ import annotations

import pytest

from gems.schedule.action import Action
from gems.schedule.costs import DepthCosts, StageCosts, uniform
from gems.schedule.strips import strip_costs


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 7, 8, 49])
@pytest.mark.parametrize("chunks", [1, 2, 4])
def test_a_stage_costs_its_share_of_whole_rank_work(num_ranks: int, chunks: int) -> None:
    costs = uniform(num_ranks, num_ranks * chunks, 1.5, 2.0, 3.0)
    assert costs.num_stages == num_ranks * chunks
    assert set(costs.forward) == {1.5 / chunks} and set(costs.recompute) == {1.5 / chunks}
    assert set(costs.input_grad) == {2.0 / chunks} and set(costs.weight_grad) == {3.0 / chunks}
    assert set(costs.activation) == set(costs.held_for_weights) == {1 / chunks}
    assert set(costs.copy) == set(costs.boundary) == set(costs.boundary_bytes) == {0.0}


def test_depth_is_cut_where_the_stages_are() -> None:
    """Two ranks; the first half of the depth takes three times as long and holds four times as much as the second."""
    costs = DepthCosts(2, times=(3.0, 1.0), activations=(4.0, 1.0), copy=2.0)
    assert costs.stages(2).forward == (1.5, 0.5) and costs.stages(2).activation == (1.0, 0.25)
    assert costs.stages(4).forward == (0.75, 0.75, 0.25, 0.25)
    assert costs.stages(4).copy == (1.0, 1.0, 0.25, 0.25)
    assert costs.stages(1).forward == (2.0,) and costs.stages(1).activation == (1.25,)
    third = 2 / 3
    assert costs.stages(3).forward == pytest.approx((3 * third / 2, third, third / 2))


def test_strips_take_more_or_less_than_the_mean() -> None:
    """Two stages, two strips: compute follows the loads of its stage and strip, all else does not."""
    one = (1.0, 1.0)
    costs = StageCosts(
        one, (2.0, 2.0), one, one, copy=one, reduce=one, strip_loads=((0.5, 1.5), (0.0, 2.0))
    )
    words = ["0F0", "0F1", "0F2", "1I2", "1I3", "1B5", "0W1", "0R0", "0OFFLOAD1", "0START_REDUCE"]
    assert [costs.time(Action.parse(word)) for word in words] == [
        0.5,
        1.5,
        0.5,
        0,
        4,
        6,
        1.5,
        0.5,
        1,
        1,
    ]
    assert strip_costs(costs, 2).strip_loads == costs.strip_loads
    assert strip_costs(costs, 1).strip_loads == strip_costs(costs, 4).strip_loads == ()


def test_time_of_each_action() -> None:
    one = (1.0,)
    costs = StageCosts(
        one, (2.0,), (4.0,), one, recompute=(8.0,), copy=(16.0,), reduce=(32.0,), step=(64.0,)
    )
    words = [
        "0F0",
        "0I0",
        "0W0",
        "0B0",
        "0R0",
        "0OFFLOAD0",
        "0PREFETCH0",
        "0START_REDUCE",
        "0STEP",
        "0SEND_F0",
    ]
    assert [costs.time(Action.parse(word)) for word in words] == [1, 2, 4, 6, 8, 16, 16, 32, 64, 0]

"""The list scheduler: it ends under every keys and rules, and its rows replay as it says."""

from __future__ import annotations

from random import Random

import pytest

from gems.schedule.costs import DepthCosts, Network
from gems.schedule.placement import Placement, bidirectional, linear, v, wave
from gems.schedule.simulate import simulate
from gems.schedule.synthesis.list_scheduler import NEVER, ListScheduler, Rules
from gems.schedule.synthesis.problem import acting, least_room, problem
from gems.schedule.validate import validate

PLACEMENTS = (linear(4), bidirectional(4), v(3), wave(2, 4), wave(3, 8))


@pytest.mark.parametrize("act", [0, 1, 2, None], ids=["keep", "recompute", "offload", "mixed"])
@pytest.mark.parametrize(
    "placement", PLACEMENTS, ids=lambda p: f"{p.num_ranks}x{p.num_stages}x{p.num_directions}"
)
def test_no_keys_and_no_rules_lead_to_a_deadlock(placement: Placement, act: int | None) -> None:
    random = Random(7)
    for _ in range(8):
        costs = DepthCosts(
            placement.num_ranks, 1, 1.2, 0.8, copy=1.5, activations=(1, 0.5, 0.25)
        ).stages(placement.num_stages)
        network = Network(latency=random.choice((0.0, 0.2)))
        acts = [
            (random.randrange(3) if act is None else act) if stage < placement.num_stages - 1 else 0
            for stage in range(placement.num_stages)
        ]
        cap = 1e-9 + least_room(problem("p", placement, 6, costs, network, None), acts) / 1e12
        made = problem("p", placement, 6, costs, network, cap * random.choice((1, 1, 1.3, 2)))
        keys = [
            [random.randrange(40 * made.ticks_per_unit) for _ in range(3 * made.num_stages)]
            for _ in range(6)
        ]
        rules = Rules(
            random.choice((0, 3 * made.ticks_per_unit, NEVER)),
            random.choice((0, NEVER)),
            random.choice((0, made.ticks_per_unit)),
            random.choice((1, 3)),
        )
        listing = ListScheduler(made, keys, [acting(made, acts, rules.ahead)] * 6, rules)
        assert listing.todo == 0
        schedule = listing.schedule()
        validate(schedule, costs, made.cap / 1e12)
        played = simulate(schedule, costs, network, made.cap / 1e12)
        assert played.span <= listing.span / made.ticks_per_unit * (1 + 1e-9)
        assert max(played.peak) <= made.cap / 1e12 + 1e-9


def test_a_forward_waits_for_its_key_less_the_lead() -> None:
    made = problem("p", linear(1), 1, DepthCosts(1).stages(1), Network(), 1)
    keys = [[10, 11, 12]]
    acts = [acting(made, (0,), 1)]
    assert ListScheduler(made, keys, acts, Rules(lead=0)).span == 13
    assert ListScheduler(made, keys, acts, Rules(lead=4)).span == 9
    assert ListScheduler(made, keys, acts, Rules()).span == 3


def test_a_late_weight_gradient_gives_way_and_an_early_one_does_not() -> None:
    made = problem("p", linear(1), 2, DepthCosts(1).stages(1), Network(), 2)
    keys = [[0, 1, 2], [3, 4, 5]]
    acts = [acting(made, (0,), 1)] * 2

    def order(defer: int) -> list[str]:
        return [
            str(action)
            for action in ListScheduler(made, keys, acts, Rules(defer=defer))
            .schedule()
            .rank_schedules[0]
        ]

    assert order(0) == ["0F0", "0I0", "0W0", "0F1", "0I1", "0W1"]
    assert order(10) == ["0F0", "0I0", "0F1", "0I1", "0W0", "0W1"]

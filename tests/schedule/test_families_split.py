"""Where split backwards put their weight gradients, and what that is worth with unequal times."""

from __future__ import annotations

from itertools import product

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems.schedule import generate
from gems.schedule.action import Action, Kind, forward, input_gradient, weight_gradient
from gems.schedule.costs import DepthCosts, StageCosts, uniform
from gems.schedule.families.weight_gradients import place_weight_gradients
from gems.schedule.families.zero_bubble import zb_h1, zb_h2
from gems.schedule.placement import linear
from gems.schedule.registry import Request
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from gems.schedule.validate import validate
from tests.helpers.drawings import lines, text_of

SPLIT = ["zb_h1", "zb_h2", "zb_v", "v_half", "v_min"]


def without_weights(made: Schedule) -> list[list[Action]]:
    return [[action for action in row if action.kind is not Kind.W] for row in made.rank_schedules]


def handcrafted(p: int, n: int, warmup: int) -> Schedule:
    """ZB-H1 (warmup 1) and ZB-H2 (2) as drawn in the paper.

    Rank s puts W off by `warmup` s micro-batches.
    """
    rows = []
    for stage in range(p):
        ahead = min(n, warmup * (p - 1 - stage))
        late = min(n, warmup * stage)
        row = [forward(stage, m) for m in range(ahead)]
        for m in range(n):
            row += [forward(stage, ahead + m)] if ahead + m < n else []
            row += [input_gradient(stage, m)]
            row += [weight_gradient(stage, m - late)] if m >= late else []
        rows.append(tuple(row + [weight_gradient(stage, m) for m in range(n - late, n)]))
    return validate(Schedule("handcrafted", n, linear(p), tuple(rows)))


@pytest.mark.parametrize("p", [1, 2, 3, 4, 8])
def test_zb_h1_is_the_handcrafted_schedule(p: int) -> None:
    for n in (p, 2 * p, 2 * p + 3):
        assert zb_h1(Request(p, n)).rank_schedules == handcrafted(p, n, 1).rank_schedules


@settings(deadline=None, max_examples=40)
@given(
    st.integers(1, 8),
    st.integers(1, 20),
    st.sampled_from((1, 2)),
    st.sampled_from([(1, 1, 1), (1, 1.2, 0.8), (1, 2, 1), (2, 1, 1), (1, 1, 2), (1, 0.7, 1.5)]),
)
def test_never_slower_than_the_handcrafted_schedule(
    p: int, n: int, warmup: int, cost: tuple[float, float, float]
) -> None:
    costs = uniform(p, p, *cost)
    made = (zb_h1 if warmup == 1 else zb_h2)(Request(p, n, costs=DepthCosts(p, *cost)))
    assert simulate(made, costs).span <= simulate(handcrafted(p, n, warmup), costs).span + 1e-9


@pytest.mark.parametrize("name", SPLIT)
def test_the_order_of_forwards_and_input_gradients_does_not_follow_the_times(name: str) -> None:
    for p, n in product((1, 2, 5), (1, 4, 11)):
        plain = without_weights(generate(name, p, n))
        for cost in ((1, 1, 3), (1, 2, 0.5), (3, 1, 1)):
            assert without_weights(generate(name, p, n, costs=DepthCosts(p, *cost))) == plain


def test_times_of_the_stages_are_looked_at() -> None:
    """A schedule made for its costs is never slower than one made for equal times, and may be several % faster."""
    gains = []
    for name, p, n, w in product(SPLIT, (3, 4), (7, 12), (0.4, 2.0)):
        costs = DepthCosts(p, 1, 1.5, w, times=(1.0, 1.5, 0.5))
        blind = generate(name, p, n)
        seeing = generate(name, p, n, costs=costs)
        stages = costs.stages(blind.num_stages)
        gains.append(simulate(blind, stages).span / simulate(seeing, stages).span)
    assert max(gains) > 1.01
    assert min(gains) >= 1.0


def test_no_weight_gradient_time_keeps_the_memory() -> None:
    for name, peak in zip(SPLIT, (4, 7, 4, 3, 2), strict=True):
        costs = DepthCosts(4, 1, 1, 0)
        made = generate(name, 4, 12, costs=costs)
        validate(made, costs.stages(made.num_stages), cap=peak)


ORDER = Schedule(
    "two",
    3,
    linear(2),
    (
        (
            forward(0, 0),
            forward(0, 1),
            input_gradient(0, 0),
            forward(0, 2),
            input_gradient(0, 1),
            input_gradient(0, 2),
        ),
        (
            forward(1, 0),
            input_gradient(1, 0),
            forward(1, 1),
            input_gradient(1, 1),
            forward(1, 2),
            input_gradient(1, 2),
        ),
    ),
)


@pytest.mark.parametrize(
    ("weight", "most_held", "rows"),
    [
        (
            1.0,
            9,
            """
            0F0 0F1 0I0 0F2 0I1 0W0 0I2 0W1 0W2
            1F0 1I0 1F1 1I1 1F2 1I2 1W0 1W1 1W2
        """,
        ),
        (
            1.0,
            2,
            """
            0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
            1F0 1I0 1F1 1I1 1W0 1F2 1I2 1W1 1W2
        """,
        ),
        (
            1.0,
            1,
            """
            0F0 0F1 0I0 0W0 0F2 0I1 0W1 0I2 0W2
            1F0 1I0 1W0 1F1 1I1 1W1 1F2 1I2 1W2
        """,
        ),
    ],
)
def test_weight_gradients_fill_waits_and_make_room(
    weight: float, most_held: int, rows: str
) -> None:
    """By hand; where the order itself holds more than is allowed (rank 0 with 1), it goes on all the same."""
    each = (1.0, 1.0)
    costs = StageCosts(each, each, (weight, weight), each)
    made = place_weight_gradients(ORDER, costs, most_held)
    assert text_of(made) == lines(rows)
    validate(made)

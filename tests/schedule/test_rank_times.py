"""gems.schedule.simulate: the parts of a step's time on each rank, by hand and in sum."""

from __future__ import annotations

import pytest

from gems.errors import ConfigError
from gems.schedule import generate, published
from gems.schedule.costs import Network, StageCosts
from gems.schedule.lower import lower
from gems.schedule.placement import linear
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import RankTime, rank_times, simulate
from tests.helpers.drawings import with_rows


def costs_of(num_stages: int, **more: tuple[float, ...]) -> StageCosts:
    one = (1.0,) * num_stages
    return StageCosts(one, one, one, one, **more)


def test_a_hop_is_exposed_where_nothing_else_is_done() -> None:
    """gpipe, P = 2, N = 1, link 3.

    Rank 1 waits 1 for F and 3 for the link, rank 0 waits 3 + 3 + 3 in between.
    """
    for schedule in (generate("gpipe", 2, 1), lower(generate("gpipe", 2, 1))):
        costs = costs_of(2)
        network = Network(latency=3.0)
        played = simulate(schedule, costs, network)
        assert played.span == 12.0
        first, last = rank_times(schedule, costs, played, network)
        assert first == RankTime(useful=3, recompute=0, link=3, reduce=0, step=0, idle=6)
        assert last == RankTime(useful=3, recompute=0, link=3, reduce=0, step=0, idle=6)


def test_a_hop_behind_compute_is_not_exposed() -> None:
    """gpipe, P = 2, N = 4, link 1: rank 1's second message comes while it computes the first.

    One hop is exposed.
    """
    schedule = lower(generate("gpipe", 2, 4))
    costs = costs_of(2)
    network = Network(latency=1.0)
    played = simulate(schedule, costs, network)
    first, last = rank_times(schedule, costs, played, network)
    assert (last.link, last.useful) == (1.0, 12.0)
    assert (first.link, first.useful) == (1.0, 12.0)


def test_reduction_with_its_waiting_and_the_step() -> None:
    schedule = lower(generate("gems_mast", 2, 2))
    costs = costs_of(2, reduce=(5.0, 0.0), step=(2.0, 2.0))
    played = simulate(schedule, costs)
    times = rank_times(schedule, costs, played)
    assert [time.step for time in times] == [2.0, 2.0]
    assert min(time.reduce for time in times) == 5.0 < max(time.reduce for time in times)


def test_recomputation_and_waiting_for_a_copy() -> None:
    """The copy back ends at 7, three after R: three idle units, none of them a link's."""
    schedule = with_rows(
        Schedule("one", 2, linear(1), ((),)), ["0F0 0OFFLOAD0 0F1 0PREFETCH0 0R1 0B1 0B0"]
    )
    costs = costs_of(1, copy=(4.0,), recompute=(0.5,))
    played = simulate(schedule, costs)
    assert rank_times(schedule, costs, played) == (
        RankTime(useful=6, recompute=0.5, link=0, reduce=0, step=0, idle=4.5),
    )


@pytest.mark.parametrize("name", published())
@pytest.mark.parametrize("link", [0.0, 0.5])
def test_the_parts_add_up_and_none_is_negative(name: str, link: float) -> None:
    try:
        made = generate(name, 4, 8, 4)
    except ConfigError:
        pytest.skip("a family that asks for more")
    network = Network(latency=link)
    for schedule in (made, lower(made)):
        costs = costs_of(made.num_stages, reduce=(1.0,) * made.num_stages)
        played = simulate(schedule, costs, network)
        for time, busy in zip(
            rank_times(schedule, costs, played, network), played.busy, strict=True
        ):
            parts = (time.useful, time.recompute, time.link, time.reduce, time.step, time.idle)
            assert min(parts) > -1e-9 and sum(parts) == pytest.approx(played.span)
            assert time.useful == pytest.approx(busy)
            assert (time.link > 0) <= (link > 0)

"""gems.schedule.memory: what each rank holds over time, by category."""

from __future__ import annotations

import pytest

from gems.errors import ConfigError
from gems.schedule import generate, published
from gems.schedule.costs import Network, StageCosts
from gems.schedule.ledger import peaks
from gems.schedule.lower import lower
from gems.schedule.memory import Held, memory_over_time
from gems.schedule.placement import linear
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from tests.helpers.drawings import with_rows


def costs_of(num_stages: int, boundary_bytes: float = 0.0, **more: tuple[float, ...]) -> StageCosts:
    one = (1.0,) * num_stages
    return StageCosts(one, one, one, one, boundary_bytes=(boundary_bytes,) * num_stages, **more)


def test_activations_come_at_the_forward_and_go_with_the_backward() -> None:
    schedule = generate("gpipe", 1, 2)
    costs = costs_of(1)
    (rank,) = memory_over_time(
        schedule, costs, simulate(schedule, costs), activation_bytes=10, param_bytes=7
    )
    assert rank.held == (Held(0, 10, 0, 0), Held(1, 20, 0, 0), Held(4, 10, 0, 0), Held(6, 0, 0, 0))
    assert (rank.parameters, rank.peak) == (7, 27)
    assert [rank.at(time).activations for time in (0, 0.5, 1, 3.9, 4, 5, 6, 9)] == [
        10,
        10,
        20,
        20,
        10,
        10,
        0,
        0,
    ]
    assert rank.at(-1).device == 0


def test_buffers_of_messages() -> None:
    """Link 2, 100 bytes: sent at 1 and there at 3.

    The receive's buffer is held from 0 to the end of F at 4.
    """
    schedule = lower(generate("gpipe", 2, 1))
    costs = costs_of(2, 100.0)
    played = simulate(schedule, costs, Network(latency=2.0))
    first, last = memory_over_time(schedule, costs, played)
    assert [(held.time, held.boundaries) for held in first.held] == [
        (0, 100),
        (1, 200),
        (3, 100),
        (10, 0),
    ]
    assert [(held.time, held.boundaries) for held in last.held] == [
        (0, 100),
        (3, 100),
        (4, 0),
        (6, 100),
        (8, 0),
    ]
    assert first.peak == 201


def test_copies_in_host_memory() -> None:
    """Out from 1 to 4, back from 5 to 8, when the copy in host memory is given up."""
    schedule = with_rows(Schedule("one", 1, linear(1), ((),)), ["0F0 0OFFLOAD0 0PREFETCH0 0B0"])
    costs = costs_of(1, copy=(3.0,))
    (rank,) = memory_over_time(schedule, costs, simulate(schedule, costs), activation_bytes=2)
    assert rank.held == (Held(0, 2, 0, 0), Held(4, 2, 0, 2), Held(7, 2, 0, 0), Held(9, 0, 0, 0))


def test_recomputation_and_the_two_halves() -> None:
    schedule = with_rows(Schedule("one", 1, linear(1), ((),)), ["0F0 0R0 0I0 0W0"])
    costs = costs_of(1, boundary=(0.25,), held_for_weights=(0.5,))
    (rank,) = memory_over_time(schedule, costs, simulate(schedule, costs))
    assert [(held.time, held.activations) for held in rank.held] == [
        (0, 0.25),
        (1, 1),
        (3, 0.5),
        (4, 0),
    ]


@pytest.mark.parametrize("name", published())
@pytest.mark.parametrize("num_ranks", [1, 2, 4])
def test_all_is_let_go_and_the_peak_is_the_ledgers(name: str, num_ranks: int) -> None:
    try:
        made = generate(name, num_ranks, 4 * num_ranks, num_ranks)
    except ConfigError:
        pytest.skip("a family that asks for more")
    schedule = lower(made)
    sizes = tuple(1.0 + stage % 3 / 3 for stage in range(made.num_stages))
    one = (1.0,) * made.num_stages
    costs = StageCosts(one, one, one, sizes, boundary_bytes=(5.0,) * made.num_stages)
    played = simulate(schedule, costs, Network(latency=0.25))
    found = memory_over_time(schedule, costs, played)
    for rank, peak, by_order in zip(found, played.peak, peaks(schedule, costs), strict=True):
        assert (
            max(held.activations for held in rank.held)
            == pytest.approx(peak)
            == pytest.approx(by_order)
        )
        assert rank.held[-1].device == pytest.approx(0, abs=1e-9)
        assert min(min(held.activations, held.boundaries) for held in rank.held) > -1e-9
        assert [held.time for held in rank.held] == sorted({held.time for held in rank.held})


def test_parameters_of_both_directions() -> None:
    schedule = generate("gems_mast", 2, 2)
    costs = costs_of(2)
    found = memory_over_time(schedule, costs, simulate(schedule, costs), param_bytes=3)
    assert [rank.parameters for rank in found] == [6, 6]

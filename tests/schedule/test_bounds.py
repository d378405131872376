"""gems.schedule.bounds: the closed forms, held against the replay of what the generators build."""

from __future__ import annotations

import pytest

from gems.schedule import FAMILIES, generate
from gems.schedule.bounds import bubble, step_units
from gems.schedule.replay import replay, uniform_cost

RANKS = range(1, 17)
COSTS = [(1, 1), (1, 2), (1, 3), (2, 3), (3, 4)]
ONE_WAY = [name for name, family in FAMILIES.items() if family.num_directions == 1]


def span(name: str, p: int, n: int, f: float, b: float, parts: int = 1) -> float:
    return replay(generate(name, p, n, parts), uniform_cost(f, b)).span


@pytest.mark.parametrize("p", RANKS)
@pytest.mark.parametrize("name", ONE_WAY)
def test_one_way_families(name: str, p: int) -> None:
    for n in (1, 2, 3, 5, 8, 17):
        for f, b in COSTS:
            expected = n * p * (f + b) if name == "layer_parallel" else (n + p - 1) * (f + b)
            assert step_units(name, p, n, f, b) == expected
            assert span(name, p, n, f, b) == pytest.approx(expected)


@pytest.mark.parametrize("p", RANKS)
def test_gems_master_with_one_part(p: int) -> None:
    for n in (2, 4, 8, 14):
        for f, b in COSTS:
            expected = p * f + n * p * b + (n - 1) * f
            assert step_units("gems_master", p, n, f, b) == expected
            assert span("gems_master", p, n, f, b) == pytest.approx(expected)


@pytest.mark.parametrize("parts", [2, 3, 4, 7])
@pytest.mark.parametrize("p", RANKS)
def test_gems_master_with_parts(p: int, parts: int) -> None:
    for runs in (2, 4, 6):
        for f, b in COSTS:
            expected = (p - 1 + parts) * (f + runs * b) + (runs - 1) * parts * f
            assert step_units("gems_master", p, runs * parts, f, b, parts) == expected
            assert span("gems_master", p, runs * parts, f, b, parts) == pytest.approx(expected)


@pytest.mark.parametrize("p", [1, 2, 5, 8])
def test_gems_mast_is_master_with_two_runs(p: int) -> None:
    for parts in (1, 2, 5):
        assert step_units("gems_mast", p, 2 * parts, 1, 2, parts) == span(
            "gems_master", p, 2 * parts, 1, 2, parts
        )
        assert step_units("gems_mast", p, 2 * parts, 1, 2, parts) == span(
            "gems_mast", p, 2 * parts, 1, 2, parts
        )


def test_no_closed_form_is_said_so() -> None:
    assert step_units("gems_master", 4, 8, 2, 1) is None  # the form needs b >= f
    assert step_units("unknown", 4, 8, 1, 2) is None
    assert bubble("unknown", 4, 8, 1, 2) is None
    assert bubble("gems_master", 4, 8, 2, 1) is None


def test_the_closed_form_of_gems_ends_at_b_below_f() -> None:
    """Outside of its range the formula is really wrong, so None is the right answer there."""
    p, n, f, b = 4, 8, 2, 1
    assert span("gems_master", p, n, f, b) > p * f + n * p * b + (n - 1) * f


@pytest.mark.parametrize(
    ("name", "units", "peaks"),
    [("gems_master", 551, {1}), ("layer_parallel", 768, {1}), ("1f1b", 117, set(range(1, 9)))],
)
def test_published_figures_at_8_ranks_and_32_micro_batches(name: str, units: int, peaks: set[int]) -> None:
    played = replay(generate(name, 8, 32), uniform_cost(1, 2))
    assert step_units(name, 8, 32, 1, 2) == played.span == units
    assert set(played.peak_units) == peaks
    assert bubble(name, 8, 32, 1, 2) == pytest.approx(1 - 32 * 3 / units)
    assert bubble(name, 8, 32, 1, 2) == pytest.approx(1 - played.efficiency)


def test_bubble_of_gems_tends_to_its_published_limit() -> None:
    """With b = 2f and many runs the bubble is (P - 1)/(P + 1/2)."""
    found = bubble("gems_master", 8, 100_000, 1, 2)
    assert found == pytest.approx(7 / 8.5, abs=1e-4)

"""gems.schedule.families.published_schedules: all published schedules that serve a request."""

from __future__ import annotations

from itertools import product

import pytest

from gems.errors import ConfigError
from gems.schedule import FAMILIES, generate, published
from gems.schedule.costs import DepthCosts
from gems.schedule.families.interleaved import RIVAL_CHUNKS as CHUNKS
from gems.schedule.families.published_schedules import LARGE, published_schedules
from gems.schedule.ledger import TOLERANCE
from gems.schedule.registry import Request
from gems.schedule.simulate import simulate
from gems.schedule.validate import validate

DEPTHS: list[tuple[float, ...]] = [(1.0,), (8.0, 4.0, 2.0, 1.0), (1.0, 3.0)]


@pytest.mark.parametrize("activations", DEPTHS)
@pytest.mark.parametrize("cap", [0.4, 1.0, 1.5, 2.0, 4.0, 9.0])
def test_all_keep_the_cap(cap: float, activations: tuple[float, ...]) -> None:
    for p, n in ((1, 2), (3, 6), (4, 8), (5, 7)):
        request = Request(p, n, cap=cap, costs=DepthCosts(p, activations=activations))
        for made in published_schedules(request):
            assert made.num_micro_batches == n
            validate(made, request.costs.stages(made.num_stages), cap)


@pytest.mark.parametrize("activations", DEPTHS)
@pytest.mark.parametrize(("p", "n"), [(2, 4), (4, 8), (3, 7)])
def test_none_that_keeps_the_cap_is_left_out(
    p: int, n: int, activations: tuple[float, ...]
) -> None:
    costs = DepthCosts(p, activations=activations)
    for cap in (1.0, 2.0, 5.5, 12.0):
        found = {
            (made.name, made.rank_schedules)
            for made in published_schedules(Request(p, n, cap=cap, costs=costs))
        }
        for name, parts, chunks in product(published(), range(1, n // 2 + 1), CHUNKS):
            family = FAMILIES[name]
            if (parts > 1 and not family.has_runs) or (
                chunks > 2 and family.stages_per_rank is not None
            ):
                continue
            if family.has_runs and (n % (2 * parts) or (name == "gems_mast" and n != 2 * parts)):
                continue
            try:
                made = generate(name, p, n, parts, chunks=chunks, cap=cap, costs=costs)
            except ConfigError:
                continue
            peak = max(simulate(made, costs.stages(made.num_stages)).peak)
            keeps_cap = peak <= cap + TOLERANCE
            if name != "1f1b":
                assert ((name, made.rank_schedules) in found) == keeps_cap, (
                    name,
                    cap,
                    parts,
                    chunks,
                    peak,
                )
            elif keeps_cap:
                ours = [rows for other, rows in found if other == "1f1b"]
                assert len(ours) == 1
                spans = [
                    simulate(schedule, costs.stages(p)).span
                    for schedule in (generate("1f1b", p, n, cap=cap), made)
                ]
                assert spans[0] <= spans[1]


def test_without_a_cap_every_family_is_there() -> None:
    assert {made.name for made in published_schedules(Request(4, 8, costs=DepthCosts(4)))} == set(
        published()
    )
    odd = {made.name for made in published_schedules(Request(4, 9, costs=DepthCosts(4)))}
    assert odd == {name for name in published() if FAMILIES[name].num_directions == 1}


def test_1f1b_comes_with_the_most_in_flight_that_the_cap_allows() -> None:
    """Activations that grow with depth.

    The first ranks, which hold most micro-batches, have the smallest.
    """
    costs = DepthCosts(4, activations=(1.0, 1.0, 1.0, 4.0))
    (made,) = (
        made
        for made in published_schedules(Request(4, 8, cap=1.0, costs=costs))
        if made.name == "1f1b"
    )
    assert made.rank_schedules == generate("1f1b", 4, 8).rank_schedules
    assert max(simulate(made, costs.stages(4)).peak) == 1.0


def test_placements_that_are_asked_for() -> None:
    for placement, names in (
        ("v", {"zb_v", "v_half", "v_min", "v_adaptive", "dualpipe_v"}),
        ("bidirectional", {"chimera", "gems_mast", "gems_master", "gems_zb"}),
        ("linear", {"layer_parallel", "gpipe", "1f1b", "zb_h1", "zb_h2"}),
        ("wave", set()),
    ):
        request = Request(4, 8, costs=DepthCosts(4), placements=(placement,))
        assert {made.name for made in published_schedules(request)} == names


def test_of_many_only_the_best_of_like_schedules_are_built() -> None:
    p = 32
    n = 128
    cap = 17.0
    assert p * n >= LARGE
    costs = DepthCosts(p)
    found = {made.name: made for made in published_schedules(Request(p, n, cap=cap, costs=costs))}
    assert list(found) == ["1f1b", "group_interleaved", "v_half", "gems_master", "gems_zb"]
    for kept, left_out, parts in (
        ("1f1b", "layer_parallel", 1),
        ("v_half", "v_min", 1),
        ("gems_master", "gems_master", 4),
    ):
        made = generate(left_out, p, n, parts, costs=costs)
        spans = [
            simulate(schedule, costs.stages(schedule.num_stages)).span
            for schedule in (found[kept], made)
        ]
        assert spans[0] < spans[1]


def test_of_many_only_what_keeps_the_cap_is_built() -> None:
    found = published_schedules(Request(64, 64, cap=1.0, costs=DepthCosts(64)))
    assert [made.name for made in found] == ["layer_parallel", "gems_zb", "gems_master"]


def test_none_has_more_stages_than_the_request_allows() -> None:
    every = published_schedules(Request(4, 8, costs=DepthCosts(4)))
    assert {schedule.num_stages for schedule in every} == {4, 8, 12, 16, 24, 32}
    few = published_schedules(Request(4, 8, costs=DepthCosts(4), max_stages=8))
    assert few == [schedule for schedule in every if schedule.num_stages <= 8]

"""gems.schedule.synthesis.strip_scheduler.

Steps of strips that were found under a cap, and their bound.
"""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from gems.errors import ConfigError
from gems.schedule.costs import DepthCosts, Network
from gems.schedule.families.published_schedules import published_schedules
from gems.schedule.placement import Placement, bidirectional, linear, v, wave
from gems.schedule.registry import Request
from gems.schedule.simulate import simulate
from gems.schedule.strips import StripCosts
from gems.schedule.synthesis import FoundSchedule, find_schedule
from gems.schedule.synthesis.problem import problem
from gems.schedule.synthesis.strip_scheduler import (
    DEPTH_FIRST,
    QUEUES,
    StripScheduler,
    any_strips_span_bound,
    least_strip_room,
    strip_schedules,
    strips_span_bound,
)
from gems.schedule.synthesis.templates import Budget
from gems.schedule.validate import validate


def found_in(
    num_strips: int, cap: float, num_ranks: int = 8, num: int = 8, **more: object
) -> FoundSchedule:
    request = Request(
        num_ranks, num, cap=cap, costs=DepthCosts(num_ranks), num_strips=num_strips, **more
    )  # type: ignore[arg-type]
    return find_schedule(request, published_schedules(request))


def test_strips_reach_at_the_memory_of_gems_what_whole_micro_batches_cannot() -> None:
    whole = found_in(1, 1.0, budget_s=0.1)
    strips = found_in(8, 1.0)
    assert whole.bound < 0.5 and strips.efficiency > 0.75
    assert max(strips.peak) <= 1.0 + 1e-9


@pytest.mark.parametrize(
    ("num_strips", "cap", "least"), [(32, 1.0, 0.88), (16, 1.0, 0.78), (16, 1.5, 0.98)]
)
def test_efficiency_by_strips_and_cap(num_strips: int, cap: float, least: float) -> None:
    found = found_in(num_strips, cap, placements=("v",))
    assert least <= found.efficiency <= found.bound + 1e-9
    assert found.schedule.num_strips == num_strips


def test_on_a_line_at_cap_one_the_bound_is_met() -> None:
    found = found_in(8, 1.0, placements=("linear",))
    assert found.gap == pytest.approx(0.0, abs=1e-6)
    assert found.span == pytest.approx(8 * (3 + 2 * 7 / 8)), (
        "a rank idles while the last strip is away"
    )


@pytest.mark.parametrize("seed", range(12))
def test_lists_of_any_costs_are_valid_keep_the_cap_and_stay_below_the_bound(seed: int) -> None:
    random = Random(seed)
    num_ranks = random.randint(1, 5)
    num = random.randint(1, 5)
    strips = random.randint(2, 7)
    times, sizes = (tuple(random.uniform(0.5, 3.0) for _ in range(4)) for _ in range(2))
    costs = DepthCosts(
        num_ranks, *(random.uniform(0.3, 2.0) for _ in range(3)), times=times, activations=sizes
    )
    network = Network(latency=random.choice((0.0, 0.05)))
    request = Request(
        num_ranks,
        num,
        cap=random.uniform(1.3, 3.0),
        costs=costs,
        network=network,
        num_strips=strips,
    )
    found = find_schedule(request, published_schedules(request))
    validate(found.schedule, StripCosts(costs, strips).of(found.schedule.placement), request.cap)
    assert found.efficiency <= found.bound + 1e-9


@pytest.mark.parametrize("seed", range(6))
def test_no_number_of_strips_is_faster_than_the_bound_over_all_of_them(seed: int) -> None:
    random = Random(seed)
    num_ranks = random.randint(2, 4)
    num = random.randint(1, 3)
    link = random.choice((0.0, 0.3))
    times, sizes = (tuple(random.uniform(0.5, 3.0) for _ in range(4)) for _ in range(2))
    costs = DepthCosts(
        num_ranks,
        *(random.uniform(0.3, 2.0) for _ in range(3)),
        boundary_bytes=random.choice((0.0, 1.0)),
        times=times,
        activations=sizes,
    )
    latency = random.choice((0.0, 0.02, 0.2))
    cap = random.uniform(1.3, 3.0)
    spans = []
    bounds = []
    over_all = []
    for strips in (1, 2, 3, random.randint(4, 8), random.randint(9, 14)):
        request = Request(
            num_ranks,
            num,
            cap=cap,
            costs=costs,
            network=Network(latency + link / strips, 0.05),
            num_strips=strips,
            shared_latency=link / strips,
            budget_s=0.02,
        )
        found = find_schedule(request, published_schedules(request))
        work = found.efficiency * found.span
        spans.append(found.span)
        bounds.append(work / found.bound)
        over_all.append(work / found.bound_any_strips)
    assert min(spans) >= max(over_all) * (1 - 1e-9)
    assert all(bound >= least * (1 - 1e-9) for bound, least in zip(bounds, over_all, strict=True))


@pytest.mark.parametrize(
    ("placement", "least"),
    [(linear(4), 3 * 0.25 + 3), (v(4), 2 * (6 * 0.25 + 1))],
    ids=["linear", "v"],
)
def test_the_bound_over_all_numbers_is_met_by_one_micro_batch_in_many_strips(
    placement: Placement, least: float
) -> None:
    """The way to the last rank and its work, or the hops of all stages and a rank's forward, and so back."""
    network = Network(latency=0.25)
    strips = 512
    costs = StripCosts(DepthCosts(4), strips).of(placement)
    bound = any_strips_span_bound(costs, placement, [strips], strips, None, network)
    assert bound == pytest.approx(least)
    run = StripScheduler(
        problem("made up", placement, strips, costs, network, None), strips, DEPTH_FIRST[0]
    )
    assert bound <= simulate(run.schedule(), costs, network).span <= 1.6 * bound


def test_under_a_cap_of_one_a_rank_waits_for_the_messages_of_each_micro_batch_in_any_strips() -> (
    None
):
    costs = StripCosts(DepthCosts(4), 8).of(linear(4))
    network = Network(latency=0.1)
    free, capped_at_one = (
        any_strips_span_bound(costs, linear(4), [5 * 8], 8, cap, network) for cap in (None, 1.0)
    )
    assert free == pytest.approx(5 * 3 + 3 * 0.1) and capped_at_one == pytest.approx(
        5 * (3 + 6 * 0.1)
    )


@pytest.mark.parametrize("placement", [linear(3), v(3), wave(3, 4), bidirectional(3)], ids=str)
@pytest.mark.parametrize(
    "rule", (*QUEUES, *DEPTH_FIRST), ids=lambda rule: "".join(map(str, (*rule[0], *rule[1])))
)
def test_the_span_is_that_of_the_simulation_at_the_least_cap(
    placement: object, rule: tuple[object, ...]
) -> None:
    costs = StripCosts(DepthCosts(3, 1.0, 1.5, 0.5, activations=(2.0, 1.0, 1.0)), 4).of(placement)  # type: ignore[arg-type]
    loose = problem("made up", placement, 16, costs, Network(), None)  # type: ignore[arg-type]
    cap = least_strip_room(loose, 4) / 1e12
    one = problem("made up", placement, 16, costs, Network(), cap)  # type: ignore[arg-type]
    run = StripScheduler(one, 4, rule)  # type: ignore[arg-type]
    schedule = validate(run.schedule(), costs, cap)
    assert run.span / one.ticks_per_unit == pytest.approx(simulate(schedule, costs).span)


def test_a_small_budget_still_finds_one() -> None:
    costs = StripCosts(DepthCosts(2), 4).of(linear(2))
    one = problem("made up", linear(2), 8, costs, Network(), 1.0)
    for steps, count in ((0, 1), (10**6, len(QUEUES) + len(DEPTH_FIRST))):
        tried, runs = strip_schedules([one], 4, Budget(steps), 3, inf, [0.0])
        assert tried == count and len(runs) == min(3, count)


def test_runs_that_cannot_be_the_best_change_nothing_but_the_time() -> None:
    """Neither a limit of time nor bounds of placements lose the shortest step.

    A limit that none keeps leaves none.
    """
    problems = []
    bounds = []
    for placement in (linear(3), v(3), wave(3, 4), bidirectional(3)):
        costs = StripCosts(DepthCosts(3, 1.0, 1.3, 0.7), 4).of(placement)
        problems.append(problem(str(placement.num_stages), placement, 16, costs, Network(), 1.2))
        bounds.append(strips_span_bound(costs, placement, problems[-1].counts, 4, 1.2, Network()))
    rules = (*QUEUES, *DEPTH_FIRST)
    spans = [
        StripScheduler(one, 4, rule).span / one.ticks_per_unit for one in problems for rule in rules
    ]
    for best in (1, 3):
        _, runs = strip_schedules(problems, 4, Budget(10**7), best, inf, bounds)
        assert runs[0].span / runs[0].problem.ticks_per_unit == min(spans)
    assert strip_schedules(problems, 4, Budget(10**7), 1, min(spans), bounds)[1] == []


@pytest.mark.parametrize(
    ("num_ranks", "num_strips", "ratio"),
    [(8, 8, (1, 1, 1)), (4, 8, (1, 1.5, 0.5)), (3, 4, (1, 1, 1))],
)
def test_at_cap_one_only_the_turn_of_each_image_is_lost(
    num_ranks: int, num_strips: int, ratio: tuple[float, float, float]
) -> None:
    """The rank farthest from the last stage waits for its last strip once an image, and no wait is longer."""
    request = Request(
        num_ranks, 5, cap=1.0, costs=DepthCosts(num_ranks, *ratio), num_strips=num_strips
    )
    found = find_schedule(request, published_schedules(request))
    assert found.placement == "wave" and max(found.schedule.placement.ranks[0]) == num_ranks - 1
    forward, input_grad, _ = (each / num_strips / 8 for each in ratio)
    turn = (num_ranks - 1) * (forward + input_grad)
    assert found.span == pytest.approx(
        5 * (sum(ratio) + turn) + (num_ranks - 1) * forward, rel=2e-2
    )
    assert found.efficiency <= found.bound + 1e-9


def test_a_cap_below_one_micro_batch_is_refused_for_all_its_strips_are_held_at_the_turn() -> None:
    with pytest.raises(ConfigError, match=r"activation_cap=0.9: must be at least 1,"):
        found_in(4, 0.9)
    with pytest.raises(ConfigError, match=r"must be empty with parallel\.strips above 1"):
        found_in(4, 1.0, allow=("recompute",))

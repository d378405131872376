"""Noise of compute: the moments of the draws, and the slowest replica's distribution against numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gems.memory.case import PlanOutcome
from gems.memory.plan import MemoryPlan
from gems.schedule import Schedule, generate
from gems.schedule.action import Action, Kind
from gems.schedule.costs import FREE, StageCosts, uniform
from gems.schedule.lower import lower
from gems.schedule.simulate import EVEN, Pace, simulate
from gems.simulation.jitter import (
    median_step,
    noisy_steps,
    simulate_arrivals,
    slowdowns,
    span_interval,
)


def outcome(schedule: Schedule, num_replicas: int, costs: StageCosts | None = None) -> PlanOutcome:
    costs = costs or uniform(schedule.num_ranks, schedule.num_stages)
    plan = MemoryPlan.keeping(())
    return PlanOutcome(plan, schedule, costs, FREE, paces=(EVEN,) * num_replicas)


def test_draws_have_their_moments() -> None:
    drawn = slowdowns(4, 0.05, 64, np.random.default_rng(0))
    assert drawn.mean(axis=0) == pytest.approx(np.ones(4))
    assert np.cov(drawn.T, bias=True) == pytest.approx(0.0025 * np.eye(4), abs=1e-12)
    assert slowdowns(2, 5.0, 64, np.random.default_rng(0)).min() == 0.1


@pytest.mark.parametrize("num_replicas", [1, 8, 256])
def test_the_slowest_of_many_is_as_slow_as_the_largest_of_many_normals(num_replicas: int) -> None:
    """A pipeline of one rank takes 12 x (1 + noise z).

    The step is that of the largest z of all replicas.
    """
    made = outcome(lower(generate("1f1b", 1, 4)), num_replicas)
    noise = 0.02
    drawn = [step.span for step in noisy_steps(made, noise, 0, 400)]
    largest = np.random.default_rng(1).standard_normal((4000, num_replicas)).max(axis=1)
    error = noise * 12 * largest.std() / np.sqrt(400)
    assert np.mean(drawn) == pytest.approx(12 * (1 + noise * largest.mean()), abs=4 * error)
    assert np.std(drawn) == pytest.approx(12 * noise * largest.std(), rel=0.2)


def test_one_simulated_replica_stands_for_all() -> None:
    """GEMS on 4 ranks and 16 replicas.

    Drawn steps against all 16 replicas simulated, one after another.
    """
    made = lower(generate("gems_master", 4, 4))
    noise = 0.03
    num = 60
    costs = replace(uniform(4, 4), reduce=(2.0, 2.0, 0.0, 0.0))
    rng = np.random.default_rng(7)
    plain = replace(costs, reduce=(0.0,) * 4)
    spans = []
    for _ in range(num):
        each = [
            simulate(made, plain, pace=Pace(slowdowns=tuple(rng.normal(1.0, noise, 4))))
            for _ in range(16)
        ]
        spans.append(max(played.span for played in each) + 2.0)  # the outer pair is final last
    drawn = [step.span for step in noisy_steps(outcome(made, 16, costs), noise, 0)]
    assert np.mean(drawn) == pytest.approx(np.mean(spans), rel=0.004)


def test_reductions_of_a_replica_are_ready_one_before_the_other() -> None:
    made = lower(generate("gems_master", 4, 4))
    ready = simulate_arrivals(outcome(made, 2), 0.01, np.random.default_rng(0))
    outer, inner = ready.reductions
    assert (outer, inner) == (Action(Kind.REDUCE_GRAD, 0), Action(Kind.REDUCE_GRAD, 1))
    end = simulate(made, uniform(4, 4)).span
    assert ready.mean == pytest.approx([end, end - 2], rel=0.01)
    late = ready.last(1000, np.random.default_rng(0))
    assert late[outer] > end and late[inner] > end - 2
    assert ready.last(0, np.random.default_rng(0)) == {}


def test_steps_are_the_same_for_one_seed_and_their_interval_holds_the_median() -> None:
    made = outcome(lower(generate("gems_master", 4, 4)), 8)
    once, again, other = (noisy_steps(made, 0.02, seed, 20) for seed in (3, 3, 4))
    assert once == again != other
    low, high = span_interval(once)
    assert low < median_step(once).span < high
    assert span_interval([median_step(once)]) == (median_step(once).span,) * 2


def test_a_schedule_without_reductions_has_replicas_that_wait_for_nobody() -> None:
    assert len(noisy_steps(outcome(generate("gpipe", 2, 2), 4), 0.02, 0, 5)) == 5

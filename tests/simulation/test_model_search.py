"""The search of a schedule together with the cut of the model and the plan of a memory policy."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest

import gems.partition.step_time
import gems.plan.draft
from gems.config.constraints import check_constraints
from gems.config.schema import MemoryConfig, ParallelConfig, RunSpec, ScheduleConfig
from gems.errors import ConfigError, DoesNotFitError
from gems.plan.evaluate import evaluate
from gems.schedule.families.published_schedules import published_schedules
from gems.schedule.synthesis import find_schedule
from gems.simulation.build import model_request
from gems.simulation.costs import RunCosts
from gems.simulation.model_search import search_with_cut
from tests.helpers.profiles import random_profile
from tests.simulation.conftest import costs_of, made_up


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What one test searches under a policy is found again by the next."""
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("seed", range(4))
def test_the_cut_for_the_schedule_is_never_slower(spec: RunSpec, seed: int) -> None:
    model = costs_of(spec, made_up(seed))
    costs = RunCosts.of(replace(spec, schedule=replace(spec.schedule, activation_cap=1.5)))
    request = model_request(costs, model, spec.seed)
    first = find_schedule(request, published_schedules(request))
    found, boundaries = search_with_cut(request, model)
    assert found.span <= first.span * (1 + 1e-9)
    assert max(found.peak) <= 1.5 + 1e-9
    costs = model.at(boundaries)
    assert costs.num_stages == found.schedule.num_stages


def test_a_larger_cap_gives_no_slower_list(spec: RunSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    profile = random_profile(30, 3, decay=0.9)
    monkeypatch.setattr(gems.partition.step_time, "MAX_SIMULATED", 10_000)
    spans = []
    for cap in (2.0, 3.0):
        schedule = replace(spec.schedule, activation_cap=cap, budget_s=0.1)
        parallel = ParallelConfig(partitions=4, micro_batches=8)
        deeper = replace(spec.model, depth=56)
        asked = replace(spec, schedule=schedule, parallel=parallel, model=deeper)
        model = costs_of(asked, profile)
        request = model_request(RunCosts.of(asked), model, asked.seed)
        spans.append(search_with_cut(request, model)[0].span)
    assert all(later <= earlier * (1 + 1e-9) for earlier, later in pairwise(spans)), spans


class TestUnderPolicy:
    """A search without a cap, under memory=plan."""

    @pytest.fixture
    def under(self, spec: RunSpec, cache: Path) -> RunSpec:
        """Two thirds of what the list that is fastest without a limit holds."""
        spec = replace(spec, cache_dir=str(cache))
        fastest = evaluate(replace(spec, schedule=replace(spec.schedule, activation_cap=8.0)))
        peak = fastest.peak
        assert peak is not None
        memory = MemoryConfig(
            "plan", limit_bytes=2 * peak.device_bytes // 3, budget_s=1.0, min_offload_bytes=0
        )
        return replace(spec, memory=memory, schedule=ScheduleConfig("capped", budget_s=0.1))

    def test_it_is_not_slower_than_any_list_under_its_own_plan(self, under: RunSpec) -> None:
        found = evaluate(under).memory
        limit = under.memory.limit_bytes
        assert found is not None and limit is not None and max(found.peak_bytes) <= limit
        tried = [
            ScheduleConfig("1f1b"),
            ScheduleConfig("interleaved_1f1b"),
            ScheduleConfig("gems_master"),
        ]
        tried += [replace(under.schedule, activation_cap=cap) for cap in (1.0, 2.0, 8.0)]
        steps_s = []
        for schedule in tried:
            with suppress(DoesNotFitError):
                other = evaluate(replace(under, schedule=schedule)).memory
                steps_s.append(other.step_s if other else 0.0)
        assert found.step_s <= min(steps_s) * 1.01

    def test_it_says_what_does_not_fit(self, under: RunSpec) -> None:
        with pytest.raises(DoesNotFitError, match=r"above memory.limit_bytes=1000"):
            evaluate(replace(under, memory=replace(under.memory, limit_bytes=1000, budget_s=0.05)))

    def test_another_limit_is_another_search(self, under: RunSpec) -> None:
        """A list that is kept for one limit is not taken for another, under which a faster one fits."""
        evaluate(under)
        free = evaluate(replace(under, memory=replace(under.memory, limit_bytes=10**12))).memory
        assert free is not None and not free.schedule.has_memory_actions

    @pytest.mark.parametrize("memory", [MemoryConfig(), MemoryConfig("plan", target_reduction=0.5)])
    def test_a_cap_is_needed_without_a_limit(self, under: RunSpec, memory: MemoryConfig) -> None:
        """A share to save is one of what a list holds, so that it cannot compare lists."""
        with pytest.raises(
            ConfigError, match=r"schedule.activation_cap=null: must be given for schedule=capped"
        ):
            check_constraints(replace(under, memory=memory))

"""`gems plan` and `gems simulate` of its answer.

One prediction, whatever schedule, policy, replicas and sizes.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

import gems.plan.draft
from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.plan.evaluate import evaluate, simulate
from gems.profile import ModelProfile
from gems.schedule import CAPPED
from gems.search.candidate import Candidate, candidates
from gems.search.choice import Choice
from gems.search.evaluate import Planner
from tests.helpers.planners import NUM_LAYERS, RUN, sized
from tests.helpers.profiles import random_profile

NUM_SETTINGS = 20
LINKS = (
    (),
    ("machine.ranks_per_node=2", "machine.node_bytes_per_s=200000", "machine.contention=true"),
    ("machine.link_latency_s=0.02", "machine.ranks_per_node=3", "machine.node_latency_s=0.004"),
)


@pytest.fixture
def run_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> tuple[str, ...]:
    def profile_of(spec: RunSpec) -> ModelProfile:
        profile = sized(random_profile(NUM_LAYERS, 5, 0.9), spec.parallel.micro_batch_size)
        return replace(profile, height_px=spec.data.height_px, width_px=spec.data.width_px)

    monkeypatch.setattr(gems.plan.draft, "profile_of", profile_of)
    return (
        *RUN,
        f"cache_dir={tmp_path}",
        "cost=profile",
        "schedule.budget_s=0.02",
        "memory.budget_s=0.1",
    )


def settings() -> list[tuple[int, Candidate]]:
    """Draw candidates: all policies and schedules in turn, in whatever sizes."""
    random = Random(0)
    asked = [
        one for num, batch in ((2, 4), (4, 4), (6, 6)) for one in candidates(num, batch, NUM_LAYERS)
    ]
    asked = [one for one in asked if one.num_stages * one.micro_batches <= 16]
    drawn = []
    names = sorted({one.schedule for one in asked})
    policies = sorted({(one.memory, one.how) for one in asked})
    for number in range(2 * NUM_SETTINGS):
        schedule = names[number % len(names)]
        policy = policies[number % len(policies)]
        if schedule == CAPPED:
            policy = "keep", ""
        fitting = [
            one for one in asked if (one.schedule, one.memory, one.how) == (schedule, *policy)
        ]
        if fitting:
            drawn.append((number, random.choice(fitting)))
    return drawn


@pytest.mark.cases
def test_plan_and_simulate_say_the_same(run_words: tuple[str, ...]) -> None:
    random = Random(1)
    seen = list[Candidate]()
    bases = [(words, compose([*run_words, *words])) for words in LINKS]
    for number, one in settings():
        words, spec = bases[number % len(bases)]
        limit = None
        if one.memory != "keep" or number % 4 == 0:
            free = Planner(spec, None).evaluate(one.kept)
            if not isinstance(free, Choice):
                continue
            limit = round(random.choice((0.6, 0.8, 0.95)) * max(free.peak_bytes))
        spec = replace(spec, machine=replace(spec.machine, device_bytes=limit))
        planner = Planner(spec, limit)
        judged = planner.evaluate(one)
        if not isinstance(judged, Choice):
            continue
        (choice,) = planner.confirmed([judged])
        size = "null" if limit is None else limit
        run = compose([*run_words, *words, f"machine.device_bytes={size}", *choice.overrides])
        prediction = simulate(run)
        assert prediction.step_s == pytest.approx(choice.step_s, rel=1e-9), one
        assert prediction.step.efficiency == pytest.approx(choice.efficiency, rel=1e-9), one
        assert prediction.peak_bytes == pytest.approx(choice.peak_bytes, rel=1e-9), one
        if number % 5 == 0:
            assert evaluate(run).step_s == pytest.approx(choice.step_s, rel=1e-9), one
        seen.append(one)
        if len(seen) == NUM_SETTINGS:
            break
    assert len(seen) == NUM_SETTINGS
    assert len({one.schedule for one in seen}) > 10 and len({one.policy for one in seen}) > 4

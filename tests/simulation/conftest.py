"""A small model with a made-up profile, whose schedule is searched."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import gems.plan.draft
from gems.config.schema import (
    MemoryConfig,
    ParallelConfig,
    PartitionConfig,
    RunSpec,
    ScheduleConfig,
)
from gems.profile import ModelProfile
from gems.simulation.model_costs import ModelCosts
from tests.helpers import toys
from tests.helpers.profiles import random_profile

NUM_LAYERS = 11


def made_up(seed: int) -> ModelProfile:
    return random_profile(NUM_LAYERS, seed, decay=0.9)


def costs_of(spec: RunSpec, profile: ModelProfile) -> ModelCosts:
    """Return the costs of a model for the searches of a run."""
    return ModelCosts(
        gems.plan.draft.Draft(spec, known=profile).partitioner, spec.memory.min_offload_bytes
    )


@pytest.fixture
def spec(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> RunSpec:
    """ResNet-20 on two ranks with a made-up profile, under a cap."""
    monkeypatch.setattr(gems.plan.draft, "profile_of", lambda spec: made_up(3))
    made = toys.make_spec("1f1b", 2)
    return replace(
        made,
        partition=PartitionConfig(),
        cache_dir=str(tmp_path),
        memory=MemoryConfig(min_offload_bytes=0),
        parallel=ParallelConfig(partitions=2, micro_batches=6),
        model=replace(made.model, depth=20),
        schedule=ScheduleConfig("capped", activation_cap=1.0, budget_s=0.2),
    )

"""Planners of made-up models, whose profiles take no time."""

from __future__ import annotations

from dataclasses import replace

import pytest

import gems.plan.draft
from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.profile import ModelProfile
from gems.search.evaluate import Planner
from tests.helpers.profiles import random_profile

SIZES = (
    "stash_bytes",
    "output_bytes",
    "output_grad_bytes",
    "unsaved_input_bytes",
    "workspace_bytes",
    "forward_peak_bytes",
    "backward_peak_bytes",
    "held_for_weights_bytes",
    "cheap_bytes",
    "cheap_first_peak_bytes",
    "cheap_peak_bytes",
    "plain_peak_bytes",
)
TIMES = ("forward_s", "input_grad_s", "weight_grad_s", "recompute_s", "cheap_s")
RUN = (
    "model=resnet20_v1",
    "data=synthetic",
    "memory.min_offload_bytes=0",
    "machine.d2h_bytes_per_s=4000",
    "machine.h2d_bytes_per_s=4000",
    "machine.link_bytes_per_s=20000",
    "machine.link_latency_s=0.001",
)
NUM_LAYERS = 11


def sized(profile: ModelProfile, size: int) -> ModelProfile:
    """Return a profile of one image for `size` of them: bytes in proportion, times a little less."""
    layers = tuple(
        replace(
            layer,
            saved=(),
            passing=(),
            saved_later=tuple((ahead, size * num) for ahead, num in layer.saved_later),
            **{name: size * getattr(layer, name) for name in SIZES},
            **{name: (0.1 + 0.9 * size) * getattr(layer, name) for name in TIMES},
        )
        for layer in profile.layers
    )
    return replace(
        profile, layers=layers, micro_batch_size=size, input_bytes=size * profile.input_bytes
    )


def made_up(monkeypatch: pytest.MonkeyPatch, seed: int, decay: float = 0.9) -> None:
    """Make every planner profile a random model of 11 layers."""

    def profile_of(spec: RunSpec) -> ModelProfile:
        return sized(random_profile(NUM_LAYERS, seed, decay), spec.parallel.micro_batch_size)

    monkeypatch.setattr(gems.plan.draft, "profile_of", profile_of)


def planner(limit_bytes: int | None = None, *words: str) -> Planner:
    """Return a planner under a limit."""
    return Planner(compose([*RUN, *words]), limit_bytes)

"""What the walk predicts of saved storages is what the engine counts, action by action and to the byte."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from torch import nn

from gems.config.schema import DataConfig, MachineConfig, ModelConfig
from gems.engine.executor import Batch
from gems.memory.model import OPTIMIZERS
from gems.memory.plan import Choice, MemoryPlan, Segment, add_memory
from gems.memory.timeline import rank_timeline
from gems.models import layers_of
from gems.models.build import build_layers, input_spec
from gems.profile import ModelProfile
from gems.profile.profilers.fake import fake_profile
from gems.schedule import generate
from gems.schedule.lower import lower
from gems.schedule.validate import validate
from tests.helpers.planned import assert_nothing_left, assert_same_bits, watch
from tests.helpers.rig import SIZE, Rig

MODELS = {
    "resnet": (ModelConfig(name="resnet", depth=11, version=2), 16),
    "unet": (ModelConfig(name="unet", depth=2, width=4), 16),
    "googlenet": (ModelConfig(name="googlenet", width=4), 32),
}
NUM = 3
CLASSES = 5


def data_of(side_px: int) -> DataConfig:
    return DataConfig(name="synthetic", height_px=side_px, width_px=side_px, num_classes=CLASSES)


@cache
def profile_of(name: str) -> ModelProfile:
    model, side_px = MODELS[name]
    return fake_profile(model, data_of(side_px), SIZE, "float32", MachineConfig())


def random_plan(boundaries: tuple[int, ...], choices: list[Choice], seed: int) -> MemoryPlan:
    draw = random.Random(seed)
    stages = []
    for first, end in pairwise(boundaries):
        stage = []
        at = first
        while at < end:
            stop = min(end, at + draw.randint(1, 3))
            stage.append(
                Segment(
                    at,
                    stop,
                    draw.choice(choices),
                    draw.randint(0, 2),
                    draw.randint(0, 3),
                    draw.random() < 0.3,
                )
            )
            at = stop
        stages.append(tuple(stage))
    return MemoryPlan("random", tuple(stages), least_bytes=draw.choice([0, 300]))


CASES = [
    *((name, family) for name in ("resnet", "unet") for family in ("gpipe", "zb_h1", "zb_v")),
    ("googlenet", "gpipe"),
]
CHOICES = {
    "offload": [Choice.OFFLOAD],
    "inputs of convolutions": [Choice.OFFLOAD, Choice.OFFLOAD, Choice.KEEP],
    "recompute": [Choice.RECOMPUTE],
    "selective": [Choice.SELECTIVE],
    "offloaded inputs": [Choice.OFFLOAD_INPUTS],
    "offloaded inputs beside others": [
        Choice.OFFLOAD_INPUTS,
        Choice.OFFLOAD,
        Choice.KEEP,
        Choice.RECOMPUTE,
    ],
    "all": list(Choice),
}


@pytest.mark.parametrize("choices", CHOICES)
@pytest.mark.parametrize(("name", "family"), CASES)
def test_bytes_of_every_action_are_those_of_the_walk(name, family, choices):
    model, side_px = MODELS[name]
    data = data_of(side_px)
    layers = layers_of(model, data)
    compute = generate(family, 1, NUM)
    stages = compute.num_stages
    cuts = tuple(round(number * len(layers) / stages) for number in range(stages + 1))
    plan = random_plan(cuts, CHOICES[choices], seed=len(name + family + choices))
    plan = replace(plan, only_conv_inputs=choices == "inputs of convolutions")
    schedule = validate(lower(add_memory(compute, plan)))
    generator = torch.Generator().manual_seed(0)
    images = {m: torch.randn(input_spec(data, SIZE).shape, generator=generator) for m in range(NUM)}
    labels = {m: torch.randint(0, CLASSES, (SIZE,), generator=generator) for m in range(NUM)}

    def rig_of(row_of, **options) -> Rig:
        modules: dict[tuple[int, int], list[nn.Module]] = {
            held: build_layers(layers, cuts[held[1]], cuts[held[1] + 1], 0)
            for held in compute.placement.stages_on(0)
        }
        return Rig(row_of, 0, modules, labels_per_step=NUM * SIZE, **options)

    ours = rig_of(schedule, plan=plan)
    whole = rig_of(validate(lower(compute)))
    seen = []
    watch(
        ours,
        lambda action: seen.append(
            (action, ours.executor.activations.held_bytes, ours.segments.store.on_host.held_bytes)
        ),
    )
    walked = rank_timeline(profile_of(name), plan, schedule, 0, OPTIMIZERS["sgd"])
    for number in range(2):  # in the second step, what is never moved is not looked at again
        seen.clear()
        for rig in (ours, whole):
            torch.manual_seed(1)
            rig.run(Batch(images, labels), number)
        assert_same_bits(ours, whole)
        assert_nothing_left(ours)
        assert seen == [
            (point.action, point.activation_bytes, point.host_bytes) for point in walked.points
        ]
    assert ours.executor.activations.peak_bytes == walked.peak_activation_bytes
    assert ours.segments.store.counters.num_misses == 0

"""What the walk predicts of all memory, transients among it, beside the bytes that really live during a step."""

from __future__ import annotations

from functools import cache

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
from gems.profile.profilers.layer_run import give_gradients, static_tensors
from gems.profile.profilers.live_bytes import LiveBytes
from gems.schedule import generate
from gems.schedule.action import RANK_KINDS
from gems.schedule.lower import lower
from tests.helpers.planned import watch
from tests.helpers.rig import Rig

MODELS = {
    "resnet": (ModelConfig(name="resnet", depth=11, version=2), 16),
    "unet": (ModelConfig(name="unet", depth=2, width=4), 16),
}
NUM = 2
SIZE = 1
CLASSES = 5
GPU = MachineConfig(
    device="cuda"
)  # what kernels allocate within themselves no mode of tensors sees
SLACK_BYTES = 1024  # losses, hits, labels


@cache
def profile_of(name: str) -> ModelProfile:
    model, side_px = MODELS[name]
    return fake_profile(model, data_of(side_px), SIZE, "float32", GPU)


def data_of(side_px: int) -> DataConfig:
    return DataConfig(name="synthetic", height_px=side_px, width_px=side_px, num_classes=CLASSES)


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("choice", [Choice.KEEP, Choice.RECOMPUTE, Choice.SELECTIVE])
@pytest.mark.parametrize("name", MODELS)
def test_the_peak_is_that_of_a_real_step(name: str, choice: Choice, size: int) -> None:
    model, side_px = MODELS[name]
    data = data_of(side_px)
    layers = layers_of(model, data)
    num = len(layers)
    segments = tuple(
        Segment(first, min(num, first + size), choice) for first in range(0, num, size)
    )
    plan = MemoryPlan("test", (segments,))
    schedule = lower(add_memory(generate("layer_parallel", 1, NUM), plan))
    modules = build_layers(layers, 0, num, 0)
    give_gradients(nn.ModuleList(modules))
    rig = Rig(schedule, 0, {(0, 0): modules}, plan=plan, labels_per_step=NUM * SIZE)
    images = {m: torch.randn(input_spec(data, SIZE).shape) for m in range(NUM)}
    labels = {m: torch.zeros(SIZE, dtype=torch.int64) for m in range(NUM)}
    rig.run(
        Batch(images, labels)
    )  # the first step finds out what layers change in place, with copies
    live = LiveBytes([*images.values(), *labels.values(), *static_tensors(nn.ModuleList(modules))])
    seen: list[tuple[int, int]] = []
    watch(rig, lambda _: seen.append((live.peak_bytes, live.restart())))
    with live:
        rig.run(Batch(images, labels), 1)
    walked = rank_timeline(profile_of(name), plan, schedule, 0, OPTIMIZERS["sgd"])
    still = walked.points[-1].device_bytes
    assert walked.peak_bytes - still == pytest.approx(
        max(peak for peak, _ in seen), rel=0.01, abs=SLACK_BYTES
    )
    for point, (peak, left) in zip(walked.points, seen, strict=True):
        if point.action.kind not in RANK_KINDS:
            assert point.device_bytes - still == pytest.approx(left, abs=SLACK_BYTES), point.action
            assert point.during_bytes - still >= peak - SLACK_BYTES, point.action

"""Profiles of mixed precision by device.

`tests/fake_cuda/fake_commands.py` compares them with what a GPU keeps.
"""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.config.schema import DataConfig, MachineConfig, ModelConfig, RunSpec
from gems.models import layers_of
from gems.models.families import convnext
from gems.profile.profilers import operators, strips
from gems.profile.profilers.fake import fake_profile
from gems.profile.subject import Subject
from tests.helpers.toys import make_spec

MODELS = {
    "convnext": ModelConfig("convnext", depth=18, width=8, norm="layer"),
    "resnet": ModelConfig("resnet", depth=8, width=4, norm="frozen_batch"),
}


@pytest.fixture(autouse=True)
def few_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have one block in each of the first two stages, each as the 18 of the smallest ConvNeXt.

    Nothing here is kept in the cache.
    """
    monkeypatch.setitem(convnext._BLOCKS, 18, (1, 1, 0, 0))


def spec_of(name: str, device: str, precision: str, num_strips: int = 1) -> RunSpec:
    data = DataConfig("synthetic", height_px=64, width_px=64, num_classes=3)
    spec = make_spec(
        model=MODELS[name],
        data=data,
        machine=MachineConfig(device=device, bfloat16_flops_per_s=1e12),
        parallel__strips=num_strips,
        train__precision=precision,
    )
    return replace(
        spec, parallel=replace(spec.parallel, boundaries=[0, len(layers_of(spec.model, spec.data))])
    )


def whole_bytes(name: str, device: str, precision: str) -> int:
    spec = spec_of(name, device, precision)
    profile = fake_profile(spec.model, spec.data, 2, precision, spec.machine)
    return sum(layer.stash_bytes for layer in profile.layers)


def strip_bytes(name: str, device: str, precision: str, num_strips: int) -> list[int]:
    (stage,) = strips.take(Subject.of(spec_of(name, device, precision, num_strips))).stages
    return [sum((*each.saved, *each.saved_outputs, *each.saved_carried)) for each in stage]


def left_bytes(name: str, device: str, precision: str) -> int:
    graph = operators.take(Subject.of(spec_of(name, device, precision)))
    return sum(op.held_bytes - op.state_bytes for op in graph.ops)


@pytest.mark.parametrize("precision", ["bf16_mixed", "fp16_mixed"])
def test_norms_keep_float32_on_a_gpu_in_all_profiles(precision: str) -> None:
    here, there = (whole_bytes("convnext", device, precision) for device in ("cpu", "cuda"))
    assert there > 1.02 * here
    here, there = (left_bytes("convnext", device, precision) for device in ("cpu", "cuda"))
    assert there > 1.02 * here
    for num_strips in (1, 2) if precision == "bf16_mixed" else (2,):
        found = [
            strip_bytes("convnext", device, precision, num_strips) for device in ("cpu", "cuda")
        ]
        assert all(there > 1.02 * here for here, there in zip(*found, strict=True))


@pytest.mark.parametrize("precision", ["float32", "bf16_pure"])
def test_without_autocast_devices_keep_the_same(precision: str) -> None:
    assert whole_bytes("convnext", "cpu", precision) == whole_bytes("convnext", "cuda", precision)
    assert strip_bytes("convnext", "cpu", precision, 2) == strip_bytes(
        "convnext", "cuda", precision, 2
    )


def test_batch_norm_keeps_the_same_on_both() -> None:
    assert whole_bytes("resnet", "cpu", "bf16_mixed") == whole_bytes("resnet", "cuda", "bf16_mixed")

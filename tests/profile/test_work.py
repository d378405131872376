"""The work of layers: at any size from two, at any rates, and the rounds of a GPU's blocks."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.config.compose import compose
from gems.config.schema import RunSpec
from gems.profile.kernel_work import (
    WINOGRAD_GAIN,
    KernelWork,
    convolution_work,
    weight_gradient_work,
)
from gems.profile.profilers.fake import fake_profile, machine_rates
from gems.profile.profilers.work import take
from gems.profile.subject import Subject
from gems.profile.work import ModelWork, work_at

WORDS = (
    "data=synthetic model=unet_simplified model.depth=1 model.width=8 model.convs=2 machine=p40"
    " data.task=segmentation data.num_classes=2 data.height_px=32 data.width_px=32"
)


def run_of(size: int) -> RunSpec:
    return compose([*WORDS.split(), f"parallel.micro_batch_size={size}"])


def work_of_size(size: int) -> ModelWork:
    return take(Subject.of(run_of(size)))


def test_work_gives_the_times_of_the_fake_profile_at_any_size() -> None:
    run = run_of(24)
    rates = machine_rates(run.machine, run.train.layer_dtype)
    direct = fake_profile(run.model, run.data, 24, "float32", run.machine)
    points = [work_of_size(16), work_of_size(32)]
    between = work_at([ModelWork.from_json(point.to_json()) for point in points], 24)
    timed = between.timed(rates)
    assert [layer.time_s for layer in timed.layers] == pytest.approx(
        [layer.time_s for layer in direct.layers], rel=1e-3
    )
    assert [layer.stash_bytes for layer in timed.layers] == [
        layer.stash_bytes for layer in direct.layers
    ]
    slower = between.timed(replace(rates, memory_bytes_per_s=rates.memory_bytes_per_s / 2))
    assert sum(layer.time_s for layer in slower.layers) > sum(
        layer.time_s for layer in timed.layers
    )


def test_throughput_rises_with_the_samples_until_the_device_is_full() -> None:
    rates = []
    for samples in (1, 2, 8, 64, 512):
        work = convolution_work((samples, 64, 14, 14), 64, (1, 1), (1, 1), has_winograd=False)
        rates.append(samples / (work.slowdown(30) * samples))
    assert rates == sorted(rates) and rates[-1] > 0.95
    assert rates[1] == pytest.approx(2 * rates[0], rel=0.35), "one round takes them all"
    assert KernelWork().slowdown(30) == 1.0


def test_few_channels_fill_a_part_of_a_block() -> None:
    whole, part = (
        convolution_work((64, 64, 56, 56), channels, (1, 7), (1, 1), has_winograd=True)
        for channels in (32, 20)
    )
    assert part.share == pytest.approx(1.6 * whole.share) and part.blocks == whole.blocks


def test_winograd_saves_half_of_the_products_of_three_by_three() -> None:
    assert pytest.approx(2.01, abs=0.01) == WINOGRAD_GAIN
    for stride, kernel, gain in (((1, 1), (3, 3), WINOGRAD_GAIN), ((2, 2), (3, 3), 1.0)):
        work = weight_gradient_work(kernel, stride, has_winograd=True)
        assert 1 / work.share == pytest.approx(gain) and not work.blocks
    assert weight_gradient_work((3, 3), (1, 1), has_winograd=False).share == 1.0

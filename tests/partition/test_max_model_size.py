"""The largest model under a limit, by each method, on made-up figures that can be scanned whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from gems.config.resolve import resolve
from gems.config.schema import MachineConfig, ModelConfig, ParallelConfig, RunSpec, ScheduleConfig
from gems.errors import ConfigError
from gems.models import layers_of, stride_of
from gems.partition.max_model_size import Axis, least_bytes, max_model_sizes
from gems.partition.methods import PartitionCase, partition_by
from gems.profile import LayerProfile
from gems.schedule import generate
from gems.schedule.lower import lower
from tests.helpers.profiles import profile

SCHEDULE = lower(generate("1f1b", 2, 4))
TRIED = ("exact", "even", "torchgpipe_time")


def spec_of(device_bytes: int | None, depth: int = 20) -> RunSpec:
    return resolve(
        RunSpec(
            model=ModelConfig(depth=depth),
            schedule=ScheduleConfig("1f1b"),
            parallel=ParallelConfig(partitions=2, micro_batches=4),
            machine=MachineConfig(device_bytes=device_bytes),
        )
    )


def case_of(spec: RunSpec) -> PartitionCase:
    """A model whose bytes follow depth, resolution and micro-batch, and halve along its layers."""
    layers = layers_of(spec.model, spec.data)
    size = spec.data.height_px * spec.data.width_px * spec.parallel.micro_batch_size
    made = [
        LayerProfile(
            layer.name,
            layer.kind,
            float(1 + i % 3),
            param_bytes=400 * (1 + i),
            stash_bytes=size * 4 // (1 + 4 * i // len(layers)),
            output_bytes=size,
            output_grad_bytes=size,
            forward_peak_bytes=size * 5,
            backward_peak_bytes=size * 3,
        )
        for i, layer in enumerate(layers)
    ]
    return PartitionCase(profile(made, size * 3), SCHEDULE, limit_bytes=spec.machine.device_bytes)


def fits(spec: RunSpec, method: str) -> bool:
    case = case_of(spec)
    return max(case.peak_bytes(partition_by(method, case).boundaries)) <= (
        spec.machine.device_bytes or 0
    )


@pytest.mark.parametrize(
    ("axis", "limit", "values"),
    [
        ("depth", 1_500_000, [6 * n + 2 for n in range(1, 80)]),
        ("resolution", 1_500_000, range(4, 400, 4)),
        ("micro_batch", 1_500_000, range(1, 100)),
    ],
)
def test_the_search_finds_what_a_scan_finds(axis: str, limit: int, values: list[int]) -> None:
    spec = spec_of(limit)
    growth = Axis(spec, axis)
    found = max_model_sizes(growth, TRIED, lambda value: case_of(growth.at(value)))
    assert [each.method for each in found] == list(TRIED)
    for each in found:
        expected = max(value for value in values if fits(Axis(spec, axis).at(value), each.method))
        assert each.value == expected
        case = case_of(Axis(spec, axis).at(expected))
        assert each.num_parameters == sum(layer.param_bytes for layer in case.profile.layers) // 4
        assert 0 < each.peak_bytes <= limit
    assert found[0].value == max(each.value for each in found)


def test_nothing_trains() -> None:
    axis = Axis(spec_of(1000), "resolution")
    (found,) = max_model_sizes(axis, ("exact",), lambda value: case_of(axis.at(value)))
    assert (found.value, found.num_parameters, found.peak_bytes) == (0, 0, 0)


def test_a_limit_is_needed() -> None:
    with pytest.raises(
        ConfigError, match=r"machine\.device_bytes=null: must be given for --largest"
    ):
        max_model_sizes(Axis(spec_of(None), "depth"), ("exact",), lambda _: case_of(spec_of(None)))


def test_a_value_is_put_in_its_place() -> None:
    spec = spec_of(1)
    assert Axis(spec, "depth").at(32).model.depth == 32
    assert Axis(spec, "micro_batch").at(3).parallel.micro_batch_size == 3
    changed = Axis(spec, "resolution").at(64)
    assert (changed.data.height_px, changed.data.width_px) == (64, 64)
    assert replace(changed, data=spec.data) == spec
    assert stride_of(spec.model) == 4


@pytest.mark.parametrize("method", TRIED)
@pytest.mark.parametrize("depth", [20, 56])
def test_the_least_is_below_every_peak(method: str, depth: int) -> None:
    case = case_of(spec_of(None, depth))
    assert 0 < least_bytes(case) <= max(case.peak_bytes(partition_by(method, case).boundaries))

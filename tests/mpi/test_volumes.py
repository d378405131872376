"""Volumes against one unsplit process, in float64: schedules, strips and blocks."""

from __future__ import annotations

import os

import pytest

from gems.config.schema import DataConfig, ModelConfig
from gems.engine.verification.compare import compare
from gems.schedule import published
from tests.helpers.device import DEVICE
from tests.helpers.toys import make_spec, plan_of
from tests.mpi.conftest import sub_world
from tests.mpi.test_exactness import can_run, size_of

UNET = ModelConfig(target="examples.volume_network.VolumeUNet", kwargs={"width": 2, "norm": "none"})
DATA = DataConfig(
    name="synthetic", task="segmentation", channels=1, depth_px=8, height_px=12, width_px=16
)
CASES = [("layer_parallel", 1), ("gems_master", 2), ("zb_v", 2), ("1f1b", 4)]
if os.environ.get("GEMS_ALL_CASES"):
    CASES = [(name, size) for name in published() for size in (1, 2, 4) if can_run(name, size)]
DIVISIONS = [4, [2, 2, 2], [1, 2, 4]]


def check(comm, schedule, partitions, **changes):
    number = size_of(partitions)
    spec = make_spec(
        schedule,
        partitions,
        model=UNET,
        data=DATA,
        train__precision="float64",
        parallel__micro_batches=number,
        **changes,
    )
    part = sub_world(comm, spec.world_size)
    if part is None:
        return
    found = compare(plan_of(spec), part, DEVICE)
    assert found.max_rel_error <= 1e-12, found
    assert found.peak_activation_bytes == found.predicted_activation_bytes, found


@pytest.mark.parametrize(("schedule", "partitions"), CASES)
def test_equal_one_unsplit_process(comm, schedule, partitions):
    check(comm, schedule, partitions)


@pytest.mark.parametrize("strips", DIVISIONS, ids=str)
def test_in_strips_and_blocks_equal_one_unsplit_process(comm, strips):
    check(comm, "1f1b", 2, parallel__strips=strips, parallel__min_strip_positions=1)

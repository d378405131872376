"""What graphs hold on the fake device is what was predicted, to the byte.

Run by test_fake_cuda.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from gems.config.schema import DataConfig, MemoryConfig, ModelConfig, RunSpec
from gems.engine.batch_loader import BatchLoader
from gems.engine.device import use_own_stream
from gems.engine.rank import Rank
from gems.engine.supervision.memory_report import memory_report
from gems.engine.transport.mpi import world
from gems.plan.evaluate import evaluate
from tests.fake_cuda.load import native
from tests.helpers.device import DEVICE
from tests.helpers.toys import make_spec

pytestmark = pytest.mark.usefixtures("clean_device")


@pytest.fixture(autouse=True)
def nothing_kept() -> Iterator[None]:
    """Free host memory now: the device refuses that while another test captures.

    The stream that a run makes its own is not that of the tests after this one.
    """
    before = torch.cuda.current_stream()
    yield
    torch.cuda.set_stream(before)
    gc.collect()


NETWORKS = {
    "resnet": ModelConfig("resnet", depth=20, version=2, width=4),
    "googlenet": ModelConfig("googlenet", width=8, norm="none"),
    "unet": ModelConfig("unet", depth=3, width=4),
}
POLICIES = {
    "keep": MemoryConfig(),
    "recompute": MemoryConfig("recompute"),
    "recompute of stages": MemoryConfig("recompute", recompute="stage"),
    "recompute with offloaded inputs": MemoryConfig("recompute", offload_inputs=True),
    "vdnn_all": MemoryConfig("vdnn_all", min_offload_bytes=0),
    "vdnn_conv": MemoryConfig("vdnn_conv", min_offload_bytes=0),
    "selective": MemoryConfig("recompute", recompute="selective"),
}


def spec_of(model: ModelConfig, schedule: str, **more: object) -> RunSpec:
    data = DataConfig(name="synthetic", num_classes=3, train_samples=64, height_px=32, width_px=32)
    return make_spec(schedule, 1, model=model, data=data, train__cuda_graphs=True, **more)


def counted_and_predicted(spec: RunSpec) -> tuple[int, list[int]]:
    """Return the counted bytes, those that a run's report predicts, and those of its plan, if any."""
    use_own_stream(DEVICE)
    plan = evaluate(spec)
    rank = Rank.open(plan.for_ranks, world(), DEVICE)
    loader = BatchLoader.open(rank.plan, rank.comm, DEVICE)
    rank.stages.set_training(True)
    before = native().counts().get("graph launches", 0)
    for step in range(2):
        rank.train.run(step, loader.batch(step))
    loader.close()
    assert native().counts().get("graph launches", 0) > before
    report = memory_report(rank)
    assert plan.memory is not None
    (counted,) = report["peak_activation_bytes"]
    planned = [each.peak_activation_bytes for each in plan.memory.ranks]
    return counted, [*report["predicted_activation_bytes"], *planned]


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gems_master"])
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("network", NETWORKS)
def test_bytes_of_graphs(network: str, policy: str, schedule: str) -> None:
    counted, predicted = counted_and_predicted(
        spec_of(NETWORKS[network], schedule, memory=POLICIES[policy])
    )
    assert set(predicted) == {counted}


CAPPED = {"schedule__activation_cap": 1.5, "schedule__budget_s": 0.2}
STRIPS = {
    "ghost": (ModelConfig("resnet", depth=8, width=4, norm="ghost_batch"), 4),
    "frozen": (ModelConfig("resnet", depth=8, width=4, norm="frozen_batch"), [2, 2]),
    "unet": (ModelConfig("unet", depth=3, width=4, norm="none"), 4),
    "unet in blocks": (ModelConfig("unet", depth=3, width=4, norm="none"), [2, 2]),
}


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe", "zb_h1", "gems_master", "capped"])
@pytest.mark.parametrize("case", STRIPS)
def test_bytes_of_graphs_of_strips(case: str, schedule: str) -> None:
    model, strips = STRIPS[case]
    more = CAPPED if schedule == "capped" else {}
    counted, predicted = counted_and_predicted(
        spec_of(model, schedule, parallel__strips=strips, **more)
    )
    assert set(predicted) == {counted}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1", "gems_master"])
@pytest.mark.parametrize("policy", ["recompute", "recompute with offloaded inputs", "vdnn_all"])
@pytest.mark.parametrize("case", STRIPS)
def test_bytes_of_graphs_of_strips_under_policies(case: str, policy: str, schedule: str) -> None:
    model, strips = STRIPS[case]
    counted, predicted = counted_and_predicted(
        spec_of(model, schedule, parallel__strips=strips, memory=POLICIES[policy])
    )
    assert set(predicted) == {counted}

"""Masks of a segmentation, read with the strips whose losses take them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from gems.config.schema import DataConfig, LossConfig, ModelConfig, RunSpec
from gems.data.dataset import Dataset
from gems.data.synthetic import SyntheticDataset
from gems.engine.batch_loader import BatchLoader
from gems.engine.evaluation.measure import evaluate
from gems.engine.rank import Rank
from gems.engine.transport.mpi import world
from gems.memory.model import OPTIMIZERS
from gems.memory.plan import MemoryPlan
from gems.memory.strips import stages_as_layers
from gems.memory.timeline import rank_timeline
from gems.profile.store import strips_of
from gems.profile.subject import Subject
from tests.helpers.toys import make_spec, plan_of

CPU = torch.device("cpu")
AGAIN = {"memory__name": "recompute", "memory__recompute": "strip"}
WEIGHTED = LossConfig(kwargs={"weight": [1, 9]})
FOCAL = LossConfig(target="tests.helpers.own_losses.Focal")
WHOLE_MAP = LossConfig(target="tests.helpers.own_losses.image_dice")


def segmentation(strips: int | list[int] = 3, **changes: Any) -> RunSpec:
    data = DataConfig(
        name="synthetic",
        task="segmentation",
        num_classes=2,
        height_px=24,
        width_px=16,
        train_samples=16,
        validation_samples=5,
        augment=True,
    )
    model = ModelConfig(name="unet", depth=2, width=4, norm="none")
    fields = {"model": model, "data": data, "parallel__strips": strips, "train__steps": 4}
    return make_spec("1f1b", 1, **fields | changes)


def opened(spec: RunSpec, in_parts: bool = True) -> tuple[Rank, BatchLoader]:
    rank = Rank.open(plan_of(spec), world(), CPU)
    masks = rank.mask_parts(rank.train) if in_parts else None
    return rank, BatchLoader.open(rank.plan, rank.comm, CPU, masks=masks)


def gradients(rank: Rank) -> list[torch.Tensor]:
    modules = [module for stage in rank.stages.modules.values() for module in stage]
    return [weight.detach().clone() for module in modules for weight in module.parameters()]


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the pixels of the parts of masks that are read; none may be read whole."""
    seen: list[int] = []
    mask = SyntheticDataset._mask

    def counted(dataset: SyntheticDataset, split: Any, index: int, box: Any) -> Any:
        part = mask(dataset, split, index, box)
        seen.append(part.size)
        return part

    monkeypatch.setattr(SyntheticDataset, "_mask", counted)
    monkeypatch.setattr(Dataset, "label", None)
    return seen


@pytest.mark.parametrize(
    ("loss", "changes", "is_weighed", "again"),
    [
        (WEIGHTED, {}, True, 0),
        (WEIGHTED, AGAIN, True, 1),
        (FOCAL, AGAIN, False, 1),  # a mean over all pixels
        (LossConfig(kwargs={"reduction": "sum"}), {}, False, 0),
    ],
)
@pytest.mark.parametrize("strips", [3, [3, 2]])
def test_masks_are_read_part_by_part(
    reads: list[int], loss: LossConfig, changes: Any, is_weighed: bool, again: int, strips: Any
) -> None:
    """Once for the weight of the step, once for the losses, and again but for the last strip."""
    spec = segmentation(strips, loss=loss, data__prefetch_steps=0, **changes)
    rank, loading = opened(spec)
    whole, last = 24 * 16, 16 * 16
    num = spec.parallel.global_batch
    for step in range(2):
        reads.clear()
        batch = loading.batch(step)
        assert not any(labels.untyped_storage().nbytes() > 8 for labels in batch.labels.values())
        rank.train.run(step, batch)
        assert sum(reads) == num * ((1 + is_weighed) * whole + again * (whole - last))
        assert max(reads) == last
    reads.clear()
    evaluate(rank, loading)
    assert sum(reads) % whole == 0 and sum(reads) >= 5 * whole and max(reads) == last
    loading.close()


@pytest.mark.parametrize(
    ("loss", "changes"), [(WEIGHTED, {"data__num_workers": 2}), (FOCAL, AGAIN)]
)
def test_weights_and_metrics_are_those_of_whole_masks(loss: LossConfig, changes: Any) -> None:
    found = []
    for in_parts in (False, True):
        rank, loading = opened(segmentation(loss=loss, **changes), in_parts)
        sums = [rank.train.run(step, loading.batch(step)) for step in range(2)]
        batch = loading.batch(2)
        rank.train.run(2, batch)
        again = rank.train.run(2, batch)  # as to find where a loss is not finite
        found.append((sums, again, evaluate(rank, loading), gradients(rank)))
        loading.close()
    (sums, again, metrics, weights), others = found
    assert sums == pytest.approx(others[0], rel=1e-12) and again == pytest.approx(others[1])
    assert metrics["validation_loss"] == pytest.approx(others[2].pop("validation_loss"), rel=1e-12)
    assert {**others[2], "validation_loss": metrics["validation_loss"]} == metrics
    for one, other in zip(weights, others[3], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("changes", [{}, AGAIN])
@pytest.mark.parametrize("loss", [WEIGHTED, WHOLE_MAP])
def test_bytes_of_masks_are_as_predicted(loss: LossConfig, changes: Any) -> None:
    spec = segmentation(loss=loss, parallel__micro_batches=4, **changes)
    rank, loading = opened(spec)
    strips = strips_of(Subject.of(spec), rank.stages.of_model.boundaries)
    samples = rank.train._samples
    rank.train.run(0, loading.batch(0))
    assert strips.reads_masks == (loss is WEIGHTED) and samples.held_bytes == 0
    held = max(strips.masks) if strips.reads_masks else 4 * sum(strips.masks)
    assert samples.peak_bytes == held > 0
    # all that a prediction adds because of masks
    plan = rank.plan.memory_plan or MemoryPlan.keeping(rank.stages.of_model.boundaries)
    profile = stages_as_layers(strips)
    plan = plan.between(range(len(rank.stages.of_model.boundaries)))
    totals = [
        rank_timeline(profile, plan, rank.plan.schedule, 0, OPTIMIZERS["sgd"], each)
        for each in (strips, replace(strips, masks=(0,) * len(strips.masks)))
    ]
    more = [
        with_masks.during_bytes - without.during_bytes
        for with_masks, without in zip(*(total.points for total in totals), strict=True)
    ]
    assert max(more) == held
    loading.close()

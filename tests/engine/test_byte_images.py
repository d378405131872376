"""Images that are held as bytes until a strip takes their rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tifffile
import torch

from gems.config.schema import DataConfig, ModelConfig, RunSpec
from gems.data.images import FileDataset, ImageDataset
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
SIDE = 24
# files of one piece are read whole, those of many by rows
KINDS: dict[str, dict[str, Any]] = {"whole": {"rowsperstrip": SIDE}, "by rows": {"rowsperstrip": 4}}
AGAIN = {"memory__name": "recompute", "memory__recompute": "strip"}


def spec_of(folder: Path, kind: str, **changes: Any) -> RunSpec:
    rng = np.random.default_rng(0)
    for number in range(12):
        path = folder / ("train", "validation")[number % 3 == 2] / "ab"[number % 2]
        path.mkdir(parents=True, exist_ok=True)
        values = rng.integers(0, 256, (SIDE, SIDE, 3), dtype=np.uint8)
        tifffile.imwrite(path / f"{number}.tif", values, compression="zlib", **KINDS[kind])
    data = DataConfig(
        name="folder",
        path=str(folder),
        num_classes=2,
        height_px=SIDE,
        width_px=SIDE,
        normalization="imagenet",
        augment=True,
    )
    model = ModelConfig(name="resnet", depth=8, width=4, norm="none")
    fields = {"parallel__strips": [2, 2], "parallel__micro_batches": 3, "train__steps": 3}
    return make_spec("1f1b", 1, model=model, data=data, **fields | changes)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "changes",
    [
        {"train__precision": "float32"},
        {"train__precision": "bf16_mixed", "machine__channels_last": True},
    ],
)
def test_rows_have_the_values_of_whole_images_to_the_last_bit(
    tmp_path: Path, kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of(tmp_path, kind, **changes)
    found = []
    for are_bytes in (True, False):
        if not are_bytes:
            monkeypatch.setattr(ImageDataset, "reads_bytes", lambda *split: False)
        rank = Rank.open(plan_of(spec), world(), CPU)
        loading = BatchLoader.open(rank.plan, rank.comm, CPU)
        sums = [rank.train.run(step, loading.batch(step)) for step in range(2)]
        batch = loading.batch(2)
        assert (batch.rows is None) == (kind == "whole" and not are_bytes)
        types = {images.dtype for images in batch.images.values()}
        assert types == ({torch.uint8} if are_bytes and kind == "whole" else types)
        rows = [batch.rows(strip, False) for strip in range(12)] if batch.rows else []
        found.append((sums, evaluate(rank, loading), rows, dict(batch.images)))
        loading.close()
    (sums, metrics, rows, _), others = found
    # other memory formats may run other kernels
    rel = 1e-2 if "machine__channels_last" in changes else 1e-12
    assert sums == pytest.approx(others[0], rel=rel) and metrics[
        "validation_loss"
    ] == pytest.approx(others[1]["validation_loss"], rel=rel)
    if kind == "by rows":
        wanted = others[2]
    else:
        half = SIDE // 2
        cuts = [(slice(a, a + half), slice(b, b + half)) for a in (0, half) for b in (0, half)]
        wanted = [others[3][m][:, :, *cut] for m in range(3) for cut in cuts]
    for one, other in zip(rows, wanted, strict=True):
        assert one.dtype == other.dtype and torch.equal(one, other)


@pytest.mark.parametrize("changes", [{}, AGAIN])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_are_counted_and_predicted(
    tmp_path: Path, kind: str, changes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FileDataset, "rows", None)
    spec = spec_of(tmp_path, kind, **changes)
    rank = Rank.open(plan_of(spec), world(), CPU)
    loading = BatchLoader.open(rank.plan, rank.comm, CPU)
    rank.train.run(0, loading.batch(0))
    loading.close()
    strips = strips_of(Subject.of(spec), rank.stages.of_model.boundaries)
    image_bytes = 3 * SIDE * SIDE * spec.parallel.micro_batch_size
    whole = 3 * image_bytes if kind == "whole" else 0
    assert strips.byte_images == whole // 3 and rank.train._samples.peak_bytes == whole
    boundaries = rank.stages.of_model.boundaries
    plan = rank.plan.memory_plan or MemoryPlan.keeping(boundaries)
    plan = plan.between(range(len(boundaries)))
    by_rows = replace(strips, byte_images=0, reads_rows=True)
    totals = [
        rank_timeline(
            stages_as_layers(strips), plan, rank.plan.schedule, 0, OPTIMIZERS["sgd"], profile
        ).peak_bytes
        for profile in (strips, by_rows)
    ]
    assert totals[0] - totals[1] == whole
    held = rank.train.router.input_rows
    itemsize = 4
    in_flight = image_bytes if changes == {} else image_bytes // 4
    assert held.peak_bytes == itemsize * in_flight and held.held_bytes == 0

"""Rows of images for each strip: what the loader gives, and how much of them a rank holds."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from gems.autograd.storages import tensor_bytes
from gems.config.schema import DataConfig, ModelConfig, RunSpec
from gems.data import open_dataset
from gems.engine.batch_loader import BatchLoader, ReadShare
from gems.engine.evaluation.measure import evaluate
from gems.engine.executor import Batch
from gems.engine.rank import Rank
from gems.engine.reading.strip_requests import StripRead
from gems.engine.stages.streamed import EvaluationInStrips
from gems.engine.transport.mpi import world
from gems.streaming.axis_rules import even_ends
from gems.streaming.strip_stage import Boundary
from tests.helpers.toys import make_spec, plan_of

CPU = torch.device("cpu")
STRIPS = 3
MICRO_BATCHES = 2
# as a zig-zag of two micro-batches would take them
ORDER = (0, 3, 1, 4, 2, 5)
IN_ORDER = [StripRead(strip, False) for strip in range(STRIPS * MICRO_BATCHES)]


def strip_spec(height: int = 20, strips: int | list[int] = STRIPS, **changes: Any) -> RunSpec:
    data = DataConfig(
        name="synthetic",
        num_classes=3,
        height_px=height,
        width_px=8,
        train_samples=64,
        validation_samples=5,
    )
    model = ModelConfig(name="resnet", depth=8, width=4, norm="none")
    return make_spec(
        "1f1b", 1, **{"model": model, "data": data, "parallel__strips": strips, **changes}
    )


def loader(
    spec: RunSpec, order: tuple[int, ...], first_step: int = 0, is_run_again: bool = False
) -> BatchLoader:
    dataset = open_dataset(spec.data, spec.seed)
    strips = [
        StripRead(strip, again) for strip in order for again in (False, True)[: 1 + is_run_again]
    ]
    return BatchLoader(spec, dataset, ReadShare(0, (0, 1), (1,), strips), CPU, first_step)


def rows_of(batch: Batch, order: tuple[int, ...] = ORDER) -> dict[int, torch.Tensor]:
    assert batch.rows is not None and not batch.images
    return {strip: batch.rows(strip, False) for strip in order}


@pytest.mark.parametrize("changes", [{}, {"data__prefetch_steps": 0}, {"data__num_workers": 2}])
def test_the_loader_gives_the_rows_of_the_images(changes: dict[str, Any]) -> None:
    common = {"parallel__micro_batches": MICRO_BATCHES, "train__steps": 3}
    whole = loader(strip_spec(**common), ())
    found = loader(strip_spec(**common, **changes), ORDER)
    twice = loader(strip_spec(**common, **changes), ORDER, is_run_again=True)
    resumed = loader(strip_spec(**common, **changes), ORDER, first_step=2)
    ends = even_ends(20, STRIPS)
    for step in range(3):
        expected = whole.batch(step)
        batch = found.batch(step)
        assert expected.rows is None
        for strip, rows in rows_of(batch).items():
            m, number = divmod(strip, STRIPS)
            wanted = expected.images[m][:, :, ends[number - 1] if number else 0 : ends[number]]
            assert torch.equal(rows, wanted)
        rows = twice.batch(step).rows
        assert rows is not None
        for strip in ORDER:
            first, second = (rows(strip, again) for again in (False, True))
            assert first is not second and torch.equal(first, second)
            assert torch.equal(first, rows_of(batch)[strip])
        again = rows_of(batch)  # as to find where a loss is not finite
        assert torch.equal(again[4], expected.images[1][:, :, ends[0] : ends[1]])
        assert batch.labels.keys() == {1} and torch.equal(batch.labels[1], expected.labels[1])
        if step == 2:
            assert torch.equal(rows_of(resumed.batch(2))[5], again[5])
    for kind in (False, True):
        of_whole = list(whole.validation(MICRO_BATCHES, True, kind))
        of_strips = list(found.validation(MICRO_BATCHES, True, kind, IN_ORDER))
        assert len(of_whole) == len(of_strips) == 2
    for one, other in zip(
        whole.validation(MICRO_BATCHES, True, True),
        found.validation(MICRO_BATCHES, True, True, IN_ORDER),
        strict=True,
    ):
        rows = rows_of(other, tuple(range(MICRO_BATCHES * STRIPS)))
        for m, images in one.images.items():
            assert torch.equal(
                torch.cat([rows[m * STRIPS + number] for number in range(STRIPS)], 2), images
            )
            assert torch.equal(one.labels[m], other.labels[m])
    for each in (whole, found, twice, resumed):
        each.close()


def test_the_loader_gives_the_blocks_of_the_images() -> None:
    common = {"parallel__micro_batches": MICRO_BATCHES, "train__steps": 1}
    expected = loader(strip_spec(**common), ()).batch(0)
    order = (1, 0, 7, *range(2, 7), *range(8, 12))
    blocks = loader(strip_spec(strips=[3, 2], **common), order)
    found = rows_of(blocks.batch(0), order)
    for m, images in expected.images.items():
        boundary = Boundary.even(tuple(images.shape), images.dtype, (3, 2))
        for block in range(6):
            assert torch.equal(found[6 * m + block], boundary.cut(images, block))
    blocks.close()


def built(**changes: Any) -> tuple[Rank, BatchLoader]:
    rank = Rank.open(plan_of(strip_spec(**changes)), world(), CPU)
    return rank, BatchLoader.open(rank.plan, rank.comm, CPU)


POLICIES: dict[str, dict[str, Any]] = {
    "keep": {},
    "recompute": {"memory__name": "recompute", "memory__recompute": "strip"},
    "carries in host memory": {
        "memory__name": "recompute",
        "memory__recompute": "strip",
        "memory__offload_inputs": True,
    },
    "vdnn_all": {"memory__name": "vdnn_all", "memory__min_offload_bytes": 0},
}


@pytest.mark.parametrize("schedule", ["1f1b", "zb_h1"])
@pytest.mark.parametrize("policy", POLICIES)
def test_training_holds_rows_until_nothing_reads_them(schedule: str, policy: str) -> None:
    rank, loading = built(schedule__name=schedule, parallel__micro_batches=4, **POLICIES[policy])
    held = rank.train.router.input_rows
    row_bytes = 2 * 3 * 8 * 4
    # all rows of a micro-batch, which waits for its loss; or those of its largest strip
    rows = 7 if "memory__recompute" in POLICIES[policy] else 20
    after = []
    for step in range(2):
        rank.train.run(step, loading.batch(step))
        after.append(rank.recorder.memory.held_bytes)
        assert held.held_bytes == 0
        assert held.peak_bytes == rows * row_bytes
    assert after[0] == after[1]
    loading.close()


def live_bytes() -> int:
    """Return the bytes of all tensors in memory, those too that only a cycle of references holds."""
    kinds = torch.Tensor, torch.nn.Parameter  # no fake ones
    return tensor_bytes(
        each for each in gc.get_objects() if type(each) in kinds and each.device == CPU
    )


def test_evaluation_holds_no_more_of_an_image_if_it_has_more_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held: list[int] = []
    infer = EvaluationInStrips.infer

    def watched(stage: EvaluationInStrips, inputs: Sequence[torch.Tensor]) -> Any:
        found = infer(stage, inputs)
        held.append(live_bytes())
        return found

    monkeypatch.setattr(EvaluationInStrips, "infer", watched)
    peaks = []
    for strips in (3, 9):
        rank, loading = built(height=strips * 12, strips=strips, data__prefetch_steps=0)
        gc.collect()
        gc.freeze()  # what other tests left is not looked through each time
        held.clear()
        gc.disable()
        before = live_bytes()
        memory = rank.recorder.memory
        held_before = memory.peak_bytes = memory.held_bytes
        try:
            evaluate(rank, loading)
        finally:
            gc.enable()
        rows_bytes = 2 * 3 * 12 * 8 * 4
        assert rank.evaluate.router.input_rows.peak_bytes == rows_bytes
        assert memory.peak_bytes - held_before < 2 * rows_bytes and memory.held_bytes == held_before
        assert len(held) == 3 * strips  # of three micro-batches
        peaks.append(max(held) - before)
        loading.close()
    assert 0 < peaks[1] <= peaks[0] + 1000 < 12 * rows_bytes


def test_a_failed_step_leaves_no_rows() -> None:
    rank, loading = built()
    batch = loading.batch(0)

    def fails(strip: int, is_again: bool) -> torch.Tensor:
        assert batch.rows is not None
        if strip == 2:
            raise OSError("no such tile")
        return batch.rows(strip, is_again)

    with pytest.raises(OSError, match="no such tile"):
        rank.train.run(0, Batch({}, batch.labels, fails))
    assert rank.train.router.input_rows.held_bytes == 0 and rank.train.router.is_empty
    loading.close()

"""The sampler: every image once an epoch, the same on all ranks, and the cut of the global batch."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gems.data.dataset import batch_indices, micro_batch_slice


@settings(max_examples=60, deadline=None)
@given(
    num_images=st.integers(1, 40),
    global_batch=st.integers(1, 90),
    seed=st.integers(0, 9),
    epochs=st.integers(1, 4),
)
def test_every_image_comes_once_in_each_epoch(
    num_images: int, global_batch: int, seed: int, epochs: int
) -> None:
    num_steps = -(-epochs * num_images // global_batch)
    batches = [batch_indices(num_images, seed, step, global_batch) for step in range(num_steps)]
    assert all(batch.shape == (global_batch, 2) for batch in batches)
    pairs = np.concatenate(batches)
    for epoch in range(epochs):
        mine = pairs[epoch * num_images : (epoch + 1) * num_images]
        assert sorted(mine[:, 0].tolist()) == list(range(num_images))
        assert set(mine[:, 1].tolist()) == {epoch}


def test_steps_may_be_asked_in_any_order() -> None:
    forward = [batch_indices(11, 3, step, 4).tolist() for step in range(12)]
    backward = [batch_indices(11, 3, step, 4).tolist() for step in reversed(range(12))]
    assert forward == backward[::-1]


def test_seed_and_epoch_change_the_order() -> None:
    orders = {
        tuple(batch_indices(50, seed, step, 50)[:, 0].tolist())
        for seed in (0, 1)
        for step in (0, 1)
    }
    assert len(orders) == 4


def test_the_answer_cannot_spoil_the_next_one() -> None:
    first = batch_indices(9, 0, 0, 9)
    kept = first.copy()
    first[:] = -1
    assert np.array_equal(batch_indices(9, 0, 0, 9), kept)


@settings(max_examples=40, deadline=None)
@given(replicas=st.integers(1, 4), num_micro_batches=st.integers(1, 8), size=st.integers(1, 5))
def test_micro_batches_of_all_replicas_partition_the_global_batch(
    replicas: int, num_micro_batches: int, size: int
) -> None:
    batch = batch_indices(1000, 0, 2, replicas * num_micro_batches * size)
    parts = [
        batch[micro_batch_slice(replica, micro_batch, num_micro_batches, size)]
        for replica in range(replicas)
        for micro_batch in range(num_micro_batches)
    ]
    assert all(len(part) == size for part in parts)
    assert np.array_equal(np.concatenate(parts), batch)


@pytest.mark.parametrize("micro_batch", [-1, 4])
def test_a_micro_batch_outside_the_step_is_refused(micro_batch: int) -> None:
    with pytest.raises(ValueError, match="micro-batch"):
        micro_batch_slice(0, micro_batch, 4, 2)


@pytest.mark.parametrize(("num_images", "step", "global_batch"), [(0, 0, 1), (1, -1, 1), (1, 0, 0)])
def test_impossible_counts_are_refused(num_images: int, step: int, global_batch: int) -> None:
    with pytest.raises(ValueError, match="num_images"):
        batch_indices(num_images, 0, step, global_batch)

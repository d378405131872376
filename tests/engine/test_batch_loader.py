"""What ranks read: the same samples wherever they are, every image once, and validation shared out."""

from __future__ import annotations

import os
import sys
from collections import Counter

import pytest
import torch

import scripts.reproduce.language  # noqa: F401  registers data=tokens
from gems.config.schema import DataConfig
from gems.data import open_dataset
from gems.data.dataset import batch_indices
from gems.engine.batch_loader import BatchLoader, ReadShare
from gems.errors import ConfigError
from tests.helpers.toys import NumberedDataset, make_spec

CPU = torch.device("cpu")


class WatchedDataset(NumberedDataset):
    """Refuses to be read where another process than the rank starts MPI, and one sample everywhere."""

    def __init__(self, num_train: int, num_validation: int, bad: int = -1) -> None:
        super().__init__(num_train, num_validation)
        self._bad, self._home = bad, os.getpid()

    def _pixels(self, split, index):
        if os.getpid() != self._home and sys.modules["mpi4py.MPI"].Is_initialized():
            raise RuntimeError("MPI in a worker")
        if index == self._bad:
            raise ValueError("no such tile")
        return super()._pixels(split, index)


def make_loader(
    dataset, replica=0, image_micro_batches=(), label_micro_batches=(), **changes
) -> BatchLoader:
    spec = make_spec("1f1b", 2, **changes)
    share = ReadShare(replica, image_micro_batches, label_micro_batches)
    return BatchLoader(spec, dataset, share, CPU)


def read_all(dataset, steps, replicas, micro_batches, **changes) -> list[list[int]]:
    """The numbers of all images of each step, over all replicas."""
    taken: list[list[int]] = [[] for _ in range(steps)]
    for replica in range(replicas):
        loader = make_loader(
            dataset,
            replica,
            range(micro_batches),
            (),
            replicas=replicas,
            parallel__micro_batches=micro_batches,
            train__steps=steps,
            **changes,
        )
        for step in range(steps):
            batch = loader.batch(step)
            taken[step] += [int(x) for m in range(micro_batches) for x in batch.images[m].flatten()]
        loader.close()
    return taken


@pytest.mark.parametrize("prefetch_steps", [0, 2])
@pytest.mark.parametrize("replica", [0, 1])
def test_the_rank_with_labels_sees_the_images_of_the_rank_with_images(prefetch_steps, replica):
    dataset = NumberedDataset(50, 5)
    common = {"replicas": 2, "data__prefetch_steps": prefetch_steps, "train__steps": 3}
    first = make_loader(dataset, replica, image_micro_batches=(0, 1, 2, 3), **common)
    last = make_loader(dataset, replica, label_micro_batches=(1, 3), **common)
    for step in range(3):
        images = first.batch(step).images
        labels = last.batch(step).labels
        assert sorted(images) == [0, 1, 2, 3] and sorted(labels) == [1, 3]
        for m in (1, 3):
            assert images[m].shape == (2, 1, 1, 1) and images[m].dtype is torch.float32
            assert torch.equal(images[m].flatten().long() % 3, labels[m])
    first.close()
    last.close()


@pytest.mark.parametrize(("replicas", "micro_batches"), [(1, 3), (2, 3), (2, 2)])
def test_every_image_once_an_epoch(replicas, micro_batches):
    global_batch = replicas * micro_batches * 2
    # every second step straddles two epochs
    num_images = 3 * global_batch // 2
    num_epochs = 4
    dataset = NumberedDataset(num_images, 5)
    steps = num_images * num_epochs // global_batch
    taken = [
        number for step in read_all(dataset, steps, replicas, micro_batches) for number in step
    ]
    epochs = [taken[first : first + num_images] for first in range(0, len(taken), num_images)]
    assert replicas > 1 or all(sorted(epoch) == list(range(num_images)) for epoch in epochs)
    assert Counter(taken) == {number: num_epochs for number in range(num_images)}


def test_no_image_twice_in_a_step_within_an_epoch():
    for step in read_all(NumberedDataset(24, 5), 2, 2, 3):
        assert len(set(step)) == len(step) == 12


def test_order_depends_on_the_seed_alone():
    dataset = NumberedDataset(40, 5)
    once = read_all(dataset, 3, 1, 4)
    assert read_all(dataset, 3, 1, 4, data__prefetch_steps=0) == once
    assert read_all(dataset, 3, 1, 4, seed=1) != once
    assert once != [sorted(step) for step in once]


def test_a_rank_that_reads_nothing_needs_no_data_set():
    loader = make_loader(None)
    batch = loader.batch(0)
    assert (batch.images, batch.labels) == ({}, {})
    loader.num_validation = 8  # which other ranks tell it
    assert [(b.images, b.labels) for b in loader.validation(4, False, False)] == [({}, {})]
    loader.close()


def test_a_bad_image_reaches_the_step_that_needs_it():
    class Bad(NumberedDataset):
        def _pixels(self, split, index):
            raise OSError(f"image {index} is truncated")

    loader = make_loader(Bad(40, 5), image_micro_batches=(0,))
    with pytest.raises(
        ConfigError,
        match=r"data=sample \d+ of train: cannot be read .*OSError: image \d+ is truncated",
    ):
        loader.batch(0)
    loader.close()


def test_worker_processes_load_the_same_batches_and_start_no_mpi():
    """Also when they begin at a later step; an error names its sample, once."""
    data = {
        "data__num_workers": 2,
        "train__steps": 6,
        "image_micro_batches": (0, 1, 3),
        "label_micro_batches": (1, 2),
    }
    dataset = WatchedDataset(50, 5)
    here = make_loader(dataset, **data | {"data__num_workers": 0})
    loader = make_loader(dataset, **data)
    state = torch.get_rng_state()
    for step in (0, 1, 4):  # those jumped over are dropped
        expected = here.batch(step)
        found = loader.batch(step)
        for one, other in ((expected.images, found.images), (expected.labels, found.labels)):
            assert sorted(one) == sorted(other)
            assert all(torch.equal(one[m], other[m]) for m in one)
    for _ in range(2):  # validations, by the same processes
        rounds = list(
            zip(here.validation(2, True, True), loader.validation(2, True, True), strict=True)
        )
        assert len(rounds) == 2
        for one, other in rounds:
            assert all(torch.equal(one.images[m], other.images[m]) for m in (0, 1))
            assert all(torch.equal(one.labels[m], other.labels[m]) for m in (0, 1))
    assert torch.equal(torch.get_rng_state(), state)
    loader.close()
    here.close()

    changes = {"data__num_workers": 1, "train__steps": 6, "train__precision": "float64"}
    spec = make_spec("1f1b", 2, **changes)
    share = ReadShare(0, (0, 1, 2, 3))
    resumed = BatchLoader(spec, WatchedDataset(50, 5, bad=40), share, CPU, first_step=3)
    (bad,) = (step for step in range(3, 6) if 40 in batch_indices(50, 0, step, 8)[:, 0])
    for step in range(3, bad):
        numbers = torch.cat([resumed.batch(step).images[m].flatten() for m in range(4)])
        assert numbers.dtype is torch.float64
        assert numbers.long().tolist() == batch_indices(50, 0, step, 8)[:, 0].tolist()
    with pytest.raises(
        ConfigError, match=r"data=sample 40 of train: cannot be read .*ValueError: no such tile"
    ):
        resumed.batch(bad)
    resumed.close()


def test_a_dataset_that_no_process_can_be_sent_is_refused():
    class Local(NumberedDataset):
        pass

    with pytest.raises(
        ConfigError, match=r"data\.num_workers=1: the dataset cannot be sent to a process"
    ):
        make_loader(Local(40, 5), image_micro_batches=(0,), data__num_workers=1)


@pytest.mark.parametrize("num_validation", [1, 5, 7, 8, 16, 17])
@pytest.mark.parametrize(
    ("replicas", "size", "num_micro_batches"), [(1, 2, 3), (2, 2, 2), (4, 3, 1), (3, 1, 4)]
)
def test_validation_counts_every_image_once(num_validation, replicas, size, num_micro_batches):
    dataset = NumberedDataset(200, num_validation)
    counted: list[int] = []
    num_rounds = set()
    for replica in range(replicas):
        common = {"replicas": replicas, "parallel__micro_batch_size": size}
        loaders = [make_loader(data, replica, **common) for data in (dataset, dataset, None)]
        loaders[2].num_validation = num_validation  # which other ranks tell it
        # a rank of the first stage, one of the last and one between: they must agree on the number
        # of rounds
        first = list(loaders[0].validation(num_micro_batches, True, False))
        last = list(loaders[1].validation(num_micro_batches, False, True))
        middle = list(loaders[2].validation(num_micro_batches, False, False))
        assert len(first) == len(last) == len(middle)
        num_rounds.add(len(first))
        for with_images, with_labels in zip(first, last, strict=True):
            assert (
                sorted(with_images.images)
                == sorted(with_labels.labels)
                == list(range(num_micro_batches))
            )
            assert not with_images.labels and not with_labels.images
            for m, images in with_images.images.items():
                labels = with_labels.labels[m]
                assert images.shape == (size, 1, 1, 1)
                numbers = images.flatten().long()[: len(labels)]
                assert torch.equal(numbers % 3, labels)
                counted += numbers.tolist()
    assert sorted(counted) == list(range(num_validation))
    assert len(num_rounds) == 1


@pytest.mark.parametrize("dtype", ["float32", "float64", "bf16_pure"])
@pytest.mark.parametrize("name", ["tokens", "token_pairs"])
def test_tokens_stay_integers_and_labels_are_one_for_each(name, dtype):
    data = DataConfig(name=name, num_classes=7, length=5, train_samples=40)
    dataset = open_dataset(data, 0)
    spec = make_spec("1f1b", 2, train__precision=dtype)
    loader = BatchLoader(spec, dataset, ReadShare(0, (0, 1), (1,)), CPU)
    batch = loader.batch(0)
    loader.close()
    chosen = batch_indices(40, 0, 0, 8)[2:4, 0]
    assert torch.equal(
        batch.images[1], torch.stack([torch.from_numpy(dataset.image("train", i)) for i in chosen])
    )
    assert torch.equal(
        batch.labels[1], torch.stack([torch.from_numpy(dataset.label("train", i)) for i in chosen])
    )
    assert batch.images[1].dtype is batch.labels[1].dtype is torch.int64
    assert batch.labels[1].shape == (2, 5)


def test_validation_fills_up_with_sequences_that_count_for_nothing():
    dataset = open_dataset(
        DataConfig(name="tokens", num_classes=7, length=5, validation_samples=3), 0
    )
    loader = BatchLoader(make_spec("1f1b", 2), dataset, ReadShare(), CPU)
    (batch,) = loader.validation(2, True, True)
    labels = torch.cat([batch.labels[0], batch.labels[1]])
    assert labels.shape == (3, 5)
    assert torch.equal(batch.images[0][:, 1:], labels[:2, :-1])

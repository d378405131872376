"""The caching allocator on paper, and what it says a rank's GPU reserves."""

from __future__ import annotations

import random

import pytest

from gems.memory.model import OPTIMIZERS, MemoryModel
from gems.memory.reserved import CachingAllocator, reserved_bytes
from gems.profile.spans import Spans
from gems.schedule import generate
from gems.schedule.lower import lower
from tests.helpers.profiles import random_profile

MIB = 1 << 20


@pytest.mark.parametrize(
    ("requests", "allocated", "reserved"),
    [
        ([1], 512, 2 * MIB),
        ([513, 512], 1536, 2 * MIB),
        ([MIB, MIB], 2 * MIB, 2 * MIB),
        ([MIB, MIB, 1], 2 * MIB + 512, 4 * MIB),
        ([5 * MIB], 5 * MIB, 20 * MIB),
        ([5 * MIB, 5 * MIB, 9 * MIB], 20 * MIB, 20 * MIB),
        ([10 * MIB], 10 * MIB, 10 * MIB),
        ([11 * MIB, 11 * MIB], 24 * MIB, 24 * MIB),
        ([MIB + 1], MIB + 512, 20 * MIB),
    ],
)
def test_segments(requests: list[int], allocated: int, reserved: int) -> None:
    """A rest of a large segment up to 1 MiB is not split off."""
    allocator = CachingAllocator()
    for request in requests:
        allocator.take(request)
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (allocated, reserved)


def test_the_best_fit_is_taken() -> None:
    allocator = CachingAllocator()
    large, _, small, _ = (allocator.take(size * MIB) for size in (8, 2, 3, 2))
    allocator.give(large)
    allocator.give(small)
    again = allocator.take(3 * MIB)
    assert again is small
    assert allocator.reserved_bytes == 20 * MIB


def test_neighbours_join() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.take(5 * MIB) for _ in range(4)]
    for block in blocks[1:3]:
        allocator.give(block)
    allocator.take(9 * MIB)
    assert allocator.reserved_bytes == 20 * MIB, "two free pieces of 5 side by side make room for 9"
    allocator.give(blocks[0])
    allocator.give(blocks[3])
    allocator.take(6 * MIB)
    assert allocator.reserved_bytes == 40 * MIB, "two of 5 that are apart do not for 6"


@pytest.mark.parametrize("seed", range(5))
def test_books_balance(seed: int) -> None:
    rng = random.Random(seed)
    allocator = CachingAllocator()
    held = []
    for _ in range(400):
        if held and rng.random() < 0.5:
            allocator.give(held.pop(rng.randrange(len(held))))
        else:
            held.append(allocator.take(int(10 ** rng.uniform(0, 7.5))))
        assert 0 <= allocator.allocated_bytes <= allocator.reserved_bytes
        assert allocator.allocated_bytes == sum(block.num_bytes for block in held)
    for block in held:
        allocator.give(block)
    assert allocator.allocated_bytes == 0
    reserved = allocator.reserved_bytes
    allocator.take(1)
    assert allocator.reserved_bytes == reserved, "all that was taken is there to be used again"


@pytest.mark.parametrize("name", ["1f1b", "gems_master", "zb_v", "interleaved_1f1b"])
def test_a_rank_reserves_about_what_it_holds(name: str) -> None:
    made = random_profile(16, seed=4, decay=0.9)
    scaled = type(made).from_json(_scaled(made.to_json(), 20_000))
    schedule = lower(generate(name, 4, 8))
    cuts = tuple(round(16 * s / schedule.num_stages) for s in range(schedule.num_stages + 1))
    peaks = MemoryModel(Spans(scaled), OPTIMIZERS["sgd"]).peak_bytes(schedule, cuts)
    for rank, peak in enumerate(peaks):
        reserved = reserved_bytes(scaled, schedule, rank, cuts, OPTIMIZERS["sgd"])
        assert 0.8 * peak < reserved < 1.6 * peak


def _scaled(document: dict, factor: int) -> dict:
    for layer in document["layers"]:
        for key, value in layer.items():
            if key.endswith("_bytes"):
                layer[key] = value * factor
        layer["saved"] = []
        layer["saved_later"] = [(ahead, size * factor) for ahead, size in layer["saved_later"]]
    return document | {"input_bytes": document["input_bytes"] * factor}

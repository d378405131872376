"""The allocator that pages out.

Where requests are served from, in which order storages leave, and what it learns.
"""

from __future__ import annotations

import pytest

from gems.memory.policies.lms.allocator import LmsAllocator, OutOfMemoryError, Paged

MIB = 1 << 20


def made(allocator: LmsAllocator, *sizes_mib: float) -> list[Paged]:
    """Make storages, unused from now on, the first for longest."""
    storages = [Paged(int(size * MIB)) for size in sizes_mib]
    for storage in storages:
        allocator.make(storage)
        allocator.unpin(storage)
    return storages


def sources(allocator: LmsAllocator) -> dict[str, int]:
    return {source: count for source, count in allocator.counts.alloc_distribution.items() if count}


def is_here(storages: list[Paged]) -> list[bool]:
    return [storage.block is not None for storage in storages]


def test_the_device_comes_before_reclaim_below_the_limit() -> None:
    allocator = LmsAllocator(60 * MIB)
    storages = made(allocator, 20, 20)
    allocator.take(20 * MIB)
    assert sources(allocator) == {"cudamalloc": 3}
    assert all(is_here(storages))


def test_the_least_recently_used_leaves_first() -> None:
    allocator = LmsAllocator(60 * MIB)
    storages = made(allocator, 20, 20, 20)
    allocator.pin(storages[0])
    allocator.unpin(storages[0])
    new = Paged(20 * MIB)
    assert allocator.make(new) == [storages[1]]
    assert sources(allocator) == {"cudamalloc": 3, "reclaim_one": 1}
    assert (allocator.counts.reclaimed, allocator.counts.reclaimed_bytes) == (1, 20 * MIB)
    assert is_here(storages) == [True, False, True]


@pytest.mark.parametrize(("reclaim", "gone"), [("first", 0), ("size", 2)])
def test_which_of_those_that_are_large_enough(reclaim: str, gone: int) -> None:
    allocator = LmsAllocator(90 * MIB, reclaim)
    storages = made(allocator, 40, 30, 20)
    allocator.make(Paged(18 * MIB))
    assert is_here(storages) == [number != gone for number in range(3)]
    assert sources(allocator)["reclaim_one"] == 1


def test_one_with_free_neighbours_makes_room() -> None:
    """Four blocks of 5 in a segment of 20.

    A free one beside the least recently used makes 10, which serves 9.
    """
    allocator = LmsAllocator(20 * MIB)
    storages = made(allocator, 5, 5, 5, 5)
    allocator.drop(storages[1])
    assert allocator.make(Paged(9 * MIB)) == [storages[0]]
    assert sources(allocator) == {"cudamalloc": 1, "freelist": 3, "reclaim_one": 1}


def test_fragments_leave_together() -> None:
    """No block of 5 is enough for 9, even with its neighbours, which are in use.

    All that are not leave.
    """
    allocator = LmsAllocator(20 * MIB)
    storages = made(allocator, 5, 5, 5, 5)
    allocator.pin(storages[3])
    assert allocator.make(Paged(9 * MIB)) == storages[:3]
    assert sources(allocator)["reclaim_fragments"] == 1


def test_all_leave_and_segments_go_back_for_a_request_larger_than_any() -> None:
    allocator = LmsAllocator(60 * MIB)
    storages = made(allocator, 20, 20, 20)
    assert allocator.make(Paged(50 * MIB)) == storages
    assert sources(allocator) == {"cudamalloc": 3, "cudamalloc_retry": 1}
    assert allocator.reserved_bytes == 50 * MIB


def test_all_leave_where_only_the_other_pool_can() -> None:
    """A small request finds no small storage to reclaim.

    The large ones leave, and their segment goes back for it.
    """
    allocator = LmsAllocator(20 * MIB)
    storages = made(allocator, 20)
    allocator.make(Paged(1024))
    assert is_here(storages) == [False]
    assert sources(allocator) == {"cudamalloc": 1, "cudamalloc_retry": 1}


def test_what_is_pinned_stays_and_the_request_fails() -> None:
    allocator = LmsAllocator(40 * MIB)
    held = [Paged(20 * MIB), Paged(20 * MIB)]
    for storage in held:
        allocator.make(storage)
    with pytest.raises(OutOfMemoryError) as caught:
        allocator.make(Paged(20 * MIB))
    assert (caught.value.num_bytes, caught.value.reserved_bytes) == (20 * MIB, 40 * MIB)


def test_a_storage_comes_back_when_it_is_pinned() -> None:
    allocator = LmsAllocator(40 * MIB)
    storages = made(allocator, 20, 20, 20)
    assert is_here(storages) == [False, True, True]
    assert allocator.pin(storages[0]) == [storages[1]]
    assert allocator.counts.paged_in_bytes == 20 * MIB
    assert allocator.pin(storages[0]) == [], "it is there and in use"


def test_bytes_in_use_are_counted_at_their_most() -> None:
    allocator = LmsAllocator(100 * MIB)
    held = [Paged(20 * MIB), Paged(20 * MIB)]
    for storage in held:
        allocator.make(storage)
    for storage in held:
        allocator.unpin(storage)
    allocator.make(Paged(10 * MIB))
    assert (allocator.counts.pinned, allocator.counts.pinned_bytes) == (2, 40 * MIB)
    assert allocator.restart().pinned == 2
    assert allocator.counts.pinned == 0


def step(allocator: LmsAllocator, sizes_mib: tuple[int, ...]) -> None:
    """Forward makes one storage after the other, backward reads them in reverse."""
    storages = made(allocator, *sizes_mib)
    for storage in reversed(storages):
        allocator.pin(storage)
        allocator.unpin(storage)
        allocator.drop(storage)


def test_a_step_that_repeats_itself_is_learnt() -> None:
    """In the first step nothing is known.

    From the second on every reclaim has been foreseen, and nothing else.
    """
    allocator = LmsAllocator(60 * MIB)
    counts = []
    for _ in range(4):
        step(allocator, (20, 20, 20, 20, 20))
        counts.append(allocator.restart())
    assert [each.reclaimed for each in counts] == [2, 2, 2, 2]
    assert [each.speculative for each in counts] == [0, 2, 2, 2]
    assert [each.speculative_missed for each in counts] == [0, 0, 0, 0]


def test_a_step_that_changes_is_mispredicted_once() -> None:
    allocator = LmsAllocator(60 * MIB)
    counts = []
    for sizes in ((20,) * 5, (20,) * 5, (20,) * 3, (20,) * 3):
        step(allocator, sizes)
        counts.append(allocator.restart())
    assert [each.reclaimed for each in counts] == [2, 2, 0, 0]
    assert [each.speculative_missed for each in counts] == [0, 0, 2, 0]


def test_counters_have_the_names_of_the_original() -> None:
    allocator = LmsAllocator(60 * MIB)
    step(allocator, (20, 20, 20, 20))
    found = allocator.restart().to_json()
    assert {
        name: found[name]
        for name in ("reclaimed", "reclaimed_bytes", "alloc_distribution.reclaim_one")
    } == {"reclaimed": 1, "reclaimed_bytes": 20 * MIB, "alloc_distribution.reclaim_one": 1}
    assert {name.split(".")[1] for name in found if "." in name} == {
        "freelist",
        "cudamalloc",
        "reclaim_one",
        "reclaim_fragments",
        "reclaim_all",
        "cudamalloc_retry",
    }

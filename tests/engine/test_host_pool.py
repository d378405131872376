"""The pool of host memory: sizes, use again, its limit, and pins that are refused."""

from __future__ import annotations

import resource

import pytest
import torch

from gems.engine.offload.host_pool import PAGE_BYTES, HostPool, PinnedMemory
from gems.errors import DoesNotFitError


class Cudart:
    """Stands for CUDA's runtime: pins up to a number of bytes."""

    def __init__(self, most_bytes: int) -> None:
        self.pinned: dict[int, int] = {}
        self._most_bytes = most_bytes

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:
        if sum(self.pinned.values()) + num_bytes > self._most_bytes:
            return 2
        self.pinned[address] = num_bytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.pinned[address]
        return 0

    def cudaGetErrorString(self, error: int) -> str:
        return {2: "out of memory"}[error]


def test_buffers_have_exact_sizes_and_are_used_again():
    pool = HostPool(None, "rank 0")
    first = [pool.borrow(size) for size in (100, 300, 100)]
    assert [buffer.nbytes for buffer in first] == [100, 300, 100]
    assert (pool.used_bytes, pool.held_bytes, pool.num_made) == (500, 500, 3)
    for buffer in first:
        pool.release(buffer)
    again = [pool.borrow(size) for size in (300, 100, 100)]
    assert {b.data_ptr() for b in again} == {b.data_ptr() for b in first}
    assert (pool.used_bytes, pool.held_bytes, pool.num_made) == (500, 500, 3)


def test_the_limit_names_bytes_and_what_to_change():
    pool = HostPool(None, "rank 3", limit_bytes=1000)
    pool.borrow(600)
    with pytest.raises(
        DoesNotFitError, match=r"rank 3: .* 1100 bytes .*machine\.host_bytes=1000 .*memory="
    ):
        pool.borrow(500)
    assert pool.used_bytes == 600


def test_near_the_limit_free_buffers_of_other_sizes_make_room():
    pool = HostPool(None, "rank 0", limit_bytes=1000)
    larger = pool.borrow(600)
    smaller = pool.borrow(400)
    pool.release(larger)
    assert pool.borrow(500) is larger, "one that is large enough does"
    pool.release(smaller)
    pool.release(larger)
    assert pool.borrow(900).nbytes == 900, "both went"
    assert pool.held_bytes == pool.used_bytes == 900


def test_pinned_memory_is_whole_pages_of_its_own_and_unpinned_when_dropped():
    cudart = Cudart(10 * PAGE_BYTES)
    pool = HostPool(PinnedMemory("rank 0", cudart), "rank 0", limit_bytes=PAGE_BYTES + 3)
    buffers = [pool.borrow(size) for size in (1, PAGE_BYTES + 1)]
    assert [cudart.pinned[b.data_ptr()] for b in buffers] == [PAGE_BYTES, 2 * PAGE_BYTES]
    assert all(b.data_ptr() % PAGE_BYTES == 0 for b in buffers)
    buffers[1].copy_(torch.arange(PAGE_BYTES + 1, dtype=torch.int64).to(torch.uint8))
    assert int(buffers[1][PAGE_BYTES]) == PAGE_BYTES % 256
    pool.release(buffers[0])
    other = pool.borrow(2)
    assert set(cudart.pinned) == {buffers[1].data_ptr(), other.data_ptr()}, "the first made room"
    assert pool.held_bytes == pool.used_bytes == PAGE_BYTES + 3
    del pool
    assert not cudart.pinned, (
        "before the pages are unmapped, also those of a buffer that is still held"
    )


@pytest.mark.parametrize("limit", [1 << 20, resource.RLIM_INFINITY])
def test_pins_that_are_refused_name_ulimit(limit, monkeypatch):
    monkeypatch.setattr(resource, "getrlimit", lambda what: (limit, limit))
    pool = HostPool(PinnedMemory("rank 1", Cudart(PAGE_BYTES)), "rank 1")
    pool.borrow(10)
    with pytest.raises(
        DoesNotFitError,
        match=r"rank 1: pinned host memory \(CUDA's error 2: out of memory\).*ulimit -l",
    ) as raised:
        pool.borrow(3 * PAGE_BYTES)
    assert raised.value.limit_bytes == (PAGE_BYTES if limit == resource.RLIM_INFINITY else limit)
    assert pool.held_bytes == 10

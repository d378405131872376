"""The allocator of LMS by need: a caching allocator that pages out unused storages.

It follows the rules, and has the counters, of IBM's large model support for PyTorch 1.5.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields

from gems.memory.reserved import BLOCK_BYTES, SMALL_BYTES, Block, CachingAllocator

SOURCES = (
    "freelist",
    "cudamalloc",
    "reclaim_one",
    "reclaim_fragments",
    "reclaim_all",
    "cudamalloc_retry",
)


class OutOfMemoryError(Exception):
    """The limit leaves no room for `num_bytes` more, and there is nothing to page out."""

    def __init__(self, num_bytes: int, reserved_bytes: int) -> None:
        self.num_bytes = num_bytes
        self.reserved_bytes = reserved_bytes
        super().__init__(f"{num_bytes} bytes more than {reserved_bytes}")


@dataclass(slots=True, eq=False)
class Paged:
    """A storage that may be paged out while nothing has it pinned."""

    num_bytes: int
    block: Block | None = None  # its memory on the device, None while it is in host memory only
    # copied out early, because it was reclaimed at this place in the last iteration
    is_leaving: bool = False
    identity: tuple[int, int, int] | None = None


@dataclass(slots=True)
class _History:
    """The history of a storage: whether it was reclaimed at each time that it was not in use.

    It covers this iteration and the last one.
    """

    now: list[bool] = field(default_factory=list)
    before: list[bool] = field(default_factory=list)

    def restart(self) -> None:
        self.before = self.now
        self.now = []

    @property
    def expects_reclaim(self) -> bool:
        """Whether the history matches the last iteration, in which a reclaim came next."""
        return self.before[: len(self.now) + 1] == [*self.now, True]


@dataclass(slots=True)
class Counts:
    """Counters of one iteration, under the original's names.

    `pinned` are peaks of storages that cannot be reclaimed.
    """

    reclaimed: int = 0
    reclaimed_bytes: int = 0
    pinned: int = 0
    pinned_bytes: int = 0
    alloc_distribution: Counter[str] = field(default_factory=Counter)
    paged_in_bytes: int = 0
    speculative: int = 0
    speculative_missed: int = 0

    def to_json(self) -> dict[str, int]:
        """Return the counters as a flat dictionary with the names of torch's memory statistics."""
        counts = {field.name: getattr(self, field.name) for field in fields(self)}
        by_source: Counter[str] = counts.pop("alloc_distribution")
        return counts | {f"alloc_distribution.{source}": by_source[source] for source in SOURCES}


class LmsAllocator(CachingAllocator):
    """An allocator that serves requests from free blocks, the device, and then unused storages.

    It takes memory from the device up to the limit. Unpinned storages queue up, the least recently
    used first. To reclaim memory, it takes one storage that makes room together with its free
    neighbours (`reclaim` "first": the first in the queue; "size": the one that fits best); or all
    storages in segments as large as the request; or all storages. Finally, free segments are given
    back and the device is asked again.
    """

    def __init__(self, limit_bytes: int, reclaim: str = "first") -> None:
        super().__init__()
        self.limit_bytes = limit_bytes
        self.counts = Counts()
        self.reclaimed: list[Paged] = []  # by the last request
        self._takes_first = reclaim == "first"
        self._inactive: dict[Paged, None] = {}
        self._inactive_bytes = 0
        self._num_blocks = self._missing_bytes = 0
        self._num_named = 0
        self._histories: dict[tuple[int, int, int], _History] = {}
        self._source = ""

    def restart(self) -> Counts:
        """End an iteration and return its counts."""
        counts = self.counts
        self.counts = Counts()
        return counts

    def take(self, num_bytes: int) -> Block:
        """Serve a request.

        Raises:
            OutOfMemoryError: everything that may leave has left, and the limit leaves no room.
        """
        self._source = "freelist"
        self.reclaimed = []
        block = super().take(num_bytes)
        self.counts.alloc_distribution[self._source] += 1
        self._num_blocks += 1
        self._note_pinned()
        return block

    def give(self, block: Block) -> None:
        """Free a block."""
        super().give(block)
        self._num_blocks -= 1

    def make(self, storage: Paged) -> list[Paged]:
        """Allocate a new pinned storage, and return the storages that had to leave for it."""
        storage.block = self.take(storage.num_bytes)
        return self.reclaimed

    def pin(self, storage: Paged) -> list[Paged]:
        """Pin a storage, on the device, and return the storages that had to leave for it."""
        if storage in self._inactive:
            self._withdraw(storage, is_reclaimed=False)
            self.counts.speculative_missed += storage.is_leaving
            storage.is_leaving = False
            self._note_pinned()
            return []
        if storage.block is not None:
            return []
        self.counts.paged_in_bytes += storage.num_bytes
        return self.make(storage)

    def unpin(self, storage: Paged) -> None:
        """Queue a storage, and start its copy out if the last iteration predicts its reclaim."""
        assert storage.block is not None
        self._inactive[storage] = None
        self._inactive_bytes += storage.block.num_bytes
        if storage.identity is None:
            self._num_named += 1
            storage.identity = (storage.block.num_bytes, self._num_named, len(self._inactive))
            self._histories.setdefault(storage.identity, _History()).restart()
        storage.is_leaving = self._histories[storage.identity].expects_reclaim
        self.counts.speculative += storage.is_leaving

    def drop(self, storage: Paged) -> None:
        """Free a storage for good, wherever it is."""
        if storage in self._inactive:
            self._withdraw(storage, is_reclaimed=False)
        if storage.identity is not None:
            self._num_named -= 1
        if storage.block is not None:
            self.give(storage.block)
            storage.block = None

    def _segment(self, size: int, is_small: bool) -> Block:
        block = self._from_device(size, is_small, "cudamalloc") or self._by_reclaim(size, is_small)
        if block is None:
            # give segments that are free as a whole back to the device
            for free in self._free.values():
                for _, _, whole in [
                    entry for entry in free if entry[2].num_bytes == entry[2].segment_bytes
                ]:
                    self._forget(whole)
                    self.reserved_bytes -= whole.num_bytes
            block = self._from_device(size, is_small, "cudamalloc_retry")
        if block is None:
            raise OutOfMemoryError(self._missing_bytes, self.reserved_bytes)
        return block

    def _from_device(self, size: int, is_small: bool, source: str) -> Block | None:
        """Take a segment from the device if the limit allows it."""
        before = self.reserved_bytes
        block = super()._segment(size, is_small)
        if self.reserved_bytes > self.limit_bytes:
            self._missing_bytes = self.reserved_bytes - before
            self.reserved_bytes = before
            return None
        self._source = source
        return block

    def _by_reclaim(self, size: int, is_small: bool) -> Block | None:
        while self._inactive:
            suitable = self._suitable(size, is_small)
            if suitable is not None:
                chosen = [suitable]
                source = "reclaim_one"
            else:
                chosen = [
                    storage
                    for storage, block in self._of_pool(is_small)
                    if block.segment_bytes >= size
                ]
                source = "reclaim_fragments"
            if not chosen:
                chosen = list(self._inactive)
                source = "reclaim_all"
            for storage in chosen:
                assert storage.block is not None
                self._withdraw(storage, is_reclaimed=True)
                self.counts.reclaimed += 1
                self.counts.reclaimed_bytes += storage.num_bytes
                self.reclaimed.append(storage)
                self.give(storage.block)
                storage.block = None
                storage.is_leaving = False
            block = self._best(size, is_small)
            if block is not None:
                self._source = source
                return block
        return None

    def _suitable(self, size: int, is_small: bool) -> Paged | None:
        """Return the storage that makes enough room by itself, if any."""
        best = None
        best_bytes = 0
        for storage, block in self._of_pool(is_small):
            # once freed, it joins its free neighbours
            around = (
                neighbour
                for neighbour in (block.before, block.after)
                if neighbour is not None and neighbour.is_free
            )
            block_bytes = block.num_bytes
            if (
                block_bytes < size
                and block_bytes + sum(neighbour.num_bytes for neighbour in around) < size
            ):
                continue
            if best is None or block_bytes < best_bytes:
                best = storage
                best_bytes = block_bytes
                rest_bytes = block_bytes - size
                if self._takes_first or (
                    rest_bytes < BLOCK_BYTES if is_small else rest_bytes <= SMALL_BYTES
                ):
                    break
        return best

    def _of_pool(self, is_small: bool) -> Iterator[tuple[Paged, Block]]:
        return (
            (storage, storage.block)
            for storage in self._inactive
            if storage.block is not None and storage.block.is_small == is_small
        )

    def _withdraw(self, storage: Paged, is_reclaimed: bool) -> None:
        assert storage.block is not None and storage.identity is not None
        del self._inactive[storage]
        self._inactive_bytes -= storage.block.num_bytes
        self._histories[storage.identity].now.append(is_reclaimed)

    def _note_pinned(self) -> None:
        counts = self.counts
        counts.pinned = max(counts.pinned, self._num_blocks - len(self._inactive))
        counts.pinned_bytes = max(counts.pinned_bytes, self.allocated_bytes - self._inactive_bytes)

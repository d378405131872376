"""Saved storages: the memory that a layer makes and that outlives it, and which layers save it for backward."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any


@dataclass(frozen=True, slots=True)
class Saved:
    """`count` equal storages that a layer makes, each of `num_bytes`.

    Layers are counted from the one that makes them, which is 0: `savers` are those that save it for backward, in order,
    `weight_readers` those after the maker whose weight gradient reads it, `last_use` the last one that is given it, to
    read it or to carry it on. `is_product` says that a convolution or a
    matrix product gave it, so that a selective recompute keeps it from the first. With no savers it is memory that
    backward never reads.
    """

    num_bytes: int
    savers: tuple[int, ...] = (0,)
    last_use: int = 0
    count: int = 1
    is_product: bool = False
    weight_readers: tuple[int, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.num_bytes * self.count

    @property
    def structure(self) -> tuple[object, ...]:
        """What is alike at other resolutions: all but the bytes."""
        return (self.savers, self.last_use, self.count, self.is_product, self.weight_readers)

    @classmethod
    def from_json(cls, entry: Mapping[str, Any]) -> Saved:
        """Read what `dataclasses.asdict` gave."""
        return cls(
            int(entry["num_bytes"]),
            tuple(int(saver) for saver in entry["savers"]),
            int(entry["last_use"]),
            int(entry["count"]),
            bool(entry["is_product"]),
            tuple(int(reader) for reader in entry.get("weight_readers", ())),
        )


def counted(storages: Iterable[Saved]) -> tuple[Saved, ...]:
    """Return storages with equal ones counted, in the order in which each first came."""
    numbers: Counter[Saved] = Counter()
    for storage in storages:
        numbers[replace(storage, count=1)] += storage.count
    return tuple(replace(storage, count=number) for storage, number in numbers.items())


def stash_of(saved: Iterable[Saved]) -> tuple[int, tuple[tuple[int, int], ...]]:
    """Return `stash_bytes` and `saved_later` of a layer from its saved storages."""
    by_first: dict[int, int] = {}
    for storage in saved:
        if storage.savers:
            first = storage.savers[0]
            by_first[first] = by_first.get(first, 0) + storage.total_bytes
    return by_first.pop(0, 0), tuple(sorted(by_first.items()))


def product_bytes_of(storages: Iterable[Saved]) -> int:
    """Return the bytes that a selective recompute keeps."""
    return sum(storage.total_bytes for storage in storages if storage.is_product)


def saved_from(stash_bytes: int, saved_later: Iterable[tuple[int, int]], cheap_bytes: int = 0) -> tuple[Saved, ...]:
    """Return storages that a stash may be made of, one per first saver, for a profile that has only sums."""
    cheap = min(cheap_bytes, stash_bytes)
    own = (Saved(cheap, is_product=True), Saved(stash_bytes - cheap))
    later = (Saved(num_bytes, (ahead,), ahead) for ahead, num_bytes in saved_later)
    return tuple(storage for storage in (*own, *later) if storage.num_bytes)

"""The marks of all ranks, as one of them reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from gems.runs.folder import RunFolder
from gems.runs.heartbeat import Beat, read_beat


class Marks(Mapping[int, Beat]):
    """The marks of all ranks, each read from its file when it is asked for, and once."""

    def __init__(self, folder: RunFolder, num_ranks: int) -> None:
        self._folder, self._num_ranks = folder, num_ranks
        self._read: dict[int, Beat | None] = {}

    def __getitem__(self, rank: int) -> Beat:
        if rank not in self._read:
            try:
                self._read[rank] = read_beat(self._folder.heartbeat(rank))
            except (OSError, ValueError):
                self._read[rank] = None
        beat = self._read[rank]
        if beat is None:
            raise KeyError(rank)
        return beat

    def __iter__(self) -> Iterator[int]:
        return iter(range(self._num_ranks))

    def __len__(self) -> int:
        return self._num_ranks

    def known(self) -> dict[int, Beat]:
        """Return those that have left a mark."""
        return {rank: self[rank] for rank in self if rank in self}

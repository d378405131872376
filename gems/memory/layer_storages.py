"""The storages that the layers of a stage make and that a plan may decide about."""

from __future__ import annotations

from dataclasses import dataclass

from gems.memory.stage_storages import profile_storages
from gems.profile import ModelProfile


@dataclass(frozen=True, slots=True)
class Storage:
    """`count` equal storages of `num_bytes` each that layer `maker` makes; layers are counted over the model.

    `savers` are the layers of the stage whose backward reads them, first to last: they leave with the last one, and are
    needed until the first. `last_use` is the last layer of the stage that saves or is given them. Only those that are
    `is_movable` are large enough to leave; products are what convolutions and matrix products gave. `number` tells
    storages of a stage apart.
    """

    number: int
    num_bytes: int
    count: int
    maker: int
    savers: tuple[int, ...]
    last_use: int
    is_movable: bool
    is_product: bool

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.num_bytes * self.count

    @property
    def owner(self) -> int:
        """The layer with whose copy they leave."""
        return self.savers[-1]

    @property
    def is_own(self) -> bool:
        """Whether no layer but its maker ever sees it."""
        return self.last_use == self.maker

    def is_input_of(self, first: int) -> bool:
        """Whether a segment that begins with layer `first` is given it."""
        return self.maker < first <= self.last_use


def made_storages(profile: ModelProfile, first: int, end: int, least_bytes: int) -> tuple[Storage, ...]:
    """Return what layers `first` up to `end` make that is saved, kept for a recompute or passed on.

    What a stage is given by another is in its receive buffer whatever the plan, and not among them. Storages below
    `least_bytes` stay.
    """
    layer_storages = profile_storages(profile).storages
    found: list[Storage] = []
    for maker in range(first, end):
        for one in layer_storages[maker]:
            savers = tuple(sorted(maker + ahead for ahead in one.savers if maker + ahead < end))
            last_use = min(end - 1, max(maker + one.last_use, *savers, maker))
            if savers or one.is_product or last_use > maker:
                is_movable = one.num_bytes >= least_bytes
                found.append(
                    Storage(
                        len(found), one.num_bytes, one.count, maker, savers, last_use, is_movable, one.is_product
                    )
                )  # fmt: skip
    return tuple(found)


def saved_storages(profile: ModelProfile, first: int, end: int, least_bytes: int = 0) -> tuple[Storage, ...]:
    """Return those of them that a backward of the stage reads."""
    return tuple(one for one in made_storages(profile, first, end, least_bytes) if one.savers)

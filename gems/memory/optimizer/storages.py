"""The storages of a stage by its layers, as the plan's programme sees them: who makes, saves and is given each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from gems.memory.layer_storages import Storage, made_storages
from gems.memory.stage_storages import Layers, layers_of_profile
from gems.profile import LayerProfile, ModelProfile


@dataclass(frozen=True)
class StageLayers:
    """The layers `first` up to `end` of a model, and the storages that they make and that matter to a plan."""

    first: int
    end: int
    layers: tuple[LayerProfile, ...]
    storages: tuple[Storage, ...]
    told: Layers

    @cached_property
    def full_bytes(self) -> dict[int, int]:
        """What a layer has saved, wherever in the stage it was made, by layer."""
        found = dict.fromkeys(range(self.first, self.end), 0)
        for each in self.storages:
            for saver in each.savers:
                found[saver] += each.total_bytes
        return found

    @cached_property
    def shared(self) -> tuple[Storage, ...]:
        """The storages that several layers see."""
        return tuple(each for each in self.storages if not each.is_own)

    @cached_property
    def own_bytes(self) -> dict[int, int]:
        """What only the layer itself sees and saves, by layer."""
        return self._own(lambda each: bool(each.savers))

    @cached_property
    def own_movable_bytes(self) -> dict[int, int]:
        """The part of `own_bytes` that a copy takes."""
        return self._own(lambda each: bool(each.savers) and each.is_movable)

    @cached_property
    def own_product_bytes(self) -> dict[int, int]:
        """What only the layer itself sees and a cheap second run keeps, by layer."""
        return self._own(lambda each: each.is_product)

    @cached_property
    def own_cheap_bytes(self) -> dict[int, int]:
        """What only the layer itself sees and saves and a cheap second run brings back, by layer."""
        return self._own(lambda each: bool(each.savers) and not each.is_product)

    @cached_property
    def own_let_go_bytes(self) -> dict[int, int]:
        """The part of `own_product_bytes` that nobody has saved: the second run lets it go where it uses it."""
        return self._own(lambda each: each.is_product and not each.savers)

    def layer(self, layer: int) -> LayerProfile:
        """Return a layer by its number in the model."""
        return self.layers[layer - self.first]

    def _own(self, counts: Callable[[Storage], bool]) -> dict[int, int]:
        found = dict.fromkeys(range(self.first, self.end), 0)
        for each in self.storages:
            if each.is_own and counts(each):
                found[each.maker] += each.total_bytes
        return found


def stage_layers(profile: ModelProfile, first: int, end: int, least_bytes: int) -> StageLayers:
    """Return the layers `first` up to `end` with the storages that they make; storages below `least_bytes` stay."""
    storages = made_storages(profile, first, end, least_bytes)
    return StageLayers(first, end, profile.layers[first:end], storages, layers_of_profile(profile))

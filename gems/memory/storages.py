"""The storages of a stage: the layers and segments that make, save and pass them on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache, partial
from typing import Any

import numpy as np

from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.residency import Key
from gems.profile import ModelProfile
from gems.profile.model_profile import Saved, saved_from
from gems.profile.spans import Spans
from gems.schedule.schedule import Schedule

# sizes of caches
MAX_STAGES = 256
_MAX_PROFILES = 4


@dataclass(frozen=True, slots=True)
class Storage:
    """`count` equal storages of `num_bytes` each, made by layer `maker` (counted over the model).

    Attributes:
        number: distinguishes the storages of a stage.
        savers: the layers of the stage whose backward reads them, in order. They leave with the
            last one, and are needed until the backward of the first.
        last_use: the last layer of the stage that saves or receives them.
        is_movable: whether they are large enough to be moved.
        is_product: whether a convolution or a matrix product made them.
        is_passed_on: whether a later stage receives them, too.
        readers: later layers of the stage whose weight gradients read them.
        conv_savers: the savers in which a convolution saves them.
    """

    number: int
    num_bytes: int
    count: int
    maker: int
    savers: tuple[int, ...]
    last_use: int
    is_movable: bool
    is_product: bool
    is_passed_on: bool
    readers: tuple[int, ...]
    conv_savers: tuple[int, ...] = ()

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return self.num_bytes * self.count

    @property
    def owner(self) -> int:
        """The layer with whose copy they leave."""
        return self.savers[-1]


def saved_storages(
    profile: ModelProfile, first: int, end: int, least_bytes: int = 0
) -> tuple[Storage, ...]:
    """Return the storages of layers `first` up to `end` that their backward reads."""
    return tuple(
        storage
        for storage in profile_storages(profile).made(first, end, least_bytes)
        if storage.savers
    )


@dataclass(frozen=True, slots=True)
class Group:
    """Storages of a stage that are treated alike, in terms of segments.

    Segment `maker` makes them, `savers` save them, and `last_use` is the last one that receives
    them; for storages that the stage passes on, it is one past the last segment. `readers` are the
    later segments whose weight gradients read them. Only segments of `movers` (None: any) may
    offload them.
    """

    maker: int
    savers: tuple[int, ...]
    last_use: int
    is_movable: bool
    is_product: bool
    readers: tuple[int, ...] = ()
    movers: tuple[int, ...] | None = None

    def is_movable_by(self, segment: int) -> bool:
        """Return whether a segment may offload them."""
        return self.is_movable and (self.movers is None or segment in self.movers)


class Layers:
    """The layers of a profile with their storages and tables, made once per profile."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.spans = Spans(profile)
        self.storages = tuple(
            _layer_storages(profile, index) for index in range(profile.num_layers)
        )
        # cached, since plans differ in few stages
        self.stage = lru_cache(MAX_STAGES)(partial(StageStorages, self))
        self.made = lru_cache(MAX_STAGES)(self._made)
        self.first_forward_peak_bytes = cache(self._first_forward_peak_bytes)

    def _made(self, first: int, end: int, least_bytes: int) -> tuple[Storage, ...]:
        """Return the storages of layers `first` up to `end` that outlive their layer's forward.

        They are saved, kept for a recompute, or passed on. The inputs of the stage are in its
        receive buffer under any plan, so they are not included. Storages below `least_bytes` are
        not movable.
        """
        storages: list[Storage] = []
        for maker in range(first, end):
            for saved in self.storages[maker]:
                savers, readers, convs = (
                    tuple(sorted(maker + ahead for ahead in aheads if maker + ahead < end))
                    for aheads in (saved.savers, saved.weight_readers, saved.conv_savers)
                )
                last_use = min(end - 1, max(maker + saved.last_use, *savers, maker))
                if savers or saved.is_product or last_use > maker:
                    storages.append(
                        Storage(
                            len(storages),
                            saved.num_bytes,
                            saved.count,
                            maker,
                            savers,
                            last_use,
                            saved.num_bytes >= least_bytes,
                            saved.is_product,
                            maker + saved.last_use >= end,
                            readers,
                            convs,
                        )
                    )
        return tuple(storages)

    def _first_forward_peak_bytes(self, first: int, end: int, is_selective: bool) -> int:
        """Return the peak bytes of a forward that will be recomputed, without its inputs.

        It covers layers `first` up to `end`. It saves nothing, or, if `is_selective`, the results
        of convolutions and matrix products.
        """
        passing: list[tuple[int, Saved]] = []
        most = kept_bytes = 0
        for index in range(first, end):
            passing = [
                (maker, storage) for maker, storage in passing if maker + storage.last_use >= index
            ]
            earlier = sum(
                storage.total_bytes
                for _, storage in passing
                if not (is_selective and storage.is_product)
            )
            layer = self.profile.layers[index]
            own = (
                layer.cheap_first_peak_bytes if is_selective else layer.plain_peak_bytes
            ) or layer.forward_peak_bytes
            most = max(most, kept_bytes + earlier + own)
            passing += [(index, storage) for storage in self.storages[index] if storage.last_use]
            kept_bytes += layer.cheap_bytes if is_selective else 0
        return most

    def recompute_peak_bytes(self, first: int, end: int, is_selective: bool) -> int:
        """Return the peak bytes of a recompute, beyond its inputs and the bytes that forward kept.

        A selective recompute frees the results of products after their use, unless they are saved
        or passed on.
        """
        if not is_selective:
            return as_bytes(self.spans.forward_peak[first, end])
        kept_bytes = most = 0
        for index in range(first, end):
            layer = self.profile.layers[index]
            before = unsaved = 0
            if index > first:
                before = as_bytes(self.spans.stash[first, index])
                outside_bytes = sum(
                    num_bytes for back, num_bytes in layer.unsaved_from if index - back < first
                )
                unsaved = layer.unsaved_input_bytes - outside_bytes
            most = max(
                most,
                before
                - kept_bytes
                + unsaved
                + (layer.cheap_peak_bytes or layer.forward_peak_bytes),
            )
            kept_bytes += layer.cheap_bytes
        return most


class StageStorages:
    """The storages that a stage makes, in groups, by the segments of a plan."""

    def __init__(
        self,
        layers: Layers,
        segments: Sequence[Segment],
        least_bytes: int,
        only_conv_inputs: bool = False,
    ) -> None:
        self.layers = layers
        self.num_segments = len(segments)
        self.is_selective = tuple(segment.choice is Choice.SELECTIVE for segment in segments)
        self.spans_of = tuple((segment.first, segment.end) for segment in segments)
        self.num_bytes: dict[Key, int] = {}
        self.saves: list[list[Group]] = [[] for _ in segments]
        self.makes: list[list[Group]] = [[] for _ in segments]
        self.takes: list[list[Group]] = [[] for _ in segments]
        self.hands: list[list[Group]] = [[] for _ in segments]
        self.weights_read: list[list[Group]] = [[] for _ in segments]
        # inputs of the stage that may leave: the part that the first layer's weight gradient reads,
        # and the rest
        input_bytes = layers.profile.given_bytes(segments[0].first)
        first_layer = layers.profile.layers[segments[0].first]
        read_bytes = min(input_bytes, first_layer.held_input_bytes)
        self.given = tuple(
            Group(-1, (0,), 0, input_bytes >= least_bytes, False, (0,) * is_read)
            for is_read in (True, False)
        )
        self.num_bytes |= dict(zip(self.given, (read_bytes, input_bytes - read_bytes), strict=True))
        # by segment, the bytes of inputs that weight gradients of later layers than its first read
        self._inputs_further_on = [0 for _ in segments]
        groups: dict[Group, None] = {}
        segment_of = {
            layer: number for number, span in enumerate(self.spans_of) for layer in range(*span)
        }
        for storage in layers.made(segments[0].first, segments[-1].end, least_bytes):
            maker = segment_of[storage.maker]
            savers, readers, convs = (
                tuple(sorted({segment_of[at] for at in layers_}))
                for layers_ in (storage.savers, storage.readers, storage.conv_savers)
            )
            last_use = len(segments) if storage.is_passed_on else segment_of[storage.last_use]
            later = tuple(reader for reader in readers if reader > maker)
            movers = convs if only_conv_inputs else None
            group = Group(
                maker, savers, last_use, storage.is_movable, storage.is_product, later, movers
            )
            groups[group] = None
            self.num_bytes[group] = self.num_bytes.get(group, 0) + storage.total_bytes
            for layer in storage.readers:
                if segment_of[layer] > maker and layer > segments[segment_of[layer]].first:
                    self._inputs_further_on[segment_of[layer]] += storage.total_bytes
        for group in groups:
            self.makes[group.maker].append(group)
            for saver in group.savers:
                self.saves[saver].append(group)
            for reader in group.readers:
                self.weights_read[reader].append(group)
            for segment in range(group.maker, min(group.last_use, len(segments))):
                self.hands[segment].append(group)
            for segment in range(group.maker + 1, min(group.last_use + 1, len(segments))):
                self.takes[segment].append(group)

    def held_for_weights_bytes(self, segment: int) -> int:
        """Return the bytes that a segment holds from I to W, without inputs and output gradient."""
        first, end = self.spans_of[segment]
        held_bytes = (
            as_bytes(self.layers.spans.held_for_weights[first, end])
            - self._inputs_further_on[segment]
        )
        is_last = segment == self.num_segments - 1
        return held_bytes + (
            0 if is_last else self.layers.profile.layers[end - 1].held_output_grad_bytes
        )

    def unsaved_product_bytes(self, segment: int) -> int:
        """Return the bytes of products that selective recomputation keeps for nothing else."""
        if not self.is_selective[segment]:
            return 0
        others = {*self.saves[segment], *self.hands[segment]}
        return self.total(g for g in self.makes[segment] if g.is_product and g not in others)

    def total(self, groups: Iterable[Key]) -> int:
        """Return the bytes of groups."""
        return sum(self.num_bytes[group] for group in groups)


def stage_storages(
    profile: ModelProfile, plan: MemoryPlan, schedule: Schedule, stage: int
) -> StageStorages:
    """Return the storages of a stage by its segments, or by one if it runs whole."""
    segments = plan.stages[stage]
    if schedule.num_segments[stage] is None and len(segments) > 1:
        segments = (replace(segments[0], end=segments[-1].end),)
    return profile_storages(profile).stage(segments, plan.least_bytes, plan.only_conv_inputs)


_profiles: dict[int, Layers] = {}


def profile_storages(profile: ModelProfile) -> Layers:
    """Return the layers of a profile, from a small cache."""
    layers = _profiles.pop(id(profile)) if id(profile) in _profiles else Layers(profile)
    _profiles[id(profile)] = layers
    while len(_profiles) > _MAX_PROFILES:
        del _profiles[next(iter(_profiles))]
    return layers


def _layer_storages(profile: ModelProfile, index: int) -> tuple[Saved, ...]:
    """Return the storages of a layer that are saved or passed on.

    If a profile has sums only, the part of the output that the layer saves itself, and the part
    that is never saved, follow from the sums of the next layer, for tensors not carried further.
    """
    layer = profile.layers[index]
    is_known = layer.passing or layer.saved != saved_from(
        layer.stash_bytes, layer.saved_later, layer.cheap_bytes
    )
    if is_known or index + 1 == profile.num_layers:
        return (*layer.saved, *layer.passing)
    after = profile.layers[index + 1]
    unsaved = max(
        0, after.unsaved_input_bytes - sum(num_bytes for _, num_bytes in after.unsaved_from)
    )
    saved_next = sum(storage.total_bytes for storage in layer.saved if storage.last_use)
    unsaved = min(max(unsaved, saved_next), layer.output_bytes)
    handed = layer.output_bytes - unsaved
    storages = []
    for storage in layer.saved:
        part = 0 if storage.last_use else min(handed, storage.num_bytes)
        handed -= part
        storages += [
            replace(storage, num_bytes=part, last_use=1),
            replace(storage, num_bytes=storage.num_bytes - part),
        ]
    if after.held_input_bytes:
        storages = [
            replace(storage, weight_readers=(1,)) if storage.last_use else storage
            for storage in storages
        ]
    storages.append(Saved(max(0, unsaved - saved_next), (), 1))
    return tuple(storage for storage in storages if storage.num_bytes)


def as_bytes(value: float | np.floating[Any]) -> int:
    """Return an entry of a table as whole bytes."""
    return round(float(value))

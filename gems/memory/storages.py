"""The storages that the layers of a stage make.

Who makes, saves and passes them on, by layer and by segment.
"""

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

MAX_STAGES = 256  # whose storages are kept
_MAX_PROFILES = 4  # likewise


@dataclass(frozen=True, slots=True)
class Storage:
    """`count` equal storages of `num_bytes` each that layer `maker` makes.

    Layers are counted over the model.
    `savers` are the layers of the stage whose backward reads them, first to last: they leave with
    the last one, and are needed until the first. `last_use` is the last layer of the stage that
    saves or is given them, and `is_passed_on` whether a later stage is given them too. `readers`
    are later layers of the stage whose weight gradients read them, `conv_savers` the savers in
    which a convolution saves them. Only those that are `is_movable` are large enough to leave;
    products are what convolutions and matrix products gave. `number` tells storages of a stage
    apart.
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
    """Return the storages that layers `first` up to `end` make and that their backward reads.

    See `Layers.made`.
    """
    return tuple(
        one for one in profile_storages(profile).made(first, end, least_bytes) if one.savers
    )


@dataclass(frozen=True, slots=True)
class Group:
    """Storages of a stage that share one fate.

    Made in segment `maker`, saved by `savers`, last given to `last_use`.
    What the stage passes on is given last to the segment after its last one. `readers` are the
    later segments whose weight gradients read them. They may leave only once a segment of `movers`
    has saved them; None stands for any.
    """

    maker: int
    savers: tuple[int, ...]
    last_use: int
    is_movable: bool
    is_product: bool
    readers: tuple[int, ...] = ()
    movers: tuple[int, ...] | None = None

    def is_movable_by(self, segment: int) -> bool:
        """Return whether they may leave once a segment has saved them."""
        return self.is_movable and (self.movers is None or segment in self.movers)


class Layers:
    """The layers of a profile with their storages and tables, made once per profile."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.spans = Spans(profile)
        self.storages = tuple(
            _layer_storages(profile, index) for index in range(profile.num_layers)
        )
        # a stage by its segments and the size from which storages are moved: plans differ in few
        # stages
        self.stage = lru_cache(MAX_STAGES)(partial(StageStorages, self))
        self.made = lru_cache(MAX_STAGES)(self._made)
        self.first_forward_peak_bytes = cache(self._first_forward_peak_bytes)

    def _made(self, first: int, end: int, least_bytes: int) -> tuple[Storage, ...]:
        """Return the storages of some layers that are saved, kept for a recompute or passed on.

        The layers are `first` up to `end`. The inputs of a stage are in its receive buffer under
        any plan, and are not included. Storages below `least_bytes` stay.
        """
        found: list[Storage] = []
        for maker in range(first, end):
            for one in self.storages[maker]:
                savers, readers, convs = (
                    tuple(sorted(maker + ahead for ahead in aheads if maker + ahead < end))
                    for aheads in (one.savers, one.weight_readers, one.conv_savers)
                )
                last_use = min(end - 1, max(maker + one.last_use, *savers, maker))
                if savers or one.is_product or last_use > maker:
                    found.append(
                        Storage(
                            len(found),
                            one.num_bytes,
                            one.count,
                            maker,
                            savers,
                            last_use,
                            one.num_bytes >= least_bytes,
                            one.is_product,
                            maker + one.last_use >= end,
                            readers,
                            convs,
                        )
                    )
        return tuple(found)

    def _first_forward_peak_bytes(self, first: int, end: int, is_selective: bool) -> int:
        """Return the peak bytes of a forward that will be recomputed, without its inputs.

        It covers layers `first` up to `end`. Nothing is kept of it, or, with `is_selective`, the
        results of convolutions and matrix products.
        """
        passing: list[tuple[int, Saved]] = []
        most = kept = 0
        for index in range(first, end):
            passing = [(maker, one) for maker, one in passing if maker + one.last_use >= index]
            earlier = sum(
                one.total_bytes for _, one in passing if not (is_selective and one.is_product)
            )
            layer = self.profile.layers[index]
            own = (
                layer.cheap_first_peak_bytes if is_selective else layer.plain_peak_bytes
            ) or layer.forward_peak_bytes
            most = max(most, kept + earlier + own)
            passing += [(index, one) for one in self.storages[index] if one.last_use]
            kept += layer.cheap_bytes if is_selective else 0
        return most

    def recompute_peak_bytes(self, first: int, end: int, is_selective: bool) -> int:
        """Return the peak bytes of a recompute, beyond its inputs and the bytes that forward kept.

        In a selective recompute, the results of products are freed where they are used, unless they
        are saved or passed on.
        """
        if not is_selective:
            return as_bytes(self.spans.forward_peak[first, end])
        kept = most = 0
        for index in range(first, end):
            layer = self.profile.layers[index]
            before = unsaved = 0
            if index > first:
                before = as_bytes(self.spans.stash[first, index])
                given = sum(
                    num_bytes for back, num_bytes in layer.unsaved_from if index - back < first
                )
                unsaved = layer.unsaved_input_bytes - given
            most = max(
                most, before - kept + unsaved + (layer.cheap_peak_bytes or layer.forward_peak_bytes)
            )
            kept += layer.cheap_bytes
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
        # what the stage is given, where that leaves: what its first layer's weight gradient reads,
        # and the rest
        given = layers.profile.given_bytes(segments[0].first)
        first_layer = layers.profile.layers[segments[0].first]
        read = min(given, first_layer.held_input_bytes)
        self.given = tuple(
            Group(-1, (0,), 0, given >= least_bytes, False, (0,) * is_read)
            for is_read in (True, False)
        )
        self.num_bytes |= dict(zip(self.given, (read, given - read), strict=True))
        # inputs of a segment that the weight gradients of its other layers than the first read
        self._inputs_further_on = [0 for _ in segments]
        groups: dict[Group, None] = {}
        segment_of = {
            layer: number for number, span in enumerate(self.spans_of) for layer in range(*span)
        }
        for one in layers.made(segments[0].first, segments[-1].end, least_bytes):
            maker = segment_of[one.maker]
            savers, readers, convs = (
                tuple(sorted({segment_of[at] for at in each}))
                for each in (one.savers, one.readers, one.conv_savers)
            )
            last_use = len(segments) if one.is_passed_on else segment_of[one.last_use]
            later = tuple(reader for reader in readers if reader > maker)
            movers = convs if only_conv_inputs else None
            group = Group(maker, savers, last_use, one.is_movable, one.is_product, later, movers)
            groups[group] = None
            self.num_bytes[group] = self.num_bytes.get(group, 0) + one.total_bytes
            for layer in one.readers:
                if segment_of[layer] > maker and layer > segments[segment_of[layer]].first:
                    self._inputs_further_on[segment_of[layer]] += one.total_bytes
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
        """Return the bytes that a segment keeps from I to W, except its inputs and the stage's output gradient."""
        first, end = self.spans_of[segment]
        held = (
            as_bytes(self.layers.spans.held_for_weights[first, end])
            - self._inputs_further_on[segment]
        )
        is_last = segment == self.num_segments - 1
        return held + (0 if is_last else self.layers.profile.layers[end - 1].held_output_grad_bytes)

    def total(self, groups: Iterable[Key]) -> int:
        """Return the bytes of groups."""
        return sum(self.num_bytes[group] for group in groups)


def stage_storages(
    profile: ModelProfile, plan: MemoryPlan, schedule: Schedule, stage: int
) -> StageStorages:
    """Return the storages of a stage by the segments in which it runs.

    One if the schedule has it whole.
    """
    segments = plan.stages[stage]
    if schedule.num_segments[stage] is None and len(segments) > 1:
        segments = (replace(segments[0], end=segments[-1].end),)
    return profile_storages(profile).stage(segments, plan.least_bytes, plan.only_conv_inputs)


_profiles: dict[int, Layers] = {}


def profile_storages(profile: ModelProfile) -> Layers:
    """Return the layers of a profile; those of the last few profiles are kept."""
    found = _profiles.pop(id(profile)) if id(profile) in _profiles else Layers(profile)
    _profiles[id(profile)] = found
    while len(_profiles) > _MAX_PROFILES:
        del _profiles[next(iter(_profiles))]
    return found


def _layer_storages(profile: ModelProfile, index: int) -> tuple[Saved, ...]:
    """Return the storages that a layer makes and that are saved or passed on.

    A profile that only knows sums does not say what of its output a layer saves itself, nor what
    nobody saves: the sums of the next layer tell, for tensors that are not carried further.
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
    saved_next = sum(one.total_bytes for one in layer.saved if one.last_use)
    unsaved = min(max(unsaved, saved_next), layer.output_bytes)
    handed = layer.output_bytes - unsaved
    storages = []
    for one in layer.saved:
        part = 0 if one.last_use else min(handed, one.num_bytes)
        handed -= part
        storages += [
            replace(one, num_bytes=part, last_use=1),
            replace(one, num_bytes=one.num_bytes - part),
        ]
    if after.held_input_bytes:
        storages = [replace(one, weight_readers=(1,)) if one.last_use else one for one in storages]
    storages.append(Saved(max(0, unsaved - saved_next), (), 1))
    return tuple(one for one in storages if one.num_bytes)


def as_bytes(value: float | np.floating[Any]) -> int:
    """Return an entry of a table as whole bytes."""
    return round(float(value))

"""The storages of a stage by its segments: who makes, saves and passes them on, and peaks of each segment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.memory.residency import Key
from gems.profile import ModelProfile
from gems.profile.saved_storages import Saved, saved_from
from gems.profile.spans import Spans
from gems.schedule.schedule import Schedule

MAX_STAGES = 256  # whose storages are kept


@dataclass(frozen=True, slots=True)
class Group:
    """Storages of a stage that share one fate: made in segment `maker`, saved by `savers`, last given to `last_use`.

    What the stage passes on is given last to the segment after its last one. `readers` are the later segments whose
    weight gradients read them.
    """

    maker: int
    savers: tuple[int, ...]
    last_use: int
    is_movable: bool
    is_product: bool
    readers: tuple[int, ...] = ()


class Layers:
    """The layers of a profile with their storages and tables, made once per profile."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile
        self.spans = Spans(profile)
        self.storages = tuple(_told_apart(profile, index) for index in range(profile.num_layers))
        self._first_runs: dict[tuple[int, int, bool], int] = {}
        self._stages = lru_cache(MAX_STAGES)(partial(StageStorages, self))

    def stage(self, segments: tuple[Segment, ...], least_bytes: int) -> StageStorages:
        """Return the storages of a stage by its segments, from a cache: plans differ in few stages."""
        return self._stages(segments, least_bytes)

    def first_forward_peak_bytes(self, first: int, end: int, is_selective: bool) -> int:
        """Return the peak bytes of a forward of layers first up to end that will be recomputed, without its inputs.

        Nothing is kept of it, or with `is_selective` what convolutions and matrix products gave.
        """
        key = (first, end, is_selective)
        if key not in self._first_runs:
            self._first_runs[key] = self._first_forward_peak(first, end, is_selective)
        return self._first_runs[key]

    def selective_recompute_peak_bytes(self, first: int, end: int) -> int:
        """Return the peak bytes that a selective recompute makes, beyond its inputs and what the forward kept.

        What products gave is freed where it is used, unless it is saved or passed on.
        """
        stash, layers = self.spans.stash[first], self.profile.layers
        kept = most = 0
        for index in range(first, end):
            layer = layers[index]
            before = as_bytes(stash[index]) if index > first else 0
            own = layer.cheap_peak_bytes or layer.forward_peak_bytes
            most = max(most, before - kept + self._unsaved_within(first, index) + own)
            kept += layer.cheap_bytes
        return most

    def _first_forward_peak(self, first: int, end: int, is_selective: bool) -> int:
        passing: list[tuple[int, Saved]] = []
        most = kept = 0
        for index in range(first, end):
            passing = [(maker, one) for maker, one in passing if maker + one.last_use >= index]
            earlier = sum(one.total_bytes for _, one in passing if not (is_selective and one.is_product))
            layer = self.profile.layers[index]
            layer_storages = layer.cheap_first_peak_bytes if is_selective else layer.plain_peak_bytes
            own = layer_storages or layer.forward_peak_bytes
            most = max(most, kept + earlier + own)
            passing += [(index, one) for one in self.storages[index] if one.last_use]
            kept += layer.cheap_bytes if is_selective else 0
        return most

    def _unsaved_within(self, first: int, index: int) -> int:
        """Return what a layer is given that was made from `first` on and not saved by an earlier layer."""
        layer = self.profile.layers[index]
        if index == first:
            return 0
        return layer.unsaved_input_bytes - sum(
            num_bytes for back, num_bytes in layer.unsaved_from if index - back < first
        )


class StageStorages:
    """The storages that a stage makes, in groups, by the segments of a plan."""

    def __init__(self, layers: Layers, segments: Sequence[Segment], least_bytes: int) -> None:
        self.layers = layers
        self.is_selective = tuple(segment.choice is Choice.SELECTIVE for segment in segments)
        self.spans_of = tuple((segment.first, segment.end) for segment in segments)
        self.num_bytes: dict[Key, int] = {}
        self.saves: list[list[Group]] = [[] for _ in segments]
        self.makes: list[list[Group]] = [[] for _ in segments]
        self.takes: list[list[Group]] = [[] for _ in segments]
        self.hands: list[list[Group]] = [[] for _ in segments]
        # inputs of a segment that the weight gradients of its other layers than the first read
        self._inputs_further_on = [0 for _ in segments]
        self.weights_read: list[list[Group]] = [[] for _ in segments]
        groups: dict[Group, None] = {}
        for group, num_bytes in self._groups(least_bytes):
            groups[group] = None
            self.num_bytes[group] = self.num_bytes.get(group, 0) + num_bytes
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

    @property
    def num_segments(self) -> int:
        """Number of segments."""
        return len(self.spans_of)

    def held_for_weights_bytes(self, segment: int) -> int:
        """Return the bytes that a segment keeps from I to W, except its inputs and the stage's output gradient."""
        first, end = self.spans_of[segment]
        held = as_bytes(self.layers.spans.held_for_weights[first, end]) - self._inputs_further_on[segment]
        if segment == self.num_segments - 1:
            return held
        return held + self.layers.profile.layers[end - 1].held_output_grad_bytes

    def total(self, groups: Iterable[Key]) -> int:
        """Return the bytes of groups."""
        return sum(self.num_bytes[group] for group in groups)

    def _groups(self, least_bytes: int) -> Iterator[tuple[Group, int]]:
        first, end = self.spans_of[0][0], self.spans_of[-1][1]
        segment_of = [number for number, (begin, stop) in enumerate(self.spans_of) for _ in range(begin, stop)]
        for layer in range(first, end):
            maker = segment_of[layer - first]
            for one in self.layers.storages[layer]:
                savers, readers = (
                    tuple(sorted({segment_of[layer + ahead - first] for ahead in aheads if layer + ahead < end}))
                    for aheads in (one.savers, one.weight_readers)
                )  # fmt: skip
                last = layer + one.last_use
                last_use = segment_of[last - first] if last < end else self.num_segments
                if savers or one.is_product or last_use > maker:
                    is_movable = one.num_bytes >= least_bytes
                    readers = tuple(reader for reader in readers if reader > maker)
                    for ahead in one.weight_readers if readers else ():
                        reader = segment_of[layer + ahead - first] if layer + ahead < end else maker
                        if reader > maker and layer + ahead > self.spans_of[reader][0]:
                            self._inputs_further_on[reader] += one.total_bytes
                    group = Group(maker, savers, last_use, is_movable, one.is_product, readers)
                    yield group, one.total_bytes


def segments_of(plan: MemoryPlan, schedule: Schedule, stage: int) -> tuple[Segment, ...]:
    """Return the segments in which a stage runs: one if the schedule has it whole."""
    segments = plan.stages[stage]
    if schedule.num_segments[stage] is None and len(segments) > 1:
        return (replace(segments[0], end=segments[-1].end),)
    return segments


def profile_storages(profile: ModelProfile) -> Layers:
    """Return the layers of a profile; those of the last few profiles are kept."""
    return _layers(_Same(profile))


class _Same:
    """A profile as a key: equal to itself only."""

    def __init__(self, profile: ModelProfile) -> None:
        self.profile = profile

    def __hash__(self) -> int:
        return id(self.profile)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.profile is other.profile


@lru_cache(maxsize=4)
def _layers(same: _Same) -> Layers:
    return Layers(same.profile)


def _told_apart(profile: ModelProfile, index: int) -> tuple[Saved, ...]:
    """Return the storages that a layer makes and that are saved or passed on.

    A profile that only knows sums does not say what of its output a layer saves itself, nor what nobody saves: the sums
    of the next layer tell, for tensors that are not carried further.
    """
    layer = profile.layers[index]
    is_told = layer.passing or layer.saved != saved_from(layer.stash_bytes, layer.saved_later, layer.cheap_bytes)
    if is_told or index + 1 == profile.num_layers:
        return (*layer.saved, *layer.passing)
    after = profile.layers[index + 1]
    unsaved = max(0, after.unsaved_input_bytes - sum(num_bytes for _, num_bytes in after.unsaved_from))
    saved_next = sum(one.total_bytes for one in layer.saved if one.last_use)
    unsaved = min(max(unsaved, saved_next), layer.output_bytes)
    handed = layer.output_bytes - unsaved
    storages = []
    for one in layer.saved:
        part = 0 if one.last_use else min(handed, one.num_bytes)
        handed -= part
        storages += [replace(one, num_bytes=part, last_use=1), replace(one, num_bytes=one.num_bytes - part)]
    if after.held_input_bytes:
        storages = [replace(one, weight_readers=(1,)) if one.last_use else one for one in storages]
    storages.append(Saved(max(0, unsaved - saved_next), (), 1))
    return tuple(one for one in storages if one.num_bytes)


def as_bytes(value: float | np.floating[Any]) -> int:
    """Return an entry of a table as whole bytes."""
    return round(float(value))

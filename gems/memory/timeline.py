"""The bytes of a rank along its schedule under a memory plan, by storage, and segment costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import pairwise, repeat
from typing import Any, NamedTuple

from gems.memory.model import TABLES, Counts, HeldCounts, Optimizer, boundary_tensors
from gems.memory.plan import KEEP, MemoryPlan, Segment
from gems.memory.residency import Residency, Script, State, inputs_leave
from gems.memory.slots import StageKey, grown_slots, split_stages
from gems.memory.storages import (
    MAX_STAGES,
    Group,
    StageStorages,
    as_bytes,
    profile_storages,
    stage_storages,
)
from gems.memory.strips import (
    BetweenStrips,
    Change,
    boundary_sizes,
    held_masks,
    in_passing,
    shared_slot_bytes,
    slot_bytes,
    strip_shares,
    strip_states,
)
from gems.profile import LayerProfile, ModelProfile
from gems.profile.spans import Spans
from gems.profile.strip_profile import StripProfile
from gems.schedule.action import COMPUTE_KINDS, COPY_KINDS, WAIT_KINDS, Action, Kind
from gems.schedule.costs import SegmentCosts, StageCosts
from gems.schedule.schedule import Schedule

MicroBatchKey = tuple[int, int, int | None]  # direction, stage, micro-batch
OWN_KINDS = COMPUTE_KINDS | COPY_KINDS | WAIT_KINDS
_TIMES = ("forward", "input_grad", "weight_grad", "recompute", "split")
# of a micro-batch on a stage that leaves the device whole
_COPIED: Script = tuple(
    (kind, 0) for kind in (Kind.F, Kind.OFFLOAD, Kind.FREE, Kind.PREFETCH, Kind.I, Kind.W)
)
# everything but stashes and weights
_BETWEEN_STAGES = tuple(zip(HeldCounts._fields, TABLES, strict=True))[2:]


class Point(NamedTuple):
    """The bytes that a rank holds during an action, including transients, and after it.

    `activation_bytes` are the saved storages on the device after the action, `moved_bytes` the size
    of a copy.
    """

    action: Action
    during_bytes: int
    device_bytes: int
    activation_bytes: int
    host_bytes: int
    moved_bytes: int = 0


@dataclass(frozen=True, slots=True)
class RankTimeline:
    """The points of a rank's schedule, one per action, in a typical step.

    `first_activation_bytes` is the peak of activations in the first steps, in which CUDA graphs are
    captured.
    """

    points: tuple[Point, ...]
    first_activation_bytes: int = 0

    @property
    def peak_bytes(self) -> int:
        """The peak on the device, including the first steps."""
        return max(
            point.during_bytes + max(0, self.first_activation_bytes - point.activation_bytes)
            for point in self.points
        )

    @property
    def peak_activation_bytes(self) -> int:
        """The peak of saved storages on the device."""
        most = max(point.activation_bytes for point in self.points)
        return max(most, self.first_activation_bytes)

    @property
    def peak_host_bytes(self) -> int:
        """The peak in host memory."""
        return max(point.host_bytes for point in self.points)


def rank_timeline(
    profile: ModelProfile,
    plan: MemoryPlan,
    schedule: Schedule,
    rank: int,
    optimizer: Optimizer,
    strips: StripProfile | None = None,
) -> RankTimeline:
    """Return the bytes along a rank's lowered schedule, by the rules of the engine's store.

    They cover libraries, parameters, gradients, optimizer state, buffers, the images of the step,
    tensors between stages, saved storages, values and gradients between segments, and the
    transients of each action. Without FREE, the bytes of a copy to host memory count as freed when
    it is posted. In `strips`, profile and plan are those of stages (`stages_as_layers`), and
    tensors between stages have the size of the largest strip. With CUDA graphs, all activations are
    in slots (`grown_slots`), which are never freed; under a memory policy there is one more slot,
    which all segments of the rank share.
    """
    is_captured, has_slots = _captures(profile, plan, schedule)
    stage_counts, actions = boundary_tensors(schedule, rank, has_slots)
    outside = _outside(profile, plan, stage_counts, optimizer, strips, has_slots)
    states = _states(profile, plan, schedule, rank, strips)
    between = None if strips is None else BetweenStrips(strips, schedule)
    device = activations = first = host = 0
    if is_captured:
        slots = _slot_bytes(profile, plan, schedule, rank, strips, has_slots)
        device = activations = max(map(max, slots.values()))
    if has_slots:
        changes = list(_changes(schedule.rank_schedules[rank], states, between))
        activations, first, device = _grown(changes, slots, schedule, strips)
        states = dict.fromkeys(states, repeat(State()))  # everything is in slots
        between = None
    if strips is not None:
        device += held_masks(strips, schedule, rank, has_slots)
    last: dict[MicroBatchKey, State] = {}
    outside_bytes = outside()
    points = []
    for action, has_run in actions:
        outside_during = outside_bytes
        outside_bytes = outside()
        if not has_run:
            continue
        if action.kind not in OWN_KINDS:
            total = outside_bytes + device
            points.append(Point(action, total, total, activations, host))
            continue
        key = (action.direction, action.stage, action.micro_batch)
        before = last.get(key, _NOTHING)
        state = last[key] = next(states[key])
        change = _UNCHANGED if between is None else between.act(action)
        others = outside_during + device - before.device_bytes
        device += state.device_bytes - before.device_bytes + change.device_bytes
        activations += state.activation_bytes - before.activation_bytes + change.activation_bytes
        host += state.host_bytes - before.host_bytes
        during = others + state.during_bytes - change.counted_bytes
        after = outside_bytes + device
        points.append(Point(action, during, after, activations, host, state.moved_bytes))
    return RankTimeline(tuple(points), first)


def _captures(profile: ModelProfile, plan: MemoryPlan, schedule: Schedule) -> tuple[bool, bool]:
    """Return whether actions run as CUDA graphs, and whether slots hold all activations."""
    is_kept = plan.policy == KEEP and not schedule.has_memory_actions
    return profile.is_captured, profile.is_captured and is_kept


def _grown(
    changes: Sequence[tuple[Action, int]],
    slots: Mapping[StageKey, Sequence[int]],
    schedule: Schedule,
    strips: StripProfile | None,
) -> tuple[int, int, int]:
    """Return the bytes of activations in slots and in the first steps, and those of slots.

    The last are 0 for slots of whole micro-batches, which `boundary_tensors` counts.
    """
    sizes = {key: slots[key][0] for key in slots}
    activations, first = grown_slots(changes, sizes, schedule.num_strips)
    if strips is None:
        return activations, first, 0
    is_split = schedule.has_split_backward
    pools = {key: sizes[key] + in_passing(strips, key[1], is_split) for key in slots}
    return activations, first, grown_slots(changes, pools, schedule.num_strips)[0]


def _changes(
    actions: Iterable[Action],
    states: Mapping[MicroBatchKey, Iterator[State]],
    between: BetweenStrips | None,
) -> Iterator[tuple[Action, int]]:
    """Yield the compute actions of a rank with the activations that each allocates or frees."""
    last: dict[MicroBatchKey, int] = {}
    for action in actions:
        if action.kind in COMPUTE_KINDS:
            key = (action.direction, action.stage, action.micro_batch)
            after = next(states[key]).activation_bytes
            change = _UNCHANGED if between is None else between.act(action)
            yield action, after - last.get(key, 0) + change.activation_bytes
            last[key] = after


def _slot_bytes(
    profile: ModelProfile,
    plan: MemoryPlan,
    schedule: Schedule,
    rank: int,
    strips: StripProfile | None,
    has_slots: bool,
) -> dict[StageKey, list[int]]:
    """Return the activation bytes of a slot of each segment of a rank, by direction and stage.

    In strips, a slot has all strips of an image, or under a memory policy one strip.
    """
    keys = schedule.placement.stages_on(rank)
    split = split_stages(schedule, rank)
    if strips is not None:
        if has_slots:
            return {key: [slot_bytes(strips, key[1], key in split)] for key in keys}
        return {key: shared_slot_bytes(strips, key[1], key in split) for key in keys}
    spans = profile_storages(profile).spans

    def one(key: StageKey, storages: StageStorages, number: int) -> int:
        span = storages.spans_of[number]
        table = spans.segment_slot if number else spans.slot
        of_weights = spans.slot_for_weights[span] if key in split else 0
        return as_bytes(table[span] + of_weights) + storages.unsaved_product_bytes(number)

    storages = {key: stage_storages(profile, plan, schedule, key[1]) for key in keys}
    return {
        key: [one(key, of_stage, number) for number in range(of_stage.num_segments)]
        for key, of_stage in storages.items()
    }


def _outside(
    profile: ModelProfile,
    plan: MemoryPlan,
    stage_counts: Counts,
    optimizer: Optimizer,
    strips: StripProfile | None,
    has_slots: bool,
) -> Callable[[], int]:
    """Return a function that returns the bytes outside of micro-batches, by `stage_counts`."""
    spans = profile_storages(profile).spans
    cuts = plan.boundaries
    static_bytes = profile.library_bytes
    sizes = [] if strips is None else list(boundary_sizes(strips, stage_counts, has_slots))
    for (_, stage), counts in stage_counts.items():
        span = (cuts[stage], cuts[stage + 1])
        static_bytes += as_bytes(optimizer.static_bytes(spans.params[span], spans.buffers[span]))
        if strips is None:
            sizes += [
                (counts, name, as_bytes(getattr(spans, table)[span]))
                for name, table in _BETWEEN_STAGES
            ]

    def outside() -> int:
        total = static_bytes
        for counts, name, num_bytes in sizes:
            total += counts[name] * num_bytes
        return total

    return outside


def _states(
    profile: ModelProfile,
    plan: MemoryPlan,
    schedule: Schedule,
    rank: int,
    strips: StripProfile | None,
) -> dict[MicroBatchKey, Iterator[State]]:
    """Return the states of each micro-batch or strip on a rank, action by action."""
    scripts = micro_batch_scripts(schedule.rank_schedules[rank])
    if strips is None:
        storages = {
            stage: stage_storages(profile, plan, schedule, stage)
            for _, stage in schedule.placement.stages_on(rank)
        }
        return {
            key: iter(micro_batch_states(storages[key[1]], script))
            for key, script in scripts.items()
        }
    return {
        key: iter(
            strip_states(
                strips.stages[key[1]][(key[2] or 0) % strips.num_strips],
                script,
                plan.least_bytes,
                schedule.inputs_leave(key[1], key[2], key[0]),
            )
        )
        for key, script in scripts.items()
    }


_NOTHING = State()
_UNCHANGED = Change()


class MicroBatch:
    """A simulation of the actions of a micro-batch on a stage.

    Besides saved storages, it holds values between segments until their last reader has run, the
    gradient between two segments, and, from I to W, the tensors that W reads.
    """

    def __init__(self, storages: StageStorages, script: Script) -> None:
        kinds = {
            kind: {segment for own_kind, segment in script if own_kind is kind} for kind in Kind
        }
        self._storages = storages
        self._recomputed = kinds[Kind.R]
        self._freed = kinds[Kind.FREE]
        self._has_backward = bool(kinds[Kind.B] or kinds[Kind.I])
        self._residency = Residency(kinds[Kind.OFFLOAD])
        self._given = storages.given if inputs_leave(script) else ()
        self._passing: dict[Group, None] = {}
        self._held_for_weights: dict[int, int] = {}
        self._used_up: dict[int, list[Group]] = {}
        self._gradient_bytes = 0
        self._moved_bytes = 0

    def act(self, kind: Kind, segment: int) -> State:
        """Run an action and return the bytes held."""
        storages = self._storages
        residency = self._residency
        layers = storages.layers
        span = storages.spans_of[segment]
        self._moved_bytes = 0
        during = self._device_bytes
        if kind is Kind.F:
            is_selective = self._has_backward and storages.is_selective[segment]
            if self._has_backward and segment not in self._recomputed:
                during += as_bytes(layers.spans.forward_peak[span])
            else:
                during += layers.first_forward_peak_bytes(*span, is_selective)
            if self._has_backward:
                is_kept = segment not in self._recomputed
                self._save(
                    storages.saves[segment] if is_kept else self._kept_for_recompute(segment),
                    segment,
                )
            is_last = segment == storages.num_segments - 1
            self._passing = {} if is_last else dict.fromkeys(storages.hands[segment])
        elif kind is Kind.R:
            during += layers.recompute_peak_bytes(*span, storages.is_selective[segment])
            self._save_recomputed(segment)
        elif kind in (Kind.B, Kind.I):
            during = self._backward(kind, segment)
        elif kind is Kind.W:
            during += as_bytes(layers.spans.weight_gradient_peak[span])
            residency.done(~segment)
            del self._held_for_weights[segment]
        elif kind is Kind.OFFLOAD:
            self._moved_bytes = storages.total(residency.offload(segment, storages.hands[segment]))
            if segment not in self._freed:
                residency.free(segment)
        elif kind is Kind.FREE:
            residency.free(segment)
        elif kind is Kind.PREFETCH:
            self._moved_bytes = storages.total(residency.prefetch(segment))
        after = self._device_bytes
        during = max(during, after) if kind is Kind.PREFETCH else during
        return State(during, after, self._activation_bytes, residency.host_bytes, self._moved_bytes)

    @property
    def _activation_bytes(self) -> int:
        return self._residency.device_bytes + sum(self._held_for_weights.values())

    @property
    def _device_bytes(self) -> int:
        passing = self._storages.total(
            group for group in self._passing if not self._residency.is_on_device(group)
        )
        # kept only for a recompute that has run; the store counts it until the backward
        used_up = self._storages.total(
            group
            for segment, groups in self._used_up.items()
            for group in groups
            if self._residency.states[group].savers == {segment}
        )
        return self._activation_bytes + passing + self._gradient_bytes - used_up

    def _save(self, groups: Sequence[Group], segment: int) -> None:
        for group in groups:
            self._residency.save(
                group, self._storages.num_bytes[group], segment, group.is_movable_by(segment)
            )

    def _kept_for_recompute(self, segment: int) -> list[Group]:
        storages = self._storages
        products = [
            group
            for group in storages.makes[segment]
            if group.is_product and storages.is_selective[segment]
        ]
        return [*(() if segment else self._given), *storages.takes[segment], *products]

    def _save_recomputed(self, segment: int) -> None:
        """Save the storages of a recompute; W of a later segment may hold the first copies."""
        storages = self._storages
        for group in storages.saves[segment]:
            is_kept = group.maker < segment or (storages.is_selective[segment] and group.is_product)
            is_second = not is_kept and group in self._residency.states
            key = ("second", group) if is_second else group
            self._residency.save(
                key, storages.num_bytes[group], segment, group.is_movable_by(segment)
            )
        self._used_up[segment] = [
            kept for kept in self._kept_for_recompute(segment) if segment not in kept.savers
        ]

    def _backward(self, kind: Kind, segment: int) -> int:
        """Run the backward of a segment and return the bytes held during it."""
        storages = self._storages
        spans = self._storages.layers.spans
        span = self._storages.spans_of[segment]
        self._moved_bytes = storages.total(self._residency.prefetch(segment))
        self._gradient_bytes = 0
        peak = spans.backward_peak if kind is Kind.B else spans.input_gradient_peak
        during = self._device_bytes - as_bytes(spans.stash[span]) + as_bytes(peak[span])
        if kind is Kind.I:
            # inputs of W are storages that other segments may hold, too
            inputs = [] if segment else [group for group in self._given if group.readers]
            self._save([*inputs, *storages.weights_read[segment]], ~segment)
            self._held_for_weights[segment] = storages.held_for_weights_bytes(segment)
        self._residency.done(segment)
        self._used_up.pop(segment, None)
        if segment:
            self._gradient_bytes = storages.layers.profile.layers[span[0] - 1].output_grad_bytes
        return during


@lru_cache(maxsize=MAX_STAGES)
def micro_batch_states(storages: StageStorages, script: Script) -> tuple[State, ...]:
    """Return the state at each action of a micro-batch on a stage; equal scripts are run once."""
    micro_batch = MicroBatch(storages, script)
    return tuple(micro_batch.act(kind, segment) for kind, segment in script)


def micro_batch_scripts(actions: Iterable[Action]) -> dict[MicroBatchKey, Script]:
    """Return the actions of each micro-batch on each stage of a rank, in their order."""
    scripts: dict[MicroBatchKey, list[tuple[Kind, int]]] = {}
    for kind, stage, micro_batch, direction, segment in actions:
        if kind in OWN_KINDS:
            scripts.setdefault((direction, stage, micro_batch), []).append((kind, segment or 0))
    return {key: tuple(script) for key, script in scripts.items()}


def stage_costs(spans: Spans, boundaries: Sequence[int]) -> StageCosts:
    """Return the costs of the stages of a partition, in seconds and bytes.

    The inputs of a stage are held as long as its activations, and count among them.
    """
    cuts = list(pairwise(boundaries))
    stages = [spans.profile.layers[first:end] for first, end in cuts]
    input_bytes = tuple(float(spans.profile.given_bytes(first)) for first in boundaries[:-1])
    times: dict[str, Any] = {
        name: tuple(_sum(stage, f"{name}_s") for stage in stages) for name in _TIMES
    }
    loads = tuple(
        tuple(share * len(shares) for share in shares)
        for shares in strip_shares(spans.profile, boundaries)
    )
    return StageCosts(
        **times,
        strip_loads=loads,
        activation=tuple(
            float(spans.stash[cut]) + more for cut, more in zip(cuts, input_bytes, strict=True)
        ),
        held_for_weights=tuple(
            float(spans.held_for_weights[cut]) + more
            for cut, more in zip(cuts, input_bytes, strict=True)
        ),
        boundary=input_bytes,
        boundary_bytes=tuple(float(stage[-1].output_bytes) for stage in stages),
        param_bytes=tuple(float(spans.params[cut]) for cut in cuts),
    )


def acting_stage_costs(
    profile: ModelProfile,
    boundaries: Sequence[int],
    least_bytes: int,
    d2h_bytes_per_s: float,
    h2d_bytes_per_s: float,
) -> StageCosts:
    """Return `stage_costs` with the costs of offloading everything that a stage saves."""
    layers = profile_storages(profile)
    copied: list[SegmentCosts] = []
    for first, end in pairwise(boundaries):
        storages = layers.stage((Segment(first, end),), least_bytes)
        copied += _segments(storages, _COPIED, d2h_bytes_per_s, h2d_bytes_per_s)
    return replace(
        stage_costs(layers.spans, boundaries),
        movable=tuple(costs.moved for costs in copied),
        copy=tuple(max(costs.copy_out, costs.copy_in) for costs in copied),
    )


def segment_costs(
    profile: ModelProfile,
    plan: MemoryPlan,
    schedule: Schedule,
    d2h_bytes_per_s: float,
    h2d_bytes_per_s: float,
) -> StageCosts:
    """Return the costs of the stages and segments of a plan, in seconds and bytes.

    The bytes are those of the micro-batch with the most copies and recomputes. A storage that
    several segments save counts in the first one, which frees it; the stage's input counts in its
    first segment.
    """
    scripts: dict[int, Script] = {}
    most: dict[int, int] = {}
    for actions in schedule.rank_schedules:
        for (_, stage, _), script in micro_batch_scripts(actions).items():
            number = sum(kind in (Kind.OFFLOAD, Kind.R) for kind, _ in script)
            if number > most.get(stage, -1):
                scripts[stage], most[stage] = script, number
    rates = d2h_bytes_per_s, h2d_bytes_per_s
    segments = tuple(
        _segments(stage_storages(profile, plan, schedule, stage), scripts[stage], *rates)
        for stage in range(schedule.num_stages)
    )
    copy = tuple(
        max(sum(segment.copy_out for segment in stage), sum(segment.copy_in for segment in stage))
        for stage in segments
    )
    stages = stage_costs(profile_storages(profile).spans, plan.boundaries)
    return replace(stages, copy=copy, segments=segments)


def _segments(
    storages: StageStorages, script: Script, d2h_bytes_per_s: float, h2d_bytes_per_s: float
) -> tuple[SegmentCosts, ...]:
    # bytes that a segment's forward and recompute newly save, and that its copies move
    saved: dict[tuple[Kind, int], int] = {}
    moved: dict[tuple[Kind, int], int] = {}
    before = 0
    for place, state in zip(script, micro_batch_states(storages, script), strict=True):
        saved[place], moved[place] = state.activation_bytes - before, state.moved_bytes
        before = state.activation_bytes
    segments = []
    for number, (first, end) in enumerate(storages.spans_of):
        profile = storages.layers.profile
        layers = profile.layers[first:end]
        input_bytes = 0 if number else profile.given_bytes(first)
        times = {name: _sum(layers, f"{name}_s") for name in _TIMES}
        if storages.is_selective[number]:
            times["recompute"] = _sum(layers, "cheap_s")
        forward = saved.get((Kind.F, number), 0)
        again = saved.get((Kind.R, number))
        apart = 0 if inputs_leave(script) else input_bytes  # else they are saved
        out, back = (moved.get((kind, number), 0) for kind in (Kind.OFFLOAD, Kind.PREFETCH))
        segments.append(
            SegmentCosts(
                **times,
                activation=float(forward + (again or 0) + apart),
                held_for_weights=float(storages.held_for_weights_bytes(number) + input_bytes),
                boundary=float((0 if again is None else forward) + apart),
                moved=float(out),
                copy_out=out / d2h_bytes_per_s,
                copy_in=back / h2d_bytes_per_s,
            )
        )
    return tuple(segments)


def _sum(layers: Sequence[LayerProfile], name: str) -> float:
    return sum(float(getattr(layer, name)) for layer in layers)

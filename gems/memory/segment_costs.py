"""Costs of stages and of their segments, in seconds and bytes, for the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from gems.memory.micro_batch import Script, micro_batch_scripts, micro_batch_states
from gems.memory.plan import MemoryPlan
from gems.memory.stage_storages import StageStorages, profile_storages, segments_of
from gems.profile import LayerProfile, ModelProfile
from gems.profile.spans import Spans
from gems.schedule.action import Kind
from gems.schedule.costs import SegmentCosts, StageCosts
from gems.schedule.schedule import Schedule

_LEAVING = (Kind.OFFLOAD, Kind.R)


def stage_costs(spans: Spans, boundaries: Sequence[int]) -> StageCosts:
    """Return the costs of the stages of a partition, in seconds and bytes.

    An input of a stage counts among its activations: it is held as long.
    """
    cuts = list(pairwise(boundaries))
    stages = [spans.profile.layers[first:end] for first, end in cuts]
    given = [float(spans.profile.given_bytes(first)) for first in boundaries[:-1]]

    def summed(name: str) -> tuple[float, ...]:
        return tuple(_sum(stage, name) for stage in stages)

    return StageCosts(
        forward=summed("forward_s"),
        input_grad=summed("input_grad_s"),
        weight_grad=summed("weight_grad_s"),
        recompute=summed("recompute_s"),
        activation=tuple(float(spans.stash[cut]) + more for cut, more in zip(cuts, given, strict=True)),
        held_for_weights=tuple(
            float(spans.held_for_weights[cut]) + more for cut, more in zip(cuts, given, strict=True)
        ),
        boundary=tuple(given),
        boundary_bytes=tuple(float(stage[-1].output_bytes) for stage in stages),
    )


def segment_costs(
    profile: ModelProfile, plan: MemoryPlan, schedule: Schedule, d2h_bytes_per_s: float, h2d_bytes_per_s: float
) -> StageCosts:
    """Return the costs of the stages and segments of a plan, in seconds and bytes.

    What segments keep and move is that of the micro-batch of which most is moved or run again. A storage that several
    segments save counts in the first of them, which lets it go; the stage's input counts in its first segment.
    """
    layers = profile_storages(profile)
    scripts = _fullest_scripts(schedule)
    segments: list[tuple[SegmentCosts, ...]] = []
    for stage in range(schedule.num_stages):
        storages = layers.stage(segments_of(plan, schedule, stage), plan.least_bytes)
        found = _amounts(storages, scripts[stage])
        segments.append(
            tuple(
                _segment(storages, number, amounts, d2h_bytes_per_s, h2d_bytes_per_s)
                for number, amounts in enumerate(found)
            )
        )
    copy = tuple(max(sum(s.copy_out for s in stage), sum(s.copy_in for s in stage)) for stage in segments)
    return replace(stage_costs(layers.spans, plan.boundaries), copy=copy, segments=tuple(segments))


@dataclass(slots=True)
class _Amounts:
    """Bytes of one segment: newly saved by its forward and by its recompute, and moved out and back."""

    forward: int = 0
    again: int = 0
    moved_out: int = 0
    moved_in: int = 0
    is_recomputed: bool = False


def _amounts(storages: StageStorages, script: Script) -> list[_Amounts]:
    found = [_Amounts() for _ in storages.spans_of]
    before = 0
    for (kind, segment), state in zip(script, micro_batch_states(storages, script), strict=True):
        mine = found[segment]
        if kind is Kind.F:
            mine.forward = state.activation_bytes - before
        elif kind is Kind.R:
            mine.again, mine.is_recomputed = state.activation_bytes - before, True
        elif kind is Kind.OFFLOAD:
            mine.moved_out = state.moved_bytes
        elif kind is Kind.PREFETCH:
            mine.moved_in = state.moved_bytes
        before = state.activation_bytes
    return found


def _segment(
    storages: StageStorages, number: int, amounts: _Amounts, d2h_bytes_per_s: float, h2d_bytes_per_s: float
) -> SegmentCosts:
    span = storages.spans_of[number]
    profile = storages.layers.profile
    layers = profile.layers[span[0] : span[1]]
    given = 0 if number else profile.given_bytes(span[0])
    return SegmentCosts(
        forward=_sum(layers, "forward_s"),
        input_grad=_sum(layers, "input_grad_s"),
        weight_grad=_sum(layers, "weight_grad_s"),
        activation=float(amounts.forward + amounts.again + given),
        recompute=_sum(layers, "cheap_s" if storages.is_selective[number] else "recompute_s"),
        held_for_weights=float(storages.held_for_weights_bytes(number) + given),
        boundary=float((amounts.forward if amounts.is_recomputed else 0) + given),
        moved=float(amounts.moved_out),
        copy_out=amounts.moved_out / d2h_bytes_per_s,
        copy_in=amounts.moved_in / h2d_bytes_per_s,
    )


def _fullest_scripts(schedule: Schedule) -> dict[int, Script]:
    """Return for each stage the actions of the micro-batch of which most segments are moved or run again."""
    found: dict[int, Script] = {}
    most: dict[int, int] = {}
    for row in schedule.rows:
        for (_, stage, _), script in micro_batch_scripts(row).items():
            number = sum(kind in _LEAVING for kind, _ in script)
            if number > most.get(stage, -1):
                found[stage], most[stage] = script, number
    return found


def _sum(layers: Sequence[LayerProfile], name: str) -> float:
    return sum(float(getattr(layer, name)) for layer in layers)

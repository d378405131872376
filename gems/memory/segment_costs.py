"""Costs of stages and of their segments, in seconds and bytes, for the simulation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from gems.memory.plan import MemoryPlan
from gems.memory.storages import StageStorages, profile_storages, stage_storages
from gems.memory.timeline import Script, micro_batch_scripts, micro_batch_states
from gems.profile import LayerProfile, ModelProfile
from gems.profile.spans import Spans
from gems.schedule.action import Kind
from gems.schedule.costs import SegmentCosts, StageCosts
from gems.schedule.schedule import Schedule

_LEAVING = (Kind.OFFLOAD, Kind.R)
_TIMES = ("forward_s", "input_grad_s", "weight_grad_s", "recompute_s")


def stage_costs(spans: Spans, boundaries: Sequence[int]) -> StageCosts:
    """Return the costs of the stages of a partition, in seconds and bytes.

    An input of a stage counts among its activations: it is held as long.
    """
    cuts = list(pairwise(boundaries))
    stages = [spans.profile.layers[first:end] for first, end in cuts]
    given = tuple(float(spans.profile.given_bytes(first)) for first in boundaries[:-1])
    forward, input_grad, weight_grad, recompute = (tuple(_sum(stage, name) for stage in stages) for name in _TIMES)
    return StageCosts(
        forward,
        input_grad,
        weight_grad,
        recompute=recompute,
        activation=tuple(float(spans.stash[cut]) + more for cut, more in zip(cuts, given, strict=True)),
        held_for_weights=tuple(
            float(spans.held_for_weights[cut]) + more for cut, more in zip(cuts, given, strict=True)
        ),
        boundary=given,
        boundary_bytes=tuple(float(stage[-1].output_bytes) for stage in stages),
    )


def segment_costs(
    profile: ModelProfile, plan: MemoryPlan, schedule: Schedule, d2h_bytes_per_s: float, h2d_bytes_per_s: float
) -> StageCosts:
    """Return the costs of the stages and segments of a plan, in seconds and bytes.

    What segments keep and move is that of the micro-batch of which most is moved or recomputed. A storage that several
    segments save counts in the first of them, which frees it; the stage's input counts in its first segment.
    """
    scripts: dict[int, Script] = {}
    most: dict[int, int] = {}
    for row in schedule.rows:
        for (_, stage, _), script in micro_batch_scripts(row).items():
            number = sum(kind in _LEAVING for kind, _ in script)
            if number > most.get(stage, -1):
                scripts[stage], most[stage] = script, number
    rates = d2h_bytes_per_s, h2d_bytes_per_s
    segments = tuple(
        _segments(stage_storages(profile, plan, schedule, stage), scripts[stage], *rates)
        for stage in range(schedule.num_stages)
    )
    copy = tuple(max(sum(each.copy_out for each in stage), sum(each.copy_in for each in stage)) for stage in segments)
    return replace(stage_costs(profile_storages(profile).spans, plan.boundaries), copy=copy, segments=segments)


def _segments(
    storages: StageStorages, script: Script, d2h_bytes_per_s: float, h2d_bytes_per_s: float
) -> tuple[SegmentCosts, ...]:
    # bytes that a segment's forward and recompute newly save, and that its copies move
    saved: dict[tuple[Kind, int], int] = {}
    moved: dict[tuple[Kind, int], int] = {}
    before = 0
    for at, state in zip(script, micro_batch_states(storages, script), strict=True):
        saved[at], moved[at] = state.activation_bytes - before, state.moved_bytes
        before = state.activation_bytes
    found = []
    for number, (first, end) in enumerate(storages.spans_of):
        profile = storages.layers.profile
        layers, given = profile.layers[first:end], 0 if number else profile.given_bytes(first)
        forward_s, input_grad_s, weight_grad_s, recompute_s = (_sum(layers, name) for name in _TIMES)
        forward, again = saved.get((Kind.F, number), 0), saved.get((Kind.R, number))
        out, back = (moved.get((kind, number), 0) for kind in (Kind.OFFLOAD, Kind.PREFETCH))
        found.append(
            SegmentCosts(
                forward_s,
                input_grad_s,
                weight_grad_s,
                activation=float(forward + (again or 0) + given),
                recompute=_sum(layers, "cheap_s") if storages.is_selective[number] else recompute_s,
                held_for_weights=float(storages.held_for_weights_bytes(number) + given),
                boundary=float((0 if again is None else forward) + given),
                moved=float(out),
                copy_out=out / d2h_bytes_per_s,
                copy_in=back / h2d_bytes_per_s,
            )
        )
    return tuple(found)


def _sum(layers: Sequence[LayerProfile], name: str) -> float:
    return sum(float(getattr(layer, name)) for layer in layers)

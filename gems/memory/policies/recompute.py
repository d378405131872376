"""Recompute: what forward saves is freed, and forward runs again before backward.

Chen et al. 2016 (arXiv 1604.06174, section 4.1): a chain of L layers in about the root of L
segments holds the inputs of all segments, and all else of one at a time.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from math import isqrt

from gems.config.schema import RECOMPUTES
from gems.errors import ConfigError, one_of
from gems.memory.case import MemoryCase
from gems.memory.plan import Choice, MemoryPlan, Segment
from gems.profile import LayerProfile

POLICY = "recompute"


def recompute(
    case: MemoryCase,
    how: str = "segment",
    segments: int | None = None,
    offload_inputs: bool = False,
) -> MemoryPlan:
    """Return the plan that recomputes whole stages, segments, or, "selective", all but products, by `how`.

    `segments` is their number in each stage, None for the root of its layers. Selective
    recomputation runs norms, activations and poolings again and keeps the results of convolutions
    and matrix products: each layer is a segment, and one that would free nothing is kept. With
    `segments` what layers pass to each other within one is freed too. With `offload_inputs` what
    recomputed segments keep is on the host between, and back one action before it is read. In
    strips a stage is one segment, and each strip of it is recomputed before its backward.

    Raises:
        ConfigError: no such way, or no such number of segments.
    """
    if how not in RECOMPUTES:
        raise ConfigError("memory.recompute", how, one_of(RECOMPUTES))
    if segments is not None and segments < 1:
        raise ConfigError("memory.segments", segments, "must be at least 1")
    choice = Choice.OFFLOAD_INPUTS if offload_inputs else Choice.RECOMPUTE
    if how == "stage" or case.strips is not None:
        return _plan([[(first, end)] for first, end in pairwise(case.boundaries)], choice)
    if how == "selective" and segments is None:
        layers = (index for index, layer in enumerate(case.profile.layers) if lets_go(layer))
        chosen = {index: Segment(index, index + 1, Choice.SELECTIVE) for index in layers}
        return MemoryPlan.by_layer(POLICY, case.boundaries, chosen).joined()
    plan = run_again(case, segments, choice)
    plan = keep_last(case, plan, tuple(case.peak_bytes(plan)))
    if how == "segment":
        return plan
    return plan.changed(
        lambda _, each: (
            replace(each, choice=Choice.SELECTIVE) if each.choice.is_recomputed else each
        )
    )


def run_again(
    case: MemoryCase, segments: int | None = None, choice: Choice = Choice.RECOMPUTE
) -> MemoryPlan:
    """Recompute every segment of a stage, split so that the largest segment is smallest."""
    spans = []
    for first, end in pairwise(case.boundaries):
        sizes = [layer.kept_bytes for layer in case.profile.layers[first:end]]
        root = isqrt(len(sizes) - 1) + 1  # rounded up
        ends = least_largest(sizes, min(segments or root, len(sizes)))
        spans.append([(first + low, first + high) for low, high in pairwise((0, *ends))])
    return _plan(spans, choice)


def keep_last(case: MemoryCase, plan: MemoryPlan, peak_bytes: Sequence[int]) -> MemoryPlan:
    """Keep the last segments of stages if no rank's peak grows and no time is lost.

    On a stage whose backward follows its forward it would be recomputed at once. To do less is
    never slower but where messages compete for a link, so that only there the plan is simulated.
    `peak_bytes` are the plan's, by rank.
    """
    peaks = dict(enumerate(peak_bytes))
    step_s = case.outcome(plan).step_s if case.network.has_contention else 0.0
    placement = case.schedule.placement
    for stage in reversed(range(len(plan.stages))):
        kept = replace(plan.stages[stage][-1], choice=Choice.KEEP)
        stages = (*plan.stages[:stage], (*plan.stages[stage][:-1], kept), *plan.stages[stage + 1 :])
        other = replace(plan, stages=stages)
        ranks = [rank for rank in peaks if stage in {held for _, held in placement.stages_on(rank)}]
        others = dict(zip(ranks, case.peak_bytes(other, ranks), strict=True))
        if any(others[rank] > peaks[rank] for rank in ranks):
            continue
        other_s = case.outcome(other).step_s if case.network.has_contention else 0.0
        if other_s <= step_s:
            plan = other
            step_s = other_s
            peaks |= others
    return plan


def lets_go(layer: LayerProfile) -> bool:
    """Whether selective recomputation of a layer frees anything.

    Saved, not a product, and no other layer's input.
    """
    return any(
        storage.savers and not storage.is_product and storage.last_use == 0 and storage.num_bytes
        for storage in layer.saved
    )


def least_largest(sizes: Sequence[int], parts: int) -> tuple[int, ...]:
    """Return the ends of at most `parts` runs of neighbours with the least largest sum."""
    low = max(sizes)
    high = sum(sizes)
    while low < high:
        middle = (low + high) // 2
        if len(_ends(sizes, middle)) <= parts:
            high = middle
        else:
            low = middle + 1
    return _ends(sizes, low)


def _ends(sizes: Sequence[int], limit: int) -> tuple[int, ...]:
    """Fill runs one after the other, each as far as the limit goes."""
    ends = []
    total = 0
    for index, size in enumerate(sizes):
        if total and total + size > limit:
            ends.append(index)
            total = 0
        total += size
    return (*ends, len(sizes))


def _plan(spans: Sequence[Sequence[tuple[int, int]]], choice: Choice) -> MemoryPlan:
    return MemoryPlan(
        POLICY, tuple(tuple(Segment(*span, choice) for span in stage) for stage in spans)
    )

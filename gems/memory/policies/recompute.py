"""Recompute: free the saved tensors, and run forward again before backward.

Chen et al. 2016 (arXiv 1604.06174, section 4.1): a chain of L layers in about sqrt(L) segments
holds the inputs of all segments, and everything else of one segment at a time.
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
    except_last: bool = False,
) -> MemoryPlan:
    """Return the plan that recomputes whole stages, segments, or everything but products, by `how`.

    `segments` is the number of segments per stage; None means the square root of its layers.
    Selective recomputation repeats norms, activations and poolings, and keeps the results of
    convolutions and matrix products. Each layer is a segment, and layers that would free nothing
    are kept; with `segments`, tensors between the layers of a segment are freed, too. With
    `offload_inputs`, the inputs of recomputed segments are in host memory in the meantime, and
    return one action before they are read. With `except_last`, the last micro-batch is not
    recomputed. In strips a stage is one segment, and each of its strips is recomputed before its
    backward.

    Raises:
        ConfigError: `how` is unknown, or the number of segments is invalid.
    """
    if how not in RECOMPUTES:
        raise ConfigError("memory.recompute", how, one_of(RECOMPUTES))
    if segments is not None and segments < 1:
        raise ConfigError("memory.segments", segments, "must be at least 1")
    choice = Choice.OFFLOAD_INPUTS if offload_inputs else Choice.RECOMPUTE
    if how == "stage" or case.strips is not None:
        plan = _plan([[(first, end)] for first, end in pairwise(case.boundaries)], choice)
        return replace(plan, except_last=except_last)
    if how == "selective" and segments is None:
        layers = (index for index, layer in enumerate(case.profile.layers) if lets_go(layer))
        chosen = {index: Segment(index, index + 1, Choice.SELECTIVE) for index in layers}
        plan = MemoryPlan.by_layer(POLICY, case.boundaries, chosen).joined()
        return replace(plan, except_last=except_last)
    plan = replace(run_again(case, segments, choice), except_last=except_last)
    plan = keep_last(case, plan, tuple(case.peak_bytes(plan)))
    if how == "segment":
        return plan
    return plan.changed(
        lambda _, segment: (
            replace(segment, choice=Choice.SELECTIVE) if segment.choice.is_recomputed else segment
        )
    )


def run_again(
    case: MemoryCase, segments: int | None = None, choice: Choice = Choice.RECOMPUTE
) -> MemoryPlan:
    """Return the plan that recomputes every segment of stages split as evenly as possible."""
    spans = []
    for first, end in pairwise(case.boundaries):
        sizes = [layer.kept_bytes for layer in case.profile.layers[first:end]]
        root = isqrt(len(sizes) - 1) + 1  # rounded up
        ends = least_largest(sizes, min(segments or root, len(sizes)))
        spans.append([(first + low, first + high) for low, high in pairwise((0, *ends))])
    return _plan(spans, choice)


def keep_last(case: MemoryCase, plan: MemoryPlan, peak_bytes: Sequence[int]) -> MemoryPlan:
    """Keep the last segments of stages if no rank's peak grows and no time is lost.

    If a stage's backward follows its forward, its last segment would be recomputed at once. Less
    work is never slower unless messages compete for a link; only then the plan is simulated.
    `peak_bytes` has the plan's peaks by rank.
    """
    peaks = dict(enumerate(peak_bytes))
    step_s = case.outcome(plan).step_s if case.network.has_contention else 0.0
    placement = case.schedule.placement
    for stage in reversed(range(len(plan.stages))):
        last = replace(plan.stages[stage][-1], choice=Choice.KEEP)
        stages = (*plan.stages[:stage], (*plan.stages[stage][:-1], last), *plan.stages[stage + 1 :])
        other = replace(plan, stages=stages)
        ranks = [
            rank
            for rank in peaks
            if stage in {rank_stage for _, rank_stage in placement.stages_on(rank)}
        ]
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
    """Return whether selective recomputation of a layer frees anything.

    It frees saved tensors that are neither products nor inputs of other layers.
    """
    return any(
        storage.savers and not storage.is_product and storage.last_use == 0 and storage.num_bytes
        for storage in layer.saved
    )


def least_largest(sizes: Sequence[int], parts: int) -> tuple[int, ...]:
    """Split into at most `parts` runs of neighbours with the smallest largest sum; return ends."""
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

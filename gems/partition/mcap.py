"""mCAP: the least peak by an additive predictor, from runs of the unmodified framework."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence

import numpy as np

from gems.partition.problem import Problem
from gems.partition.solvers.chain import Chain, least_cost
from gems.partition.solvers.tables import expand
from gems.profile.spans import RankCosts, Table

Boundaries = tuple[int, ...]
Measure = Callable[[Boundaries], Sequence[float]]
MAX_CUTS = 2_000_000  # up to this number, all cuts are tried
ROUNDING = 1e-12


def mcap(measure: Measure, num_layers: int, num_stages: int) -> Boundaries:
    """Return the boundaries that mCAP recommends.

    `measure` returns the peak bytes of each stage of a run with given boundaries. Source: Dreuning,
    Bal and van Nieuwpoort 2022, "mCAP: Memory-Centric Partitioning for Large-Scale
    Pipeline-Parallel DNN Training", Euro-Par. The search is brute force if there are not too many
    partitions, and otherwise the search of CAPSlog (Dreuning, Verstoep, Bal and van Nieuwpoort
    2024, PDP).
    """
    isolated, added = profile(measure, num_layers, num_stages)
    if math.comb(num_layers - 1, num_stages - 1) <= MAX_CUTS:
        return brute_force(isolated, added, num_stages)
    return recommend(isolated, added, num_stages)


def profile(measure: Measure, num_layers: int, num_stages: int) -> tuple[list[float], list[float]]:
    """Return each layer's bytes as a stage of its own, and the bytes that it adds to a stage.

    Both are means over the runs of `profiling_runs`: `isolated` over stages of one layer, `added`
    over the differences between stages that begin at the same layer and end one layer apart. With
    two stages an inner layer is never alone, and with hardly more layers than stages some
    differences are never seen. The bytes of a stage besides its layers are then assumed to be
    average.
    """
    seen: dict[tuple[int, int], list[float]] = defaultdict(list)
    for boundaries in profiling_runs(num_layers, num_stages):
        for span, peak in zip(itertools.pairwise(boundaries), measure(boundaries), strict=True):
            seen[span].append(float(peak))
    peaks = {span: _mean(values) for span, values in seen.items()}
    alone = {
        layer: peaks[layer, layer + 1] for layer in range(num_layers) if (layer, layer + 1) in peaks
    }
    more: dict[int, float] = {}
    for layer in range(num_layers):
        pairs = [((first, layer), (first, layer + 1)) for first in range(layer)]
        steps = [
            peaks[longer] - peaks[shorter]
            for shorter, longer in pairs
            if {shorter, longer} <= peaks.keys()
        ]
        if steps:
            more[layer] = _mean(steps)
    both = [alone[layer] - more[layer] for layer in alone if layer in more]
    beside = _mean(both) if both else _mean(alone.values()) - _mean(more.values())
    isolated = [alone.get(layer, more.get(layer, 0.0) + beside) for layer in range(num_layers)]
    added = [
        more.get(layer, max(0.0, alone.get(layer, 0.0) - beside)) for layer in range(num_layers)
    ]
    return isolated, added


def profiling_runs(num_layers: int, num_stages: int) -> list[Boundaries]:
    """Return the partitions to run.

    For every layer, there is one in which it is alone, with growing stages before it. The stages
    before the layer have q = (L - 2) div (S - 2) + 1 layers each, so neighbouring runs differ by
    one layer in a stage; the layers after it are spread evenly. If too few layers are left for
    that, or if a layer is never the last of two stages with the same beginning, a run with the
    missing stage is used instead. There are about L runs.
    """
    if num_stages <= 2:
        return [
            (0, *cut, num_layers)
            for cut in itertools.combinations(range(1, num_layers), num_stages - 1)
        ]
    size = (num_layers - 2) // (num_stages - 2) + 1
    runs: list[Boundaries | None] = []
    for alone in range(num_layers):
        before = list(range(0, alone, size))
        layers_after = num_layers - alone - 1
        num_after = num_stages - len(before) - 1
        if min(1, layers_after) <= num_after <= layers_after:
            runs.append((*before, alone, *_evenly(alone + 1, num_layers, num_after), num_layers))
        else:
            runs.append(_around(alone, alone + 1, num_layers, num_stages))
    seen = {span for run in runs if run for span in itertools.pairwise(run)}
    for layer in range(1, num_layers):
        if not any({(first, layer), (first, layer + 1)} <= seen for first in range(layer)):
            runs.append(_around(layer - 1, layer + 1, num_layers, num_stages))
    return list(dict.fromkeys(run for run in runs if run))


def _around(first: int, end: int, num_layers: int, num_stages: int) -> Boundaries | None:
    """Return a partition with a stage of layers `first` up to `end` and even other stages.

    Return None if there is none.
    """
    others = num_stages - 1
    after = num_layers - end
    least = max(min(1, first), others - after)
    most = min(first, others - min(1, after))
    if least > most:
        return None
    before = min(max(round(others * first / (first + after)), least), most)
    return (
        *_evenly(0, first, before),
        first,
        *_evenly(end, num_layers, others - before),
        num_layers,
    )


def brute_force(isolated: Sequence[float], added: Sequence[float], num_stages: int) -> Boundaries:
    """Return the best of all partitions.

    Its predicted peaks, sorted in decreasing order, are lexicographically smallest. Partitions with
    a stage above the least highest peak are dropped as soon as the stage is placed, which does not
    change the answer.
    """
    table = _table(isolated, added)
    num_layers = len(table)
    ranks = tuple(RankCosts((stage,), ((lambda: table,),)) for stage in range(num_stages))
    problem = Problem(num_layers, num_stages, ranks, (0,) * (num_layers - 1))
    most = least_cost(Chain(problem)) * (1 + ROUNDING)
    best: tuple[tuple[float, ...], Boundaries] | None = None
    for first_end in range(1, num_layers - num_stages + 2) if num_stages > 1 else (num_layers,):
        cuts = (
            np.array([[0, first_end]])
            if table[0, first_end] <= most
            else np.empty((0, 2), dtype=np.int64)
        )
        for stage in range(1, num_stages):
            last = num_layers - (num_stages - stage - 1)
            low = cuts[:, -1] + 1 if stage < num_stages - 1 else np.full(len(cuts), last)
            which, end = expand(low, np.full(len(cuts), last))
            fits = table[cuts[which, -1], end] <= most
            cuts = np.column_stack((cuts[which[fits]], end[fits]))
        if len(cuts):
            peaks = np.sort(table[cuts[:, :-1], cuts[:, 1:]], axis=1)
            # the last key of lexsort, the highest peak, has the highest priority
            least = np.lexsort(peaks.T)[0]
            candidate = (tuple(map(float, peaks[least][::-1])), tuple(map(int, cuts[least])))
            best = candidate if best is None else min(best, candidate)
    assert best is not None
    return best[1]


def recommend(isolated: Sequence[float], added: Sequence[float], num_stages: int) -> Boundaries:
    """Return the partition of CAPSlog.

    It uses the least peak for which filling stage after stage reaches the end. The stage with the
    highest peak stays; the parts to its left and right are split again in the same way. The peak is
    found by bisection, to a byte.
    """
    return (0, *_recommend(_table(isolated, added), 0, len(isolated), num_stages))


def _recommend(table: Table, first: int, end: int, num_stages: int) -> list[int]:
    if num_stages == 0:
        return []
    alone = table[np.arange(first, end), np.arange(first, end) + 1]
    low = 0.0
    high = max(float(table[first, first + 1 : end + 1].max()), float(alone.max()), 1.0)
    while (ends := _fill(table, first, end, num_stages, high)) is None:
        low = high
        high = 2 * high
    while high - low > max(1.0, high * ROUNDING):
        middle = (low + high) / 2
        tried = _fill(table, first, end, num_stages, middle)
        low, high, ends = (middle, high, ends) if tried is None else (low, middle, tried)
    cuts = [first, *ends]
    worst = int(np.argmax([table[span] for span in itertools.pairwise(cuts)]))
    before = _recommend(table, first, cuts[worst], worst)
    return [*before, ends[worst], *_recommend(table, ends[worst], end, num_stages - worst - 1)]


def _fill(table: Table, first: int, end: int, num_stages: int, most: float) -> list[int] | None:
    """Return the ends of stages that each take as many layers as possible.

    The number is limited by `most`, and by the layers that later stages need.
    """
    ends: list[int] = []
    for stage in range(num_stages):
        last = end - (num_stages - stage - 1)
        is_above = table[first, first + 1 : last + 1] > most
        if is_above[0]:
            return None
        first += int(is_above.argmax()) if is_above.any() else len(is_above)
        ends.append(first)
    return ends if first == end else None


def _table(isolated: Sequence[float], added: Sequence[float]) -> Table:
    total = np.concatenate(([0.0], np.cumsum(np.asarray(added, dtype=float))))
    table: Table = np.asarray(isolated, dtype=float)[:, None] + total[None, :] - total[1:, None]
    return table


def _mean(values: Collection[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _evenly(first: int, end: int, num_stages: int) -> list[int]:
    return [first + (end - first) * stage // num_stages for stage in range(num_stages)]

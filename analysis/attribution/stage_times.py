"""The times of the stages: of undisturbed actions, and of actions if all stages were equal."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from analysis.attribution.graph import Graph
from analysis.io.run_config import read_document
from gems.config.schema import RunSpec
from gems.schedule.action import COMPUTE_KINDS, Kind
from gems.simulation.costs import RunCosts
from gems.trace import Trace

USEFUL = (Kind.F, Kind.B, Kind.I, Kind.W)
COSTS = "costs"
PEERS = "peers"
OWN = "own median"
PROFILE = "own median and profile"
# A measured profile predicts the ranks' shares of the time to within about this factor.
STRAGGLES = 1.25
Part = tuple[Kind, int, int | None]


def undisturbed_times(trace: Trace, graph: Graph, work_s: np.ndarray) -> tuple[np.ndarray, str]:
    """Return the undisturbed time of each node, (nodes,) in seconds, and the source of the times.

    It is 0 for nodes that do not compute. For an emulated or simulated run, these are the
    configured costs. Otherwise, among the ranks that run the same stage in any replica or
    direction, it is the fastest rank's median over steps and micro-batches, so a rank that is
    always slow differs from its peers. Without a peer it is the rank's own median. If the trace has
    a measured profile, a rank that is slower relative to it than most by more than STRAGGLES is
    scaled to their ratio. Without a profile, a rank that is always slow counts as a slow stage.
    """
    places = graph.of_kinds(*COMPUTE_KINDS)
    times_s = np.zeros(graph.num_nodes)
    if trace.source != "measured" and trace.run_yaml:
        spec = RunSpec.from_dict(read_document(trace.run_yaml))
        costs = RunCosts.of(spec).stages(graph.schedule.placement)
        if graph.schedule.num_stages == costs.num_stages and not costs.segments:
            times_s[places] = [costs.time(graph.actions[place]) for place in places]
            return times_s, COSTS
    runs: dict[Part, dict[int, list[int]]] = {}
    for place in places:
        action = graph.actions[place]
        part = action.kind, action.stage, action.segment
        runs.setdefault(part, {}).setdefault(int(graph.rank[place]), []).append(int(place))
    has_peers = work_s.shape[1] > 1 or all(len(ranks) > 1 for ranks in runs.values())
    for ranks in runs.values():
        medians = [np.median(work_s[nodes], axis=(0, 2)).min() for nodes in ranks.values()]
        for nodes in ranks.values():
            times_s[nodes] = min(medians)
    if has_peers:
        return times_s, PEERS
    scales = _scales(trace, graph, times_s)
    return (times_s, OWN) if scales is None else (times_s * scales[graph.rank], PROFILE)


def _scales(trace: Trace, graph: Graph, own_s: np.ndarray) -> np.ndarray | None:
    """Return the factor on each rank's own median, (ranks,).

    It is below 1 for a straggler relative to the profile. Return None without a measured profile: a
    predicted profile cannot distinguish a slow rank from a layer that it misjudges.
    """
    times = trace.layer_times
    cuts = trace.boundaries
    if times is None or times.source != "measured" or len(cuts) != graph.schedule.num_stages + 1:
        return None
    if cuts[-1] != len(times.forward_s):
        return None
    layers_s = np.array([times.forward_s, times.input_grad_s, times.weight_grad_s])
    stages_s = np.array([layers_s[:, first:end].sum(axis=1) for first, end in pairwise(cuts)])
    predicted_s = np.zeros(graph.num_nodes)
    for place in graph.of_kinds(*USEFUL):
        kind, stage, *_ = graph.actions[place]
        forward_s, input_s, weight_s = stages_s[stage]
        whole_s = {
            Kind.F: forward_s,
            Kind.B: input_s + weight_s,
            Kind.I: input_s,
            Kind.W: weight_s,
        }[kind]
        predicted_s[place] = whole_s / len(graph.schedule.segments_of(stage))
    useful = graph.of_kinds(*USEFUL)
    measured, predicted = (
        np.bincount(graph.rank[useful], s[useful], graph.num_ranks) for s in (own_s, predicted_s)
    )
    if not predicted.all():
        return None
    ratios = measured / predicted
    usual = float(np.sort(ratios)[(graph.num_ranks - 1) // 2])
    return np.where(ratios > STRAGGLES * usual, usual / ratios, 1.0)


def balanced(graph: Graph, times_s: np.ndarray) -> np.ndarray:
    """Return the time of each node if all stages took their mean time, (nodes,) in seconds.

    Each kind of useful compute is averaged separately; the segments of a stage keep their shares.
    Recomputation takes no time.
    """
    balanced_s = np.zeros_like(times_s)
    for kind in USEFUL:
        places = graph.of_kinds(kind)
        segments: dict[int, dict[int | None, float]] = {}
        for place in places:
            action = graph.actions[place]
            segments.setdefault(action.stage, {})[action.segment] = float(times_s[place])
        totals = {stage: sum(times.values()) for stage, times in segments.items()}
        mean = sum(totals.values()) / max(len(totals), 1)
        for place in places:
            stage = graph.actions[place].stage
            share = times_s[place] / totals[stage] if totals[stage] else 1 / len(segments[stage])
            balanced_s[place] = mean * share
    return balanced_s

"""Bounds on the time and bytes of a candidate for any partition, and estimates of both."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gems.memory.model import Optimizer
from gems.profile import ModelProfile
from gems.schedule.ledger import in_flight
from gems.schedule.schedule import Schedule
from gems.search.candidate import KEEP, Candidate

# rough number of passes over a step's actions for an evaluation, and the effort of a search for a
# schedule in the same unit
PASSES = {
    KEEP: 2,
    "recompute/stage": 2,
    "recompute/selective": 2,
    "recompute/segment": 4,
    "vdnn_dyn": 8,
}
MOST_PASSES = 64
SEARCH_EFFORT = 1e4


class Load:
    """The load of one micro-batch on a whole model: times in seconds, sizes in bytes.

    Attributes:
        longest_s: forward and backward of the slowest layer.
        least_forward: the smallest share of forward in a layer's time.
        least_again: the smallest factor by which recomputing its forward slows a layer down.
        kept_bytes: the tensors that the model keeps for backward.
        cheap_bytes: the least it keeps if everything except matrix products is recomputed.
        crossing_bytes: by boundary, largest first, the part of the stash that is saved only after
            the boundary.
        output_bytes: the largest output of a layer.
        static_bytes: parameters, gradients, optimizer states and buffers.
        transient_bytes: the least working memory of the largest layer.
    """

    def __init__(self, profile: ModelProfile, optimizer: Optimizer) -> None:
        layers = profile.layers
        crossing = [0] * max(0, len(layers) - 1)
        for index, layer in enumerate(layers):
            for ahead, num_bytes in layer.saved_later:
                for boundary in range(index, min(index + ahead, len(crossing))):
                    crossing[boundary] += num_bytes
        timed = [layer for layer in layers if layer.time_s]
        self.num_layers = len(layers)
        self.forward_s = sum(layer.forward_s for layer in layers)
        self.input_grad_s = sum(layer.input_grad_s for layer in layers)
        self.weight_grad_s = sum(layer.weight_grad_s for layer in layers)
        self.recompute_s = sum(layer.recompute_s for layer in layers)
        self.time_s = self.forward_s + self.input_grad_s + self.weight_grad_s
        self.longest_s = max(layer.time_s for layer in layers)
        self.least_forward = min((layer.forward_s / layer.time_s for layer in timed), default=0.0)
        self.least_again = min(
            (1 + layer.recompute_s / layer.time_s for layer in timed), default=1.0
        )
        self.kept_bytes = sum(layer.kept_bytes for layer in layers)
        self.cheap_bytes = sum(min(layer.cheap_bytes, layer.stash_bytes) for layer in layers)
        self.crossing_bytes = sorted(crossing, reverse=True)
        self.output_bytes = max(layer.output_bytes for layer in layers)
        self.static_bytes: int = sum(
            optimizer.static_bytes(layer.param_bytes, layer.buffer_bytes) for layer in layers
        )
        self.transient_bytes = max(
            min(layer.forward_peak_bytes, layer.plain_peak_bytes, layer.cheap_first_peak_bytes)
            for layer in layers
        )


def least_step_s(candidate: Candidate, load: Load, bottleneck_s: float = 0.0) -> float:
    """Return a lower bound of a candidate's step in seconds, for any partition and free links.

    The heaviest rank computes at least its share, and for one micro-batch at least `bottleneck_s`,
    if known from the best partition. A micro-batch also passes all ranks in turn, which the
    family's `chain_bound` covers.
    """
    is_again = candidate.policy == "recompute/stage"
    again = load.least_again if is_again else 1.0
    whole_s = load.time_s + load.recompute_s * is_again
    heaviest = candidate.micro_batches * max(
        whole_s / candidate.partitions, again * load.longest_s, again * bottleneck_s
    )
    terms = candidate.terms(load.forward_s, load.input_grad_s, load.weight_grad_s)
    return max(heaviest, candidate.family.chain_bound(terms, again, load.least_forward))


def least_bytes(candidate: Candidate, load: Load, flight_counts: Sequence[float] = ()) -> int:
    """Return a lower bound of the bytes on a candidate's fullest rank, for any partition.

    All ranks together hold the parameters with their gradients and states, once for each direction.
    If all activations A are kept, and rank r has c_r micro-batches in flight, the best cut puts
    A / sum(1 / c_r) on each rank. Recomputed activations exist for one stage, or one of its
    segments, at a time. The worst boundaries are assumed for `crossing_bytes`.
    `flight_counts` has c_r by rank, if known better than by the family.
    """
    static = candidate.family.num_directions * load.static_bytes
    num_stages = candidate.num_stages
    least = max(static / candidate.partitions, load.transient_bytes)
    kept_bytes = max(load.kept_bytes - sum(load.crossing_bytes[: num_stages - 1]), 0)
    if candidate.policy == "recompute/stage":
        return int(max(least, kept_bytes / num_stages))
    if candidate.policy == "recompute/segment":
        return int(
            max(least, kept_bytes / (num_stages * ((load.num_layers / num_stages) ** 0.5 + 2)))
        )
    if candidate.policy == "recompute/selective":
        kept_bytes = load.cheap_bytes
    elif candidate.memory != KEEP:
        return int(least)
    flight_counts = flight_counts or candidate.family.least_in_flight(candidate.terms())
    balanced = kept_bytes / sum(1 / count for count in flight_counts)
    together = (min(flight_counts) * kept_bytes + static) / candidate.partitions
    return int(max(least, balanced, together))


def held_at_once(schedule: Schedule) -> list[float]:
    """Return, by rank, a lower bound of the micro-batches in flight on each of its stages at once.

    A rank's peak over its actions is at least the mean over any of them. The actions here are that
    at which the stage with the fewest in flight has most, and those at which each stage has most.
    """
    counts = []
    for actions in schedule.rank_schedules:
        peaks: dict[int, dict[int, int]] = {}
        fewest = 0
        for action, current in in_flight(actions):
            if current[action.stage] > peaks.get(action.stage, {}).get(action.stage, 0):
                peaks[action.stage] = dict(current)
            fewest = max(fewest, min(current.values()))
        mean = min(sum(peak[stage] for peak in peaks.values()) / len(peaks) for stage in peaks)
        counts.append(max(float(fewest), mean))
    return counts


def estimated_bytes(candidate: Candidate, load: Load) -> float:
    """Estimate the bytes of the fullest rank, to order candidates.

    Stages count as equal. The estimate has the bytes that the policy keeps on the device for each
    micro-batch in flight, those that one of them brings back at once, and the working memory of a
    layer.
    """
    stages = candidate.num_stages
    part = load.kept_bytes / candidate.num_stages
    chunks = stages // candidate.partitions
    passed = load.output_bytes
    segments = max(1.0, math.sqrt(load.num_layers / stages))
    on_device, at_once = {
        KEEP: (load.kept_bytes / candidate.partitions, 0.0),
        "recompute/selective": (load.cheap_bytes / candidate.partitions, part / segments**2),
        "recompute/stage": (chunks * passed, part),
        "recompute/segment": (chunks * segments * passed, part / segments),
    }.get(candidate.policy, (chunks * passed, 2.0 * load.transient_bytes))
    static = candidate.family.num_directions * load.static_bytes / candidate.partitions
    return static + _estimated_in_flight(candidate) * on_device + at_once + load.transient_bytes


def estimated_host_bytes(candidate: Candidate, load: Load) -> float:
    """Estimate the bytes that the fullest rank of a candidate keeps in host memory."""
    moves = candidate.memory not in (KEEP, "recompute")
    return moves * _estimated_in_flight(candidate) * load.kept_bytes / candidate.partitions


def effort(candidate: Candidate, load: Load) -> float:
    """Estimate how many actions the evaluation of a candidate processes, to order candidates.

    Policies on segments or layers have more actions, and searches process them often.
    """
    if candidate.family.is_searched:
        return SEARCH_EFFORT
    pieces = {
        "": load.num_layers,
        "selective": load.num_layers,
        "segment": math.sqrt(load.num_layers * candidate.num_stages),
    }
    num = (
        candidate.num_stages
        if candidate.memory == KEEP
        else pieces.get(candidate.how, candidate.num_stages)
    )
    return candidate.micro_batches * num * PASSES.get(candidate.policy, MOST_PASSES)


def _estimated_in_flight(candidate: Candidate) -> float:
    peak = candidate.family.peak_units(candidate.terms()) if candidate.family.peak_units else None
    return min(candidate.micro_batches, candidate.cap or peak or candidate.partitions)

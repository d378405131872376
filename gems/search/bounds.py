"""Bounds on the time and bytes of a candidate for any partition, and estimates of both."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gems.memory.model import Optimizer
from gems.profile import ModelProfile
from gems.schedule.ledger import in_flight
from gems.schedule.schedule import Schedule
from gems.search.candidate import KEEP, Candidate

# Rough passes over a step's actions that an evaluation takes, and what a search for a schedule is
# worth of them.
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
    """What one micro-batch of a whole model is: times in seconds, sizes in bytes.

    `longest_s` is the largest layer's forward and backward, `least_forward` the least share that
    forward has of a layer's time, `least_again` the least that a layer takes with its forward run
    twice, over its time. `kept_bytes` is what the whole model keeps for backward, `cheap_bytes`
    what it keeps at least where all but products is recomputed, `crossing_bytes` what of that a
    boundary takes out of the stash, by boundary, largest first: what is first saved after it.
    `output_bytes` is the most that a layer passes on. `static_bytes` are the model's parameters
    with their gradients and states, and its buffers, `transient_bytes` the least that its largest
    layer makes at once.
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
            optimizer.static_bytes(one.param_bytes, one.buffer_bytes) for one in layers
        )
        self.transient_bytes = max(
            min(layer.forward_peak_bytes, layer.plain_peak_bytes, layer.cheap_first_peak_bytes)
            for layer in layers
        )


def least_step_s(one: Candidate, load: Load, bottleneck_s: float = 0.0) -> float:
    """Return seconds below which no partition of a candidate can be, links being free.

    The heaviest rank computes at least its share, of one micro-batch at least `bottleneck_s` where
    that is known from the best partition. Beyond that a micro-batch passes the ranks one after
    another, by the family's `chain_bound`.
    """
    is_again = one.policy == "recompute/stage"
    again = load.least_again if is_again else 1.0
    whole_s = load.time_s + load.recompute_s * is_again
    heaviest = one.micro_batches * max(
        whole_s / one.partitions, again * load.longest_s, again * bottleneck_s
    )
    terms = one.terms(load.forward_s, load.input_grad_s, load.weight_grad_s)
    return max(heaviest, one.family.chain_bound(terms, again, load.least_forward))


def least_bytes(one: Candidate, load: Load, held: Sequence[float] = ()) -> int:
    """Return bytes below which the fullest rank of a candidate cannot be, whatever its partition.

    All ranks together hold the parameters with their gradients and states, once for each direction.
    With all activations kept a rank in the middle of its step holds c stashes of its part: of a
    whole A, cut to be least on the fullest rank, that is A / (sum of 1 / c). What is recomputed is
    there at once for a stage, or for one of its segments. What a boundary takes out of the stash is
    left out for the worst boundaries there are. `held` are the micro-batches in flight by rank, if
    they are known better than by the family.
    """
    static = one.family.num_directions * load.static_bytes
    num_stages = one.num_stages
    least = max(static / one.partitions, load.transient_bytes)
    kept = max(load.kept_bytes - sum(load.crossing_bytes[: num_stages - 1]), 0)
    if one.policy == "recompute/stage":
        return int(max(least, kept / num_stages))
    if one.policy == "recompute/segment":
        return int(max(least, kept / (num_stages * ((load.num_layers / num_stages) ** 0.5 + 2))))
    if one.policy == "recompute/selective":
        kept = load.cheap_bytes
    elif one.memory != KEEP:
        return int(least)
    held = held or one.family.least_in_flight(one.terms())
    balanced = kept / sum(1 / count for count in held)
    together = (min(held) * kept + static) / one.partitions
    return int(max(least, balanced, together))


def held_at_once(schedule: Schedule) -> list[float]:
    """Return a lower bound of the micro-batches that each rank has in flight on each of its stages at once.

    A rank's peak is the largest over its actions, and so at least the mean over any of them: here
    the action at which the stage with the fewest in flight has most, and those at which each stage
    has most.
    """
    held = []
    for actions in schedule.rank_schedules:
        tops: dict[int, dict[int, int]] = {}
        fewest = 0
        for action, now in in_flight(actions):
            if now[action.stage] > tops.get(action.stage, {}).get(action.stage, 0):
                tops[action.stage] = dict(now)
            fewest = max(fewest, min(now.values()))
        mean = min(sum(top[stage] for top in tops.values()) / len(tops) for stage in tops)
        held.append(max(float(fewest), mean))
    return held


def estimated_bytes(one: Candidate, load: Load) -> float:
    """Return about what the fullest rank of a candidate holds, too much or too little.

    An order in which to try.
    Of equal stages: of each micro-batch in flight what the policy keeps on the device, what one of
    them brings back at once, and what a layer makes meanwhile.
    """
    stages = one.num_stages
    part = load.kept_bytes / one.num_stages
    chunks = stages // one.partitions
    passed = load.output_bytes
    segments = max(1.0, math.sqrt(load.num_layers / stages))
    on_device, at_once = {
        KEEP: (load.kept_bytes / one.partitions, 0.0),
        "recompute/selective": (load.cheap_bytes / one.partitions, part / segments**2),
        "recompute/stage": (chunks * passed, part),
        "recompute/segment": (chunks * segments * passed, part / segments),
    }.get(one.policy, (chunks * passed, 2.0 * load.transient_bytes))
    static = one.family.num_directions * load.static_bytes / one.partitions
    return static + _estimated_in_flight(one) * on_device + at_once + load.transient_bytes


def estimated_host_bytes(one: Candidate, load: Load) -> float:
    """Estimate the bytes that the fullest rank of a candidate keeps in host memory."""
    moves = one.memory not in (KEEP, "recompute")
    return moves * _estimated_in_flight(one) * load.kept_bytes / one.partitions


def effort(one: Candidate, load: Load) -> float:
    """Return about how many actions the evaluation of a candidate goes through.

    An order in which to try.
    A policy that works on segments or layers has more of them, and one that is searched goes
    through them often.
    """
    if one.family.is_searched:
        return SEARCH_EFFORT
    pieces = {
        "": load.num_layers,
        "selective": load.num_layers,
        "segment": math.sqrt(load.num_layers * one.num_stages),
    }
    num = one.num_stages if one.memory == KEEP else pieces.get(one.how, one.num_stages)
    return one.micro_batches * num * PASSES.get(one.policy, MOST_PASSES)


def _estimated_in_flight(one: Candidate) -> float:
    """Return about how many micro-batches the fullest rank holds at once of each of its stages."""
    peak = one.family.peak_units(one.terms()) if one.family.peak_units else None
    return min(one.micro_batches, one.cap or peak or one.partitions)

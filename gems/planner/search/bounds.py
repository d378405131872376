"""Bounds and estimates: how fast a candidate can be at most, and how many bytes it holds at least and about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil, sqrt

from gems.memory.model import Optimizer
from gems.planner.search.candidate import KEEP, Candidate
from gems.profile import ModelProfile
from gems.schedule.ledger import in_flight
from gems.schedule.registry import Terms
from gems.schedule.schedule import Schedule

_SPLIT_LINEAR = ("zb_h1", "zb_h2")


@dataclass(frozen=True, slots=True)
class Load:
    """What one micro-batch of a whole model is: times in seconds, sizes in bytes.

    `longest_s` is the largest layer's forward and backward, `least_forward` the least share that forward has of a
    layer's time, `least_again` the least that a layer takes with its forward run twice, over its time. `kept_bytes` is
    what the uncut model keeps for backward, `cheap_bytes` what it keeps at least where all but products is made again,
    `crossing_bytes` what of that a cut takes out of the stash, by cut, largest first: what is first saved behind it.
    `handed_bytes` is the most that a layer hands on. `static_bytes` are the model's parameters with
    their gradients and states, and its buffers, `transient_bytes` the least that its largest layer makes at once.
    """

    num_layers: int
    forward_s: float
    input_grad_s: float
    weight_grad_s: float
    recompute_s: float
    longest_s: float
    least_forward: float
    least_again: float
    kept_bytes: int
    cheap_bytes: int
    crossing_bytes: tuple[int, ...]
    handed_bytes: int
    static_bytes: int
    transient_bytes: int

    @property
    def time_s(self) -> float:
        """Forward and whole backward."""
        return self.forward_s + self.input_grad_s + self.weight_grad_s


def load_of(profile: ModelProfile, optimizer: Optimizer) -> Load:
    """Return the load of a profile's micro-batch."""
    layers = profile.layers
    crossing = [0] * max(0, len(layers) - 1)
    for index, layer in enumerate(layers):
        for ahead, num_bytes in layer.saved_later:
            for cut in range(index, min(index + ahead, len(crossing))):
                crossing[cut] += num_bytes
    timed = [layer for layer in layers if layer.time_s]
    return Load(
        num_layers=len(layers),
        forward_s=sum(layer.forward_s for layer in layers),
        input_grad_s=sum(layer.input_grad_s for layer in layers),
        weight_grad_s=sum(layer.weight_grad_s for layer in layers),
        recompute_s=sum(layer.recompute_s for layer in layers),
        longest_s=max(layer.time_s for layer in layers),
        least_forward=min((layer.forward_s / layer.time_s for layer in timed), default=0.0),
        least_again=min((1 + layer.recompute_s / layer.time_s for layer in timed), default=1.0),
        kept_bytes=sum(layer.kept_bytes for layer in layers),
        cheap_bytes=sum(min(layer.cheap_bytes, layer.stash_bytes) for layer in layers),
        crossing_bytes=tuple(sorted(crossing, reverse=True)),
        handed_bytes=max(layer.output_bytes for layer in layers),
        static_bytes=sum(optimizer.static_bytes(layer.param_bytes, layer.buffer_bytes) for layer in layers),
        transient_bytes=max(
            min(layer.forward_peak_bytes, layer.plain_peak_bytes, layer.cheap_first_peak_bytes) for layer in layers
        ),
    )


def least_step_s(one: Candidate, load: Load, bottleneck_s: float = 0.0, reduce_s: float = 0.0) -> float:
    """Return seconds below which no cut of a candidate can be, links being free.

    The heaviest rank computes at least its share. Beyond that, where a rank holds one stage and the backward is whole:
    rank r begins when the stages before it have run forward and ends before they run backward, so that a step of M has
    N t_r + sum of t_s over s < r <= M for every r; the cut that makes the least M gives M = T / (1 - (1 - 1/N)^P), with
    T the model's time (and with every forward run again a times N for N, where a is the least that this adds to a
    layer). A split backward leaves of that the beginning. In GEMS the runs' backwards follow each other (see
    its closed form). With a cap of K the micro-batches K apart follow each other.

    Args:
        one: the candidate.
        load: of its micro-batch.
        bottleneck_s: what the heaviest rank computes for one micro-batch at least, where it is known from the best cut.
        reduce_s: the least that a rank's all-reduce takes.
    """
    p, n = one.partitions, one.micro_batches
    time_s = load.time_s
    is_again = (one.memory, one.how) == ("recompute", "stage")
    again = load.least_again if is_again else 1.0
    whole_s = time_s + load.recompute_s * is_again
    heaviest = n * max(whole_s / p, again * load.longest_s, again * bottleneck_s)
    backward_s = load.input_grad_s + load.weight_grad_s
    chain = load.forward_s + backward_s
    if one.schedule == "gems_master":
        chain = load.forward_s + n // one.parts * backward_s
    elif one.schedule == "gems_zb":
        chain = load.forward_s + n * load.input_grad_s
    elif one.schedule == "1f1b":
        most = int(min(p, one.cap or p))
        chain = max(time_s / (1 - (1 - 1 / (n * again)) ** p), ceil(n / most) * time_s)
    elif one.schedule in _SPLIT_LINEAR and load.least_forward:
        share = load.least_forward
        chain = max(load.forward_s, share * time_s / (1 - (1 - share / n) ** p))
    else:
        chain = load.forward_s + load.input_grad_s
    return max(heaviest, chain) + reduce_s


def least_bytes(one: Candidate, load: Load, held: Sequence[float] = ()) -> int:
    """Return bytes below which the fullest rank of a candidate cannot be, whatever its cut.

    All ranks together hold the parameters with their gradients and states, once for each direction. With all
    activations kept a rank in the middle of its step holds c stashes of its part: of a whole A, cut to be least on the
    fullest rank, that is A / (sum of 1 / c). What is recomputed is there at once for a stage, or for one of its
    segments. What a cut takes out of the stash is left out for the worst cuts there are. `held` are the micro-batches
    in flight by rank, if they are known better than by `min_in_flight`.
    """
    static, num_stages = one.num_directions * load.static_bytes, one.num_stages
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
    held = held or min_in_flight(one)
    balanced = kept / sum(1 / count for count in held)
    together = (min(held) * kept + static) / one.partitions
    return int(max(least, balanced, together))


def guess_bytes(one: Candidate, load: Load) -> float:
    """Return about what the fullest rank of a candidate holds, too many or too few.

    Of equal stages: of each micro-batch in flight what the policy keeps on the device, what one of them brings back at
    once, and what a layer makes meanwhile.
    """
    stages = one.num_stages
    part, chunks, handed = load.kept_bytes / stages, stages // one.partitions, load.handed_bytes
    segments = max(1.0, sqrt(load.num_layers / stages))
    on_device, at_once = {
        KEEP: (load.kept_bytes / one.partitions, 0.0),
        "recompute/selective": (load.cheap_bytes / one.partitions, part / segments**2),
        "recompute/stage": (chunks * handed, part),
        "recompute/segment": (chunks * segments * handed, part / segments),
    }.get(one.policy, (chunks * handed, 2.0 * load.transient_bytes))
    static = one.num_directions * load.static_bytes / one.partitions
    return static + peak_in_flight(one) * on_device + at_once + load.transient_bytes


def guess_host_bytes(one: Candidate, load: Load) -> float:
    """Return about what the fullest rank of a candidate keeps in host memory."""
    return (one.memory not in (KEEP, "recompute")) * peak_in_flight(one) * load.kept_bytes / one.partitions


def peak_in_flight(one: Candidate) -> float:
    """Return the most micro-batches that a rank holds on its part of the model, by its schedule's closed form."""
    closed = one.family.peak_units
    units = closed(Terms(one.partitions, one.micro_batches, one.parts, one.chunks, one.cap)) if closed else None
    return min(one.micro_batches, units or one.cap or one.partitions)


def min_in_flight(one: Candidate) -> Sequence[float]:
    """Return the fewest micro-batches that each rank has in flight on each of its stages at its peak."""
    p, n = one.partitions, one.micro_batches
    if one.schedule == "1f1b":
        return [int(min(n, p - rank, one.cap or p)) for rank in range(p)]
    return [one.parts if one.schedule == "gems_master" else 1] * p


def held_at_once(schedule: Schedule) -> list[float]:
    """Return a lower bound of the micro-batches that each rank has in flight on each of its stages at once.

    A rank's peak is the largest over its actions, and so at least the mean over any of them: here the action at which
    the stage with the fewest in flight has most, and those at which each stage has most.
    """
    found = []
    for row in schedule.rows:
        tops: dict[int, dict[int, int]] = {}
        fewest = 0
        for action, now in in_flight(row):
            if now[action.stage] > tops.get(action.stage, {}).get(action.stage, 0):
                tops[action.stage] = dict(now)
            fewest = max(fewest, min(now.values()))
        mean = min(sum(top[stage] for top in tops.values()) / len(tops) for stage in tops)
        found.append(max(float(fewest), mean))
    return found

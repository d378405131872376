"""The memory-time bound: in any order of work, activations occupy memory while they are held."""

from __future__ import annotations

from collections.abc import Sequence

from gems.schedule.costs import FREE, Network, StageCosts
from gems.schedule.placement import Placement

_BISECTIONS = 60
Saving = tuple[
    float, float
]  # memory-time saved by leaving out a stage's activations, and the time that it costs


def memory_time_bound(
    costs: StageCosts,
    placement: Placement,
    cap: float | None,
    is_split: bool,
    network: Network = FREE,
    allow: tuple[str, ...] = (),
) -> float:
    """Return an efficiency that no schedule of this placement exceeds while it keeps the cap.

    A stage's activations stay from its forward until the gradient has come back through all later
    stages, so a micro-batch takes at least size x that time out of a rank's cap x step time. The
    step takes at least the sum of these products over all micro-batches divided by the cap, and at
    least a rank's compute. With f = i = w = 1 and one stage per rank, the bound is cap x 3 / (2 P +
    1) with split backwards and cap / P with whole ones; for a V it is cap x 3 / (P + 1) with split
    backwards.

    Sizes of `costs` are in the unit of the cap. `is_split` allows the weight gradient to come later
    than the input gradient. Delays of the network prolong the time for which activations are held.
    `allow` ("recompute", "offload") allows the best part of each rank's activations to be dropped
    in between, at the price of time on the rank and on each copy engine.
    """
    share = 1.0 / placement.num_directions
    held_for = [_times_held(costs, row, placement, is_split, network) for row in placement.ranks]
    period = 0.0
    for rank in range(placement.num_ranks):
        busy = product = 0.0
        savings: dict[str, list[Saving]] = {"recompute": [], "offload": []}
        for direction, stage in placement.stages_on(rank):
            time = held_for[direction][stage]
            size = costs.activation[stage]
            after = costs.held_for_weights[stage] * costs.weight_grad[stage] if is_split else 0.0
            busy += share * (
                costs.forward[stage] + costs.input_grad[stage] + costs.weight_grad[stage]
            )
            product += share * (size * time + after)
            backward = costs.input_grad[stage] + (0.0 if is_split else costs.weight_grad[stage])
            for name in allow:
                saved, paid = saving(costs, stage, time - backward, name)
                savings[name].append((share * max(0.0, saved), share * paid))
        period = max(period, busy if cap is None else least_time(busy, product, cap, **savings))
    useful = sum(costs.forward) + sum(costs.input_grad) + sum(costs.weight_grad)
    return min(1.0, useful / (placement.num_ranks * period)) if period else 1.0


def _times_held(
    costs: StageCosts, ranks: Sequence[int], placement: Placement, is_split: bool, network: Network
) -> list[float]:
    """Return, for each stage, the least time from the start of F to the end of B or I."""
    times = [0.0] * costs.num_stages
    for stage in reversed(range(costs.num_stages)):
        here = ranks[stage]
        size = costs.boundary_bytes[stage]
        longest = 0.0
        for reader in placement.successors[stage]:
            there = ranks[reader]
            delay = 0.0
            if there != here:
                delay = 2 * network.delay(here, there, size)
            longest = max(longest, times[reader] + delay)
        backward = costs.input_grad[stage] + (0.0 if is_split else costs.weight_grad[stage])
        times[stage] = longest + (costs.forward[stage] + backward)
    return times


def saving(costs: StageCosts, stage: int, life: float, name: str) -> Saving:
    """Return the memory-time that a memory action saves for a micro-batch, and its own time.

    `life` is the time from the start of the forward to that of the backward.
    """
    if name == "recompute":
        paid = costs.recompute[stage]
        return (costs.activation[stage] - costs.boundary[stage]) * (life - paid), paid
    paid = costs.copy[stage]
    return costs.movable[stage] * (life - costs.forward[stage] - 2 * paid), paid


def least_time(
    busy: float,
    product: float,
    cap: float,
    recompute: Sequence[Saving] = (),
    offload: Sequence[Saving] = (),
) -> float:
    """Return the time for which a rank must have its memory.

    It is the larger of the rank's work and its memory-time (`product`) divided by the cap.
    Recomputation lowers the product at the price of the rank's time, and offloading at the price of
    its copy engines' time. Each is applied at its best rate, in fractions of a micro-batch.
    """
    if product <= cap * busy:
        return busy
    low = busy
    high = product / cap if cap else float("inf")
    if not recompute and not offload:
        return high
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if product - most_in(recompute, middle - busy) - most_in(offload, middle) > cap * middle:
            low = middle
        else:
            high = middle
    return low


def most_in(items: Sequence[tuple[float, float]], budget: float) -> float:
    """Return the most gain that a budget buys from items (gain, cost).

    The items with the best rate are taken first, and the last one in part.
    """
    total = 0.0
    for gain, cost in sorted(
        items, key=lambda item: -item[0] / item[1] if item[1] else -float("inf")
    ):
        part = min(1.0, budget / cost) if cost else 1.0
        total += part * gain
        budget -= part * cost
    return total

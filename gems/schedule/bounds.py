"""Bounds: the closed forms of published schedules, and the memory-time product, which holds for any order of work."""

from __future__ import annotations

from dataclasses import dataclass

from gems.schedule.costs import FREE, Network, StageCosts
from gems.schedule.placement import Placement
from gems.schedule.registry import FAMILIES, Family, Terms

_BISECTIONS = 60


def step_units(
    name: str,
    num_ranks: int,
    num_micro_batches: int,
    forward: float,
    backward: float,
    parts: int = 1,
    *,
    weight_grad: float | None = None,
    chunks: int = 2,
    cap: float | None = None,
) -> float | None:
    """Return the time of one step with equal stages and free links, in the unit of `forward` and `backward`.

    These are times of a rank's part of the model; `weight_grad` is half of the backward unless given. None for a family
    without a closed form, or outside of the form's range.
    """
    w = backward / 2 if weight_grad is None else weight_grad
    family: Family | None = FAMILIES.get(name)
    if family is None or family.step_units is None:
        return None
    if family.num_directions == 2 and num_micro_batches % (2 * parts):
        return None
    terms = Terms(num_ranks, num_micro_batches, parts, chunks, cap, forward, backward - w, w)
    return family.step_units(terms)


def peak_units(
    name: str, num_ranks: int, num_micro_batches: int, parts: int = 1, *, chunks: int = 2, cap: float | None = None
) -> float | None:
    """Return the most activations that a rank holds, in micro-batches on one of P equal parts of the model.

    None for a family without a closed form.
    """
    family: Family | None = FAMILIES.get(name)
    if family is None or family.peak_units is None:
        return None
    return family.peak_units(Terms(num_ranks, num_micro_batches, parts, chunks, cap))


def bubble(
    name: str, num_ranks: int, num_micro_batches: int, forward: float, backward: float, parts: int = 1
) -> float | None:
    """Return the share of a step in which a rank idles, by the closed form."""
    span = step_units(name, num_ranks, num_micro_batches, forward, backward, parts)
    return None if not span else 1.0 - num_micro_batches * (forward + backward) / span


def memory_time_bound(
    costs: StageCosts,
    placement: Placement,
    cap: float | None,
    is_split: bool,
    network: Network = FREE,
    allow: tuple[str, ...] = (),
) -> float:
    """Return an efficiency that no schedule of this placement exceeds while it keeps the cap.

    A stage's activations stay from its forward until the gradient has come back through all later stages, so a
    micro-batch takes at least size x that time of a rank's cap x step time. The step is at least as long as all
    micro-batches' products over the cap, and as a rank's compute. With f = i = w = 1 and one stage a rank that is
    cap x 3 / (2 P + 1) split, cap / P whole; V: cap x 3 / (P + 1) split.

    Args:
        costs: of the stages, with sizes in the unit of the cap.
        placement: where the stages live; of two directions each takes half of the micro-batches.
        cap: the most activations a rank may hold; None for no limit but compute.
        is_split: whether the weight gradient may come later than the input gradient.
        network: its delays between ranks prolong what is held.
        allow: "recompute" and "offload" let the best part of each rank's activations go in between, at the price of
            time on the rank and on each copy engine.

    Returns:
        The bound, at most 1, for equal ranks; less where one rank has more work than others.
    """
    directions = range(placement.num_directions)
    share = 1.0 / placement.num_directions
    held_for = [_times_held(costs, placement, direction, is_split, network) for direction in directions]
    period = 0.0
    for rank in range(placement.num_ranks):
        busy = product = 0.0
        recompute: list[_Saving] = []
        offload: list[_Saving] = []
        for direction, stage in placement.stages_on(rank):
            time, size = held_for[direction][stage], costs.activation[stage]
            after = costs.held_for_weights[stage] * costs.weight_grad[stage] if is_split else 0.0
            busy += share * (costs.forward[stage] + costs.input_grad[stage] + costs.weight_grad[stage])
            product += share * (size * time + after)
            backward = costs.input_grad[stage] + (0.0 if is_split else costs.weight_grad[stage])
            kept = costs.recompute[stage] + backward
            rest = size - costs.boundary[stage]
            recompute.append(_Saving(share * costs.recompute[stage], share * rest * max(0.0, time - kept)))
            copied = costs.forward[stage] + 2 * costs.copy[stage] + backward
            offload.append(_Saving(share * costs.copy[stage], share * size * max(0.0, time - copied)))
        allowed = [recompute if "recompute" in allow else [], offload if "offload" in allow else []]
        period = max(period, _period(busy, product, cap, allowed))
    useful = sum(costs.forward) + sum(costs.input_grad) + sum(costs.weight_grad)
    return min(1.0, useful / (placement.num_ranks * period)) if period else 1.0


@dataclass(frozen=True, slots=True)
class _Saving:
    """What leaving out one stage's activations costs (time on the rank or the copy engine) and saves."""

    cost: float
    saved: float


def _times_held(
    costs: StageCosts, placement: Placement, direction: int, is_split: bool, network: Network
) -> tuple[float, ...]:
    """Return for each stage the least time from the begin of F to the end of B or I."""
    ranks = placement.ranks[direction]
    held = [0.0] * costs.num_stages
    for stage in reversed(range(costs.num_stages)):
        backward = costs.input_grad[stage] + (0.0 if is_split else costs.weight_grad[stage])
        longest = 0.0
        for reader in placement.users_of(stage):
            behind = held[reader]
            if ranks[reader] != ranks[stage]:
                size = costs.boundary_bytes[stage]
                behind += network.delay(ranks[stage], ranks[reader], size)
                behind += network.delay(ranks[reader], ranks[stage], size)
            longest = max(longest, behind)
        held[stage] = longest + (costs.forward[stage] + backward)
    return tuple(held)


def _period(busy: float, product: float, cap: float | None, allowed: list[list[_Saving]]) -> float:
    """Return the least time a micro-batch takes of a rank; each list of savings has a time budget of its own."""
    if cap is None or product <= cap * busy:
        return busy
    low, high = busy, product / cap
    if not any(allowed):
        return high
    recompute, offload = allowed
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        saved = _most_saved(recompute, middle - busy) + _most_saved(offload, middle)
        if product - saved > cap * middle:
            low = middle
        else:
            high = middle
    return low


def _most_saved(savings: list[_Saving], budget: float) -> float:
    """Fill a budget of time with the savings that give most for it, the last one in part."""
    total = 0.0
    for saving in sorted(savings, key=lambda item: -item.saved / item.cost if item.cost else float("-inf")):
        part = min(1.0, budget / saving.cost) if saving.cost else 1.0
        total += part * saving.saved
        budget -= part * saving.cost
    return total

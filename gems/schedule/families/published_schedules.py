"""Every published schedule that can serve a request: what a search must not be worse than."""

from __future__ import annotations

from gems.errors import ConfigError
from gems.schedule.ledger import TOLERANCE, peaks
from gems.schedule.registry import FAMILIES, Family, Request
from gems.schedule.schedule import Schedule
from gems.schedule.strips import with_strips

LARGE = 4096  # ranks x micro-batches from which schedules that a sibling beats are left out


def published_schedules(request: Request) -> list[Schedule]:
    """Build the schedules that serve a request's counts, placements, most stages and cap, those of plugins too.

    Those with a size of their own come in each size: GEMS with all parts that divide N, interleaved
    and looped ones with 2, 3 and 4 chunks, 1F1B with the most micro-batches in flight that the cap
    allows. Without a cap all are built. From 4096 ranks x micro-batches on only one of like
    schedules is, that with the most memory, which they trade for time (GPipe or 1F1B or layer
    parallelism, GEMS's parts, ZB-V or V-Half or V-Min, ZB-H2 or ZB-H1): building all takes seconds
    there.
    """
    rivals: list[tuple[float, str, Family, Request]] = []
    for name, family in FAMILIES.items():
        if family.rival is None or (family.num_directions == 2 and request.num_micro_batches % 2):
            continue
        if family.stages_per_rank and not request.allows(
            family.stages_per_rank * request.num_ranks
        ):
            continue
        for size in family.rival(request):
            peak = family.peak_units(family.terms(size)) if family.peak_units else None
            rivals.append((peak or 0.0, name, family, size))
    served: set[tuple[str, int]] = set()
    found = []
    is_large = request.num_ranks * request.num_micro_batches >= LARGE
    limit = float("inf") if request.cap is None else request.cap + TOLERANCE
    for peak, name, family, size in sorted(rivals, key=lambda rival: -rival[0]):
        per_rank = family.stages(size.chunks)
        num_stages = per_rank * request.num_ranks
        siblings = (family.siblings or name, per_rank)
        if not request.allows(num_stages):
            continue
        costs = request.costs.of(family.place(request.num_ranks, size.chunks))
        lightest = min(costs.activation) * per_rank
        if peak * lightest > limit or (
            is_large and siblings in served
        ):  # of those alike the largest is the fastest
            continue
        if request.placements and family.placement.__name__ not in request.placements:
            continue
        try:
            schedule = family.build(size)
        except ConfigError:
            continue
        is_known = peak and lightest == max(costs.activation) * per_rank == 1.0
        if is_known or request.cap is None or max(peaks(schedule, costs)) <= limit:
            served.add(siblings)
            found.append(with_strips(schedule, request.num_strips))
    return found

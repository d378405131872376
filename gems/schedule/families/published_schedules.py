"""All published schedules that can serve a request: a search must not be worse than these."""

from __future__ import annotations

from gems.errors import ConfigError
from gems.schedule.ledger import TOLERANCE, peaks
from gems.schedule.registry import FAMILIES, Family, Request
from gems.schedule.schedule import Schedule
from gems.schedule.strips import with_strips

# from this number of ranks x micro-batches on, schedules that a sibling beats are left out
LARGE = 4096


def published_schedules(request: Request) -> list[Schedule]:
    """Build the schedules that satisfy a request's counts, placements, stages and cap.

    They include those of plugins. Schedules with a parameter are built for several values: GEMS
    with all parts that divide N, interleaved and looped ones with 2, 3 and 4 chunks, 1F1B with the
    most micro-batches in flight that the cap allows. Without a cap all are built. From 4096 ranks x
    micro-batches on, only one of several similar schedules is built, because building all takes
    seconds. It is the one with the most memory, because these schedules trade memory for time
    (GPipe or 1F1B or layer parallelism, GEMS's parts, ZB-V or V-Half or V-Min, ZB-H2 or ZB-H1).
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
    schedules = []
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
        # of similar schedules, the one with the most memory is the fastest
        if peak * lightest > limit or (is_large and siblings in served):
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
            schedules.append(with_strips(schedule, request.num_strips))
    return schedules

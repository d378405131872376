"""Every published schedule that can serve a request: what a search must not be worse than."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from gems.errors import ConfigError
from gems.schedule.costs import StageCosts
from gems.schedule.ledger import TOLERANCE, peaks
from gems.schedule.registry import FAMILIES, Family, Request
from gems.schedule.schedule import Schedule

LARGE = 4096  # ranks x micro-batches from which schedules that a sibling beats are left out


@dataclass(frozen=True, slots=True)
class _Rival:
    """One schedule that could be built. `peak` is 0 if the family has no form of it."""

    name: str
    family: Family
    request: Request
    stages_per_rank: int
    peak: float

    @property
    def siblings(self) -> tuple[str, int]:
        """Of those alike none is faster than the one with the highest peak."""
        return self.family.siblings or self.name, self.stages_per_rank


def published_schedules(request: Request) -> list[Schedule]:
    """Build the schedules that serve a request's counts, placements, most stages and cap, those of plugins too.

    Those with a size of their own come in each size: GEMS with all parts that divide N, interleaved and looped ones
    with 2, 3 and 4 chunks, 1F1B with the most micro-batches in flight that the cap allows. Without a cap all are built.
    From 4096 ranks x micro-batches on only one of like schedules is, that with the most memory, which they trade for
    time (GPipe or 1F1B or layer parallelism, GEMS's parts, ZB-V or V-Half or V-Min, ZB-H2 or ZB-H1): building all takes
    seconds there.
    """
    stages: dict[int, StageCosts] = {}
    served: set[tuple[str, int]] = set()
    found = []
    is_large = request.num_ranks * request.num_micro_batches >= LARGE
    limit = float("inf") if request.cap is None else request.cap + TOLERANCE
    for rival in sorted(_rivals(request), key=lambda rival: -rival.peak):
        num_stages = rival.stages_per_rank * request.num_ranks
        if request.max_stages is not None and num_stages > request.max_stages:
            continue
        costs = stages.setdefault(num_stages, request.costs.stages(num_stages))
        lightest = min(costs.activation) * rival.stages_per_rank
        if rival.peak * lightest > limit or (is_large and rival.siblings in served):
            continue
        if request.placements and rival.family.placement.__name__ not in request.placements:
            continue
        try:
            schedule = rival.family.build(rival.request)
        except ConfigError:
            continue
        is_known = rival.peak and lightest == max(costs.activation) * rival.stages_per_rank == 1.0
        if is_known or request.cap is None or max(peaks(schedule, costs)) <= limit:
            served.add(rival.siblings)
            found.append(schedule)
    return found


def _rivals(request: Request) -> Iterator[_Rival]:
    for name, family in FAMILIES.items():
        if family.rival is None or (family.num_directions == 2 and request.num_micro_batches % 2):
            continue
        for size in family.rival(request):
            peak = family.peak_units(family.terms(size)) if family.peak_units else None
            yield _Rival(name, family, size, family.stages(size.chunks), peak or 0.0)

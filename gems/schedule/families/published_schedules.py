"""Every published schedule that can serve a request: what a search must not be worse than."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from gems.errors import ConfigError
from gems.schedule.bounds import peak_units
from gems.schedule.costs import StageCosts
from gems.schedule.families.chimera import chimera
from gems.schedule.families.dualpipe_v import dualpipe_v
from gems.schedule.families.gems_master import gems_mast, gems_master
from gems.schedule.families.gems_zb import gems_zb
from gems.schedule.families.gpipe import gpipe
from gems.schedule.families.interleaved import interleaved_1f1b, looped_bfs
from gems.schedule.families.layer_parallel import layer_parallel
from gems.schedule.families.one_f_one_b import one_f_one_b
from gems.schedule.families.v_shape import v_half, v_min
from gems.schedule.families.zb_v import zb_v
from gems.schedule.families.zero_bubble import zb_h1, zb_h2
from gems.schedule.ledger import TOLERANCE, peaks
from gems.schedule.request import Request
from gems.schedule.schedule import Schedule

CHUNKS = (2, 3, 4)
LARGE = 4096  # ranks x micro-batches from which schedules that a sibling beats are left out


@dataclass(frozen=True, slots=True)
class _Candidate:
    """One schedule that could be built. Of siblings, none is faster than the one with the highest peak."""

    siblings: str
    placement: str
    stages_per_rank: int
    peak: float
    build: Callable[[], Schedule]


def named(request: Request) -> list[Schedule]:
    """Build the published schedules that serve a request's counts, placements, most stages and cap.

    Those with a size of their own come in each size: GEMS with all parts that divide N, interleaved and looped ones
    with 2, 3 and 4 chunks, 1F1B with the most micro-batches in flight that the cap allows. Without a cap all are given.
    From 4096 ranks x micro-batches on only one of like schedules is, that with the most memory, which they trade for
    time (GPipe or 1F1B or layer parallelism, GEMS's parts, ZB-V or V-Half or V-Min, ZB-H2 or ZB-H1): building all takes
    seconds there.
    """
    stages: dict[int, StageCosts] = {}
    served: set[str] = set()
    found = []
    is_large = request.num_ranks * request.num_micro_batches >= LARGE
    for candidate in sorted(_candidates(request), key=lambda candidate: -candidate.peak):
        num_stages = candidate.stages_per_rank * request.num_ranks
        if request.max_stages is not None and num_stages > request.max_stages:
            continue
        costs = stages.setdefault(num_stages, request.costs.stages(num_stages))
        lightest = min(costs.activation) * candidate.stages_per_rank
        limit = float("inf") if request.cap is None else request.cap + TOLERANCE
        if candidate.peak * lightest > limit or (is_large and candidate.siblings in served):
            continue
        if request.placements and candidate.placement not in request.placements:
            continue
        try:
            schedule = candidate.build()
        except ConfigError:
            continue
        is_known = lightest == max(costs.activation) * candidate.stages_per_rank == 1.0
        if is_known or request.cap is None or max(peaks(schedule, costs)) <= limit:
            served.add(candidate.siblings)
            found.append(schedule)
    return found


def _candidates(request: Request) -> Iterator[_Candidate]:
    p, n = request.num_ranks, request.num_micro_batches
    one, two = request.costs.stages(p), request.costs.stages(2 * p)

    def candidate(
        name: str, placement: str, stages_per_rank: int, build: Callable[[], Schedule], siblings: str = "",
        parts: int = 1, cap: float | None = None,
    ) -> _Candidate:  # fmt: skip
        peak = peak_units(name, p, n, parts, chunks=stages_per_rank, cap=cap)
        assert peak is not None, name
        return _Candidate(siblings or name, placement, stages_per_rank, peak, build)

    yield candidate("layer_parallel", "linear", 1, partial(layer_parallel, p, n), "in_flight")
    yield candidate("gpipe", "linear", 1, partial(gpipe, p, n), "in_flight")
    in_flight = _most_in_flight(request, one)
    if in_flight:
        yield candidate("1f1b", "linear", 1, partial(one_f_one_b, p, n, in_flight), "in_flight", cap=in_flight)
    yield candidate("zb_h1", "linear", 1, partial(zb_h1, p, n, one), "zb_h")
    yield candidate("zb_h2", "linear", 1, partial(zb_h2, p, n, one), "zb_h")
    for chunks in CHUNKS:
        loops = partial(interleaved_1f1b, p, n, chunks)
        yield candidate("interleaved_1f1b", "looped", chunks, loops, f"interleaved {chunks}")
        yield candidate("looped_bfs", "looped", chunks, partial(looped_bfs, p, n, chunks), f"looped {chunks}")
    yield candidate("zb_v", "v", 2, partial(zb_v, p, n, two), "v")
    yield candidate("v_half", "v", 2, partial(v_half, p, n, two), "v")
    yield candidate("v_min", "v", 2, partial(v_min, p, n, two), "v")
    yield candidate("dualpipe_v", "v", 2, partial(dualpipe_v, p, n))
    if n % 2:
        return
    yield candidate("chimera", "bidirectional", 1, partial(chimera, p, n))
    yield candidate("gems_zb", "bidirectional", 1, partial(gems_zb, p, n))
    yield candidate("gems_mast", "bidirectional", 1, partial(gems_mast, p, n // 2), parts=n // 2)
    for parts in (m for m in range(1, n // 2 + 1) if n % (2 * m) == 0):
        master = partial(gems_master, p, n // parts, parts)
        yield candidate("gems_master", "bidirectional", 1, master, parts=parts)


def _most_in_flight(request: Request, costs: StageCosts) -> int:
    """Return the most micro-batches with which 1F1B keeps the cap: stage s then holds min(K, P - s) of them."""
    if request.cap is None:
        return request.num_ranks
    fitting = [
        k
        for k in range(1, request.num_ranks + 1)
        if all(
            min(k, request.num_ranks - stage, request.num_micro_batches) * size <= request.cap + TOLERANCE
            for stage, size in enumerate(costs.activation)
        )
    ]
    return max(fitting, default=0)

"""GEMS: two copies of the pipeline in opposite directions over the same ranks, in turn."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from gems.schedule.action import Action, backward, forward
from gems.schedule.placement import bidirectional
from gems.schedule.registry import Terms, schedule_family, with_sizes
from gems.schedule.request import Request
from gems.schedule.schedule import Schedule

PLANNED_PARTS = (1, 2, 4)


def _step_units(s: Terms) -> float | None:
    runs, way = s.n // s.parts, s.p - 1 + s.parts
    return way * s.f + runs * way * s.b + (runs - 1) * s.parts * s.f if s.b >= s.f else None


def _halves(request: Request) -> Iterable[Request]:
    return with_sizes("num_parts", [request.num_micro_batches // 2])(request)


def _every_parts(request: Request) -> Iterable[Request]:
    half = request.num_micro_batches // 2
    return with_sizes("num_parts", (parts for parts in range(1, half + 1) if half % parts == 0))(request)


def _planned_parts(request: Request) -> Iterable[Request]:
    n = request.num_micro_batches
    return with_sizes("num_parts", (parts for parts in PLANNED_PARTS if n % (2 * parts) == 0))(request)


@schedule_family(
    "gems_mast", step_units=_step_units, peak_units=lambda s: s.parts, placement=bidirectional, num_directions=2,
    has_runs=True, planned=None, rival=_halves,
)  # fmt: skip
def gems_mast(request: Request) -> Schedule:
    """Build GEMS-MAST (Jain et al. 2020): one run down and one run up, that is MASTER with two runs."""
    master = gems_master(replace(request, num_micro_batches=2 * request.num_parts))
    return replace(master, name="gems_mast")


@schedule_family(
    "gems_master", step_units=_step_units, peak_units=lambda s: s.parts, placement=bidirectional, num_directions=2,
    has_runs=True, planned=_planned_parts, rival=_every_parts, is_quick=True,
)  # fmt: skip
def gems_master(request: Request) -> Schedule:
    """Build GEMS-MASTER (Jain et al. 2020): an even number of runs, direction 0 and 1 in turn.

    Each run is a block of `num_parts` micro-batches, all forwards and then all backwards. No rank waits on
    purpose: a rank that has freed the activations of one run starts the next, so runs chase each other over the
    ranks. Holds `num_parts` = m micro-batches of activations on every rank, whatever the number of runs, and takes,
    for b >= f, (P - 1 + m) f + (N / m)(P - 1 + m) b + (N / m - 1) m f time; with one part P f + N P b + (N - 1) f.
    """
    placement, parts = bidirectional(request.num_ranks), request.num_parts
    runs = request.num_micro_batches // parts
    rows = tuple(
        tuple(action for run in range(runs) for action in _run(placement.ranks[run % 2].index(rank), run, parts))
        for rank in range(request.num_ranks)
    )
    return Schedule("gems_master", runs * parts, placement, rows)


def _run(stage: int, run: int, num_parts: int) -> tuple[Action, ...]:
    micro_batches = range(run * num_parts, (run + 1) * num_parts)
    direction = run % 2
    return tuple(make(stage, m, direction) for make in (forward, backward) for m in micro_batches)

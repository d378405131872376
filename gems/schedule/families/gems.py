"""GEMS: two copies of the pipeline in opposite directions over the same ranks, in turn.

There is also a variant with a split backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from gems.schedule.action import Action, backward, forward, input_gradient, weight_gradient
from gems.schedule.families.shared import refuse_odd
from gems.schedule.placement import bidirectional
from gems.schedule.registry import Request, Terms, schedule_family, with_sizes
from gems.schedule.schedule import Schedule

PLANNED_PARTS = (1, 2, 4)


def _step_units(s: Terms) -> float | None:
    runs = s.n // s.parts
    steps = s.p - 1 + s.parts
    return steps * s.f + runs * steps * s.b + (runs - 1) * s.parts * s.f if s.b >= s.f else None


def _parts(request: Request, parts: Iterable[int]) -> Iterable[Request]:
    """Return a request for each of `parts` that gives both directions the same number of runs."""
    fitting = (number for number in parts if request.num_micro_batches % (2 * number) == 0)
    return with_sizes("num_parts", fitting)(request)


@schedule_family(
    "gems_mast",
    step_units=_step_units,
    peak_units=lambda s: s.parts,
    placement=bidirectional,
    num_directions=2,
    has_runs=True,
    planned=None,
    rival=lambda request: _parts(request, [request.num_micro_batches // 2]),
)
def gems_mast(request: Request) -> Schedule:
    """Build GEMS-MAST (Jain et al. 2020).

    It has one run down and one run up, that is, MASTER with two runs.
    """
    master = gems_master(replace(request, num_micro_batches=2 * request.num_parts))
    return replace(master, name="gems_mast")


@schedule_family(
    "gems_master",
    step_units=_step_units,
    peak_units=lambda s: s.parts,
    placement=bidirectional,
    num_directions=2,
    has_runs=True,
    planned=lambda request: _parts(request, PLANNED_PARTS),
    rival=lambda request: _parts(request, range(1, request.num_micro_batches // 2 + 1)),
    is_quick=True,
    # the backwards of the runs follow each other
    chain_bound=lambda s, recompute, share: s.f + s.n // s.parts * s.b,
    least_in_flight=lambda s: [s.parts] * s.p,
)
def gems_master(request: Request) -> Schedule:
    """Build GEMS-MASTER (Jain et al. 2020): an even number of runs, alternating directions 0 and 1.

    Each run is a block of `num_parts` micro-batches, with all forwards followed by all backwards.
    No rank waits on purpose: a rank that has freed the activations of one run starts the next, so
    runs follow each other over the ranks. Every rank holds `num_parts` = m micro-batches of
    activations, for any number of runs. For b >= f it takes (P - 1 + m) f + (N / m)(P - 1 + m) b +
    (N / m - 1) m f time; with one part P f + N P b + (N - 1) f.
    """
    runs = request.num_micro_batches // request.num_parts
    return _in_turn("gems_master", request, runs, request.num_parts, (forward, backward))


def _in_turn(
    name: str, request: Request, runs: int, parts: int, makes: Sequence[Callable[..., Action]]
) -> Schedule:
    """Build runs in alternating directions, each with all actions of a kind before the next."""
    ranks = range(request.num_ranks)
    rank_schedules = tuple(
        tuple(
            make(stages[run % 2], m, run % 2)
            for run in range(runs)
            for make in makes
            for m in range(run * parts, (run + 1) * parts)
        )
        for stages in zip(ranks, reversed(ranks), strict=True)
    )
    return Schedule(name, runs * parts, bidirectional(request.num_ranks), rank_schedules)


@schedule_family(
    "gems_zb",
    peak_units=lambda s: 1.0,
    placement=bidirectional,
    num_directions=2,
    is_quick=True,
    step_units=lambda s: (
        s.p * s.f + s.n * s.p * s.i + (s.n - 1) * (s.f + s.w) + s.w if s.i >= s.f else None
    ),
    chain_bound=lambda s, recompute, share: s.f + s.n * s.i,
)
def gems_zb(request: Request) -> Schedule:
    """Build GEMS-MASTER (Jain et al. 2020) with each backward split into I and then W.

    The next micro-batch, in the other direction, still finds each rank free of activations, but the
    path of the backward through the ranks no longer waits for weight gradients. For i >= f it takes
    P f + N P i + (N - 1)(f + w) + w time, with one micro-batch of activations.

    Raises:
        ConfigError: The number of micro-batches is odd.
    """
    refuse_odd("gems_zb", request.num_micro_batches, "the two directions take turns")
    makes = (forward, input_gradient, weight_gradient)
    return _in_turn("gems_zb", request, request.num_micro_batches, 1, makes)

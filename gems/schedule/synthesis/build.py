"""From the rows of the list scheduler to a schedule of actions, and the placements that a search may take."""

from __future__ import annotations

from collections.abc import Sequence

from gems.schedule.action import Action, Kind
from gems.schedule.placement import Placement, bidirectional, linear, v, wave
from gems.schedule.registry import CAPPED
from gems.schedule.request import Request
from gems.schedule.schedule import Schedule
from gems.schedule.synthesis.problem import Problem

WAVE_CHUNKS = (4, 8)


def build(problem: Problem, rows: Sequence[Sequence[int]]) -> Schedule:
    """Build the schedule; rows hold micro-batch x 6 S + operation, operations as in `Acting`."""
    num_stages = problem.num_stages
    kinds = [(Kind.F, stage) for stage in range(num_stages)]
    kinds += [(Kind.I, stage) for stage in reversed(range(num_stages))]
    for kind in (Kind.W, Kind.R, Kind.OFFLOAD, Kind.PREFETCH):
        kinds += [(kind, stage) for stage in range(num_stages)]

    def action(code: int) -> Action:
        m, operation = divmod(code, 6 * num_stages)
        kind, stage = kinds[operation]
        return Action(kind, stage, m, m % problem.num_directions)

    return Schedule(
        CAPPED, problem.num_micro_batches, problem.placement, tuple(tuple(map(action, row)) for row in rows)
    )


def placements_of(request: Request) -> list[tuple[str, Placement]]:
    """Return the placements that a request allows, by name; a wave with four and with eight stages a rank.

    More stages let activations go sooner and more smoothly. None has more than the request's `max_stages`, unless
    nothing else is left.
    """
    num_ranks = request.num_ranks
    made = {
        "linear": [linear(num_ranks)],
        "bidirectional": [bidirectional(num_ranks)],
        "v": [v(num_ranks)],
        "wave": [wave(num_ranks, chunks) for chunks in WAVE_CHUNKS],
    }
    found = [(name, placement) for name in request.placements or tuple(made) for placement in made[name]]
    most = request.max_stages
    fitting = [(name, placement) for name, placement in found if most is None or placement.num_stages <= most]
    return fitting or [min(found, key=lambda pair: pair[1].num_stages)]

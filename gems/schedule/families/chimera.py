"""Chimera: two pipelines in opposite directions at once, each with half the micro-batches."""

from __future__ import annotations

from collections.abc import Iterator

from gems.schedule.action import Action, backward, forward
from gems.schedule.families.shared import in_order_of_time, refuse_odd
from gems.schedule.placement import bidirectional
from gems.schedule.registry import Request, Terms, schedule_family
from gems.schedule.schedule import Schedule


def _step_units(s: Terms) -> float | None:
    is_odd = s.p % 2
    return s.work + (s.p - 2 + is_odd) * s.f if s.f == s.b and s.n % (s.p + is_odd) == 0 else None


@schedule_family(
    "chimera",
    step_units=_step_units,
    peak_units=lambda s: min(s.n, s.p),
    placement=bidirectional,
    num_directions=2,
    is_quick=True,
)
def chimera(request: Request) -> Schedule:
    """Build Chimera (Li & Hoefler 2021).

    The paper is "Chimera: Efficiently Training Large-Scale Neural Networks". Both directions run
    the slots of 1F1B with half of a unit of P micro-batches each; for even P their slots never
    collide. Further units follow every 2 P slots; their first forwards fill the holes at the end of
    the previous unit (the paper's direct concatenation). For f = b and P dividing N it takes (2 N +
    P - 2) f time; a rank holds at most P micro-batches of activations. The paper has even P. For
    odd P, direction 1 starts a slot later and a unit has P + 1 micro-batches.

    Raises:
        ConfigError: The number of micro-batches is odd.
    """
    num_ranks = request.num_ranks
    num_micro_batches = request.num_micro_batches
    refuse_odd("chimera", num_micro_batches, "half run in each direction")
    late = num_ranks % 2
    unit = num_ranks + late

    def timed() -> Iterator[tuple[float, Action]]:
        for m in range(num_micro_batches):
            index, place = divmod(m, unit)
            half = min(unit, num_micro_batches - index * unit) // 2
            direction, turn = divmod(place, half)
            start = 2 * num_ranks * index + 2 * turn + direction * late
            for stage in range(num_ranks):
                yield start + stage, forward(stage, m, direction)
                yield start + 2 * num_ranks - 1 - stage, backward(stage, m, direction)

    return in_order_of_time("chimera", num_micro_batches, bidirectional(num_ranks), timed())

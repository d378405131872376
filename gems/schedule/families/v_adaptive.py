"""The V search: the fastest of all building blocks on a V that keep a cap."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from gems.errors import ConfigError
from gems.schedule.families.v_shape import PERIOD, Steps, Waits, block, min_peak, repeated
from gems.schedule.ledger import TOLERANCE
from gems.schedule.placement import v
from gems.schedule.registry import Request, Terms, schedule_family
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate

STEPS: tuple[Steps, ...] = ((1, 1, 1, 1), (1, 2, 1, 2), (1, 3, 1, 3))
WAITS: tuple[Waits, ...] = ((0, 0, 1), *product((0, 2, 4), (0, 2, 4), (0, 2, 4)))
# number of blocks that are simulated; on many ranks, SIZE_TRIED over P squared
MAX_TRIED, SIZE_TRIED = (12, 1 << 13)
# from this number of ranks x micro-batches on, it takes a search too long
MAX_RIVAL = 1 << 13


def _most_held(p: int, cap: float | None) -> int:
    return 2 * p if cap is None else min(2 * p, int(2 * (cap + TOLERANCE)))


def _step_units(s: Terms) -> float | None:
    held = _most_held(s.p, s.cap)
    return (
        s.work + (3 * s.p - 1 - held) * s.f / 2
        if s.n >= 2 * s.p and 4 * held >= 7 * s.p and s.is_even
        else None
    )


def _rivals(request: Request) -> Iterable[Request]:
    return (request,) if request.num_ranks * request.num_micro_batches < MAX_RIVAL else ()


@schedule_family(
    "v_adaptive",
    placement=v,
    stages_per_rank=2,
    siblings="v",
    planned=None,
    rival=_rivals,
    peak_units=lambda s: min(s.n, _most_held(s.p, s.cap) / 2),
    step_units=_step_units,
)
def v_adaptive(request: Request) -> Schedule:
    """Build the fastest V under a cap.

    This is the V search of Qi et al. 2024, "Pipeline Parallelism with Controllable Memory".
    Building blocks differ in the slots from rank to rank and in the waits between the four passes.
    Blocks whose F and I never collide on a rank, and that keep the cap when they repeat, are
    squeezed and simulated with 2 P micro-batches, starting with those that use most of the cap; the
    fastest one is chosen. From 7 / 8 of 1F1B's memory on, with f = i = w and N >= 2 P, the bubble
    is (3 P - 1) / 2 - cap: the last rank can neither start before P - 1, nor finish its first
    micro-batch before 3 P - 1 slots of f / 2, and until then it can only run as many F as the cap
    allows.

    Raises:
        ConfigError: The cap is below V-Min's memory.
    """
    num_ranks = request.num_ranks
    held = _most_held(request.num_ranks, request.cap)
    least = min_peak(num_ranks)
    if held < 2 * least:
        raise ConfigError(
            "schedule.activation_cap",
            request.cap,
            f"must be {least} or more for v_adaptive on {num_ranks} ranks",
            "raise it, or use schedule=capped",
        )
    short = replace(request, num_micro_batches=min(request.num_micro_batches, 2 * num_ranks))
    costs = request.costs.of(v(num_ranks))
    tried = max(2, min(MAX_TRIED, SIZE_TRIED // num_ranks**2))
    blocks = sorted(_blocks(num_ranks, held), reverse=True)[:tried]

    def span(steps: Steps, waits: Waits) -> float:
        return simulate(repeated("v_adaptive", short, steps, waits, held), costs).span

    _, steps, waits = min((span(steps, waits), steps, waits) for _, steps, waits in blocks)
    return repeated("v_adaptive", request, steps, waits, held)


def _blocks(num_ranks: int, most_held: int) -> Iterator[tuple[int, Steps, Waits]]:
    """Yield the blocks that keep the cap: their peak, steps and waits."""
    last = 4 * num_ranks - 1
    for steps, waits in product(STEPS, WAITS):
        slots = block(num_ranks, steps, waits)
        most = 0
        for rank in range(num_ranks):
            places = (rank, 2 * num_ranks - 1 - rank)
            begun = [(slots[place], slots[last - place]) for place in places]
            if len({slot % PERIOD for both in begun for slot in both}) < 4:
                break
            held = (
                sum((slot - f) // PERIOD - (slot - i - 1) // PERIOD for f, i in begun)
                for slot in range(PERIOD)
            )
            most = max(most, *held)
        else:
            if most <= most_held:
                yield most, steps, waits

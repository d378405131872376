"""V-Half, V-Min and the V search: a repeated building block on a V of two chunks per rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import product

from gems.errors import ConfigError
from gems.schedule.action import forward, input_gradient
from gems.schedule.families.shared import in_order_of_time
from gems.schedule.families.squeeze import squeeze
from gems.schedule.families.weight_gradients import place_weight_gradients
from gems.schedule.ledger import TOLERANCE
from gems.schedule.placement import v
from gems.schedule.registry import Request, Terms, schedule_family
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate

PERIOD = 6  # F, I and W of two chunks
Steps = tuple[int, int, int, int]
Waits = tuple[int, int, int]
STEPS: tuple[Steps, ...] = ((1, 1, 1, 1), (1, 2, 1, 2), (1, 3, 1, 3))
WAITS: tuple[Waits, ...] = ((0, 0, 1), *product((0, 2, 4), (0, 2, 4), (0, 2, 4)))
# number of blocks that are simulated; on many ranks, SIZE_TRIED over P squared
MAX_TRIED, SIZE_TRIED = (12, 1 << 13)
# from this number of ranks x micro-batches on, it takes a search too long
MAX_RIVAL = 1 << 13


def _half_peak(p: int) -> int:
    return (p + 2) // 2


def _min_peak(p: int) -> int:
    """Return the peak of V-Min in micro-batches of activations."""
    return (p + 4) // 3


def _min_wait(p: int) -> int:
    return 2 * ((1 - p) % 3)


@schedule_family(
    "v_half",
    placement=v,
    stages_per_rank=2,
    siblings="v",
    peak_units=lambda s: min(s.n, _half_peak(s.p)),
    step_units=lambda s: (
        s.work + (3 * s.p - 7 + 3 * (s.p % 2)) * s.f / 2 if s.n >= s.p >= 3 and s.is_even else None
    ),
)
def v_half(request: Request) -> Schedule:
    """Build V-Half (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    The passes up the ranks take two slots per rank. It holds at most (P + 2) div 2 micro-batches of
    activations. For N >= P >= 3 and f = i = w = 1 its bubble is 3 (P - 1) / 2 - 1/2, half of
    1F1B's, or 3 / 2 less if P is even: four slots before the first I then use the room that an odd
    P lacks.
    """
    waits = (0, 0 if request.num_ranks % 2 else 4, 0)
    return repeated("v_half", request, (1, 2, 1, 2), waits, 2 * _half_peak(request.num_ranks))


@schedule_family(
    "v_min",
    placement=v,
    stages_per_rank=2,
    siblings="v",
    peak_units=lambda s: min(s.n, _min_peak(s.p)),
    step_units=lambda s: (
        s.work + (4 * s.p - 5 - _min_wait(s.p)) * s.f / 2 if s.n >= s.p >= 3 and s.is_even else None
    ),
)
def v_min(request: Request) -> Schedule:
    """Build V-Min (Qi et al. 2024, "Pipeline Parallelism with Controllable Memory").

    Every pass continues on the next rank at once, so the lifetime of a micro-batch is as short as
    possible. It holds at most (P + 4) div 3 micro-batches of activations. For N >= P >= 3 and f = i
    = w = 1 its bubble is 2 (P - 1) - 1/2, two thirds of 1F1B's, if 3 divides P - 1. Otherwise two
    or four slots before the first I keep the chunks of a rank apart and use the remaining room; the
    bubble is then shorter by these slots of half a unit.
    """
    waits = (0, _min_wait(request.num_ranks), 0)
    return repeated("v_min", request, (1, 1, 1, 1), waits, 2 * _min_peak(request.num_ranks))


def repeated(name: str, request: Request, steps: Steps, waits: Waits, most_held: int) -> Schedule:
    """Repeat a building block every six slots and squeeze it; W fill the gaps.

    A block without a wait before its first I is as tight as possible, so its order stays.
    """
    num_ranks = request.num_ranks
    num_micro_batches = request.num_micro_batches
    passes = [
        (
            slot,
            forward if place < 2 * num_ranks else input_gradient,
            min(place, 4 * num_ranks - 1 - place),
        )
        for place, slot in enumerate(block(num_ranks, steps, waits))
    ]
    timed = (
        (slot + PERIOD * m, make(stage, m))
        for m in range(num_micro_batches)
        for slot, make, stage in passes
    )
    order = in_order_of_time(name, num_micro_batches, v(num_ranks), timed)
    if waits[1]:
        order = squeeze(order, most_held)
    return place_weight_gradients(order, request.costs.of(order.placement), most_held)


def block(num_ranks: int, steps: Steps, waits: Waits) -> list[int]:
    """Return the slots of a micro-batch's F, first stage first, and of its I, last stage first.

    `steps` are slots from a rank to the next for F down, F up, I down and I up; `waits` are
    additional slots between these.
    """
    slot = 0
    slots: list[int] = []
    for step, wait in zip(steps, (*waits, 0), strict=True):
        slots += range(slot, slot + step * num_ranks, step)
        slot = slots[-1] + 1 + wait
    return slots


def _most_held(p: int, cap: float | None) -> int:
    return 2 * p if cap is None else min(2 * p, int(2 * (cap + TOLERANCE)))


def _step_units(s: Terms) -> float | None:
    most_held = _most_held(s.p, s.cap)
    return (
        s.work + (3 * s.p - 1 - most_held) * s.f / 2
        if s.n >= 2 * s.p and 4 * most_held >= 7 * s.p and s.is_even
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
    most_held = _most_held(request.num_ranks, request.cap)
    least = _min_peak(num_ranks)
    if most_held < 2 * least:
        raise ConfigError(
            "schedule.activation_cap",
            request.cap,
            f"must be {least} or more for v_adaptive on {num_ranks} ranks",
            "raise it, or use schedule=capped",
        )
    short = replace(request, num_micro_batches=min(request.num_micro_batches, 2 * num_ranks))
    costs = request.costs.of(v(num_ranks))
    tried = max(2, min(MAX_TRIED, SIZE_TRIED // num_ranks**2))
    blocks = sorted(_blocks(num_ranks, most_held), reverse=True)[:tried]

    def span(steps: Steps, waits: Waits) -> float:
        return simulate(repeated("v_adaptive", short, steps, waits, most_held), costs).span

    _, steps, waits = min((span(steps, waits), steps, waits) for _, steps, waits in blocks)
    return repeated("v_adaptive", request, steps, waits, most_held)


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
            counts = (
                sum((slot - f) // PERIOD - (slot - i - 1) // PERIOD for f, i in begun)
                for slot in range(PERIOD)
            )
            most = max(most, *counts)
        else:
            if most <= most_held:
                yield most, steps, waits

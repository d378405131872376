"""Synthesis: find the fastest schedule for a request, under a cap on a rank's activations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf

from gems.errors import ConfigError, ScheduleError
from gems.schedule.costs import DepthCosts
from gems.schedule.families.published_schedules import published_schedules
from gems.schedule.ledger import TOLERANCE, peaks
from gems.schedule.lower import add_transfers
from gems.schedule.placement import Placement, bidirectional, linear, v, wave
from gems.schedule.registry import CAPPED, Request, schedule_family, with_sizes
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate
from gems.schedule.strips import StripCosts
from gems.schedule.synthesis.bound import rough_span, span_bound
from gems.schedule.synthesis.problem import SIZES_PER_UNIT, Act, Problem, least_room, problem
from gems.schedule.synthesis.search import GREEDY, Search
from gems.schedule.synthesis.strip_scheduler import (
    any_strips_span_bound,
    least_strip_room,
    strip_schedules,
    strips_span_bound,
)
from gems.schedule.synthesis.templates import STEPS_PER_S, Budget
from gems.schedule.synthesis.whole_backward import with_whole_backwards
from gems.schedule.validate import validate

__all__ = ["FoundSchedule", "find_schedule", "least_cap"]

CHECK_STEPS = 9
CHECK_SHARE = 0.7
NUM_REPLAYED = 3
NEAR = 1.25
NUM_PLACEMENTS = 5
NUM_WITH_ACTS = 4
WAVE_CHUNKS = (4, 8)
# lower caps that are tried for strips, and the share by which one must be faster
RUNGS, GAINED = ((1.0, 1.25, 1.5, 2.0, 3.0, 4.0), 1e-9)
PLANNED_CAPS = (1.0, 2.0, 4.0)
MAX_PLANNED = 64  # ranks x micro-batches for which `gems plan` may search


@dataclass(frozen=True, slots=True)
class FoundSchedule:
    """A schedule and its quality.

    `span` is in the units of the costs, `peak` in the units of a cap. `bound` is an efficiency that
    no schedule on the allowed placements exceeds with this number of strips, and `bound_any_strips`
    one that none exceeds with any number of strips. `method` is the method that made the schedule
    (greedy, pattern, annealing, solver, or the name of a published family); `candidates` is the
    number of simulated schedules.
    """

    schedule: Schedule
    span: float
    efficiency: float
    bound: float
    bound_any_strips: float
    placement: str
    peak: tuple[float, ...]
    method: str
    candidates: int

    @property
    def gap(self) -> float:
        """The relative distance of the efficiency to the bound."""
        return 1.0 - self.efficiency / self.bound if self.bound else 0.0

    def or_faster(self, lower: FoundSchedule) -> FoundSchedule:
        """Return the faster of this result and one under a lower cap, with bounds for this cap."""
        best = lower if lower.span < self.span else self
        return replace(
            best,
            bound=max(self.bound, lower.bound),
            bound_any_strips=max(self.bound_any_strips, lower.bound_any_strips),
            candidates=self.candidates + lower.candidates,
        )


def find_schedule(request: Request, rivals: Iterable[Schedule] = ()) -> FoundSchedule:
    """Return the fastest schedule found for a request.

    The result is not slower than any of `rivals`. Templates are patterns (modulo scheduling),
    improved by annealing and, if OR-tools is installed, by its solver. A list scheduler turns them
    into finite steps, and the best of these are varied. If a split backward takes longer, backwards
    are joined again if that is faster. The number of steps of the search follows from `budget_s`,
    so the result is the same for the same request on any machine. The `rivals` that keep the cap,
    with the same ranks and micro-batches, take part. The winner is validated. A list of strips is
    built forward in time, so more room may mislead it; therefore the results under the lower caps
    of `RUNGS` are considered as well.

    Raises:
        ConfigError: The cap is below the least one that any allowed placement can keep.
    """
    rivals = list(rivals)
    best = _at_cap(request, rivals)
    if request.num_strips == 1 or request.cap is None:
        return best
    for cap in (rung for rung in reversed(RUNGS) if rung < (request.cap or 0.0)):
        lower = replace(request, cap=cap)
        if least_cap(lower) > cap + TOLERANCE:
            break
        if _shortest(lower) < best.span * (1 - GAINED):
            best = best.or_faster(_at_cap(lower, published_schedules(lower) if rivals else ()))
    return best


def _shortest(request: Request) -> float:
    """Return a lower bound of the time of a step on the allowed placements."""
    request, problems, rooms = _problems(request)
    return min(
        _time_bound(
            request,
            case.placement,
            case.counts,
            _any_strips_bound(request, case.placement, case.counts),
        )
        for case, room in zip(problems, rooms, strict=True)
        if room <= case.cap
    )


@dataclass(slots=True)
class _Race:
    """The fastest schedule so far, as ranks run it."""

    request: Request
    result: Simulation | None = None
    schedule: Schedule | None = None
    method: str = ""

    @property
    def span(self) -> float:
        return inf if self.result is None else self.result.span

    def enter(self, schedule: Schedule, method: str) -> None:
        """Keep a schedule if it is the fastest."""
        request = self.request
        costs = request.costs.of(schedule.placement)
        network = request.network
        cap = request.cap
        try:
            result = simulate(schedule, costs, network, cap)
            # with transfers it is never faster, and on free links it takes the same time
            if result.span < self.span and network.takes_time(costs.boundary_bytes):
                result = simulate(add_transfers(schedule, costs, network, cap), costs, network, cap)
        except ScheduleError:
            return
        if result.span < self.span:
            self.result, self.schedule, self.method = result, schedule, method

    def enter_rivals(self, rivals: Iterable[Schedule]) -> None:
        """Enter the rivals that have the same ranks and micro-batches and keep the cap."""
        request = self.request
        size = request.num_ranks, request.num_micro_batches
        for rival in rivals:
            costs = request.costs.of(rival.placement)
            if (rival.num_ranks, rival.num_micro_batches) == size and (
                request.cap is None or max(peaks(rival, costs)) <= request.cap + TOLERANCE
            ):
                self.enter(rival, rival.name)


def _check(request: Request, least: float) -> None:
    cap = request.cap
    if cap is not None and cap < least - TOLERANCE:
        advice = "raise it"
        if not request.allow:
            advice += ", or allow recompute or offload (schedule.memory_actions)"
        raise ConfigError(
            "schedule.activation_cap",
            f"{cap:g}",
            f"must be at least {least:.6g}, what one micro-batch holds on the heaviest rank",
            advice,
        )


def _at_cap(request: Request, rivals: Iterable[Schedule]) -> FoundSchedule:
    """Search under the cap of a request alone."""
    if request.num_strips > 1 and request.allow:
        raise ConfigError(
            "schedule.memory_actions",
            list(request.allow),
            "must be empty with parallel.strips above 1",
            "leave one of the two out",
        )
    request, problems, rooms = _problems(request)
    _check(request, min(rooms) / SIZES_PER_UNIT)
    possible = [case for case, room in zip(problems, rooms, strict=True) if room <= case.cap]
    race = _Race(request)
    race.enter_rivals(rivals)
    budget = Budget(int(request.budget_s * STEPS_PER_S))
    least_of = {
        case.placement: _any_strips_bound(request, case.placement, case.counts) for case in problems
    }
    bounds = {
        case.name: _time_bound(request, case.placement, case.counts, least_of[case.placement])
        for case in possible
    }
    num_tried, listed = _listed(
        request, _affordable(request, possible, budget), budget, bounds, race.span
    )
    for case, method, schedule in listed:
        race.enter(schedule, method)
        whole = with_whole_backwards(
            schedule, request.costs.of(schedule.placement), request.network, request.cap
        )
        if whole.rank_schedules != schedule.rank_schedules:
            race.enter(whole, method)
        if race.schedule and case.num_steps * CHECK_STEPS * NUM_REPLAYED > budget.steps:
            break
    return _found(race, num_tried, min(bounds.values()), min(least_of.values()))


def _found(race: _Race, num_tried: int, shortest: float, shortest_any: float) -> FoundSchedule:
    """Validate the fastest schedule and return it with its quality.

    `shortest` and `shortest_any` are lower bounds of a step's time on the allowed placements, with
    the request's number of strips and with any.
    """
    request = race.request
    result = race.result
    schedule = race.schedule
    if result is None or schedule is None:
        raise ConfigError(
            "schedule.budget_s", request.budget_s, "is too short to find a schedule", "raise it"
        )
    validate(schedule, request.costs.of(schedule.placement), request.cap)
    counts = Counter(schedule.directions().values())
    own = schedule.placement, [counts[way] for way in range(schedule.num_directions)]
    least_own = _any_strips_bound(request, *own)
    shortest = min(shortest, _time_bound(request, *own, least_own))
    # memory actions allow only one number of strips
    shortest_any = shortest if request.allow else min(shortest_any, least_own)
    bound, bound_any = (
        min(1.0, result.efficiency * result.span / least) if least else 1.0
        for least in (shortest, shortest_any)
    )
    known = _placements(replace(request, placements=()))
    names = (name for name, p in known if p.ranks == schedule.placement.ranks)
    return FoundSchedule(
        schedule=replace(schedule, name=CAPPED),
        span=result.span,
        efficiency=result.efficiency,
        bound=bound,
        bound_any_strips=bound_any,
        placement=next(names, f"that of {race.method}"),
        peak=result.peak,
        method=race.method,
        candidates=num_tried,
    )


def _listed(
    request: Request,
    problems: list[Problem],
    budget: Budget,
    bounds: Mapping[str, float],
    limit: float,
) -> tuple[int, Iterator[tuple[Problem, str, Schedule]]]:
    """Return the number of schedules that a search has tried, and the best ones, best first.

    Each comes with its problem and method. `bounds` maps the problems' names to times. For strips,
    only schedules that may be shorter than `limit` are listed.
    """
    if request.num_strips > 1:
        costs = [request.costs.of(case.placement) for case in problems]
        shortest = [bounds[case.name] for case in problems]
        num_best = (
            NUM_REPLAYED
            if any(request.network.takes_time(stage_costs.boundary_bytes) for stage_costs in costs)
            else 1
        )
        if any(
            any(stage_costs.split) or stage_costs.strip_loads for stage_costs in costs
        ):  # a replay may be shorter
            num_best = NUM_REPLAYED
            limit = inf
            shortest = [0.0] * len(problems)
        num_tried, runs = strip_schedules(
            problems, request.num_strips, budget, num_best, limit, shortest
        )
        return num_tried, ((run.problem, GREEDY, run.schedule()) for run in runs)
    search = Search(problems, request.allow, budget, request.seed, min(bounds.values()))
    plans = search.run()[:NUM_REPLAYED]
    return search.tried, (
        (plan.problem, plan.method, search.listed(plan).schedule()) for plan in plans
    )


def _planned_caps(request: Request) -> Iterable[Request]:
    is_small = request.num_ranks * request.num_micro_batches <= MAX_PLANNED
    return with_sizes("cap", PLANNED_CAPS if is_small else ())(request)


@schedule_family(CAPPED, stages_per_rank=0, planned=_planned_caps, rival=None)
def fastest(request: Request) -> Schedule:
    """Return the fastest schedule found, including the published ones."""
    return find_schedule(request, published_schedules(request)).schedule


def least_cap(request: Request) -> float:
    """Return the least cap that any allowed placement can keep, in units of a cap."""
    return min(_problems(request)[2]) / SIZES_PER_UNIT


def _problems(request: Request) -> tuple[Request, list[Problem], list[int]]:
    """Return the request with costs of its ranks, and each placement's problem and least cap.

    Only allowed placements are included.
    """
    if isinstance(request.costs, DepthCosts):
        request = replace(request, costs=replace(request.costs, num_ranks=request.num_ranks))
    placements = _placements(request)
    num_strips = request.num_strips
    if num_strips > 1:
        costs = StripCosts(request.costs, num_strips)
        num = request.num_micro_batches * num_strips
        request = replace(request, costs=costs, num_micro_batches=num)
    problems = [
        _problem(request, f"{name}-{i}", placement)
        for i, (name, placement) in enumerate(placements)
    ]
    if num_strips > 1:
        return request, problems, [least_strip_room(case, num_strips) for case in problems]
    rooms = []
    for case in problems:
        acts = [0, *(int(Act[name.upper()]) for name in request.allow)]
        rooms.append(min(least_room(case, (*(act,) * (case.num_stages - 1), 0)) for act in acts))
    return request, problems, rooms


def _problem(request: Request, name: str, placement: Placement) -> Problem:
    costs = request.costs.of(placement)
    return problem(name, placement, request.num_micro_batches, costs, request.network, request.cap)


def _placements(request: Request) -> list[tuple[str, Placement]]:
    """Return the placements that a request allows, by name.

    There are waves with four and with eight stages per rank. More stages free activations earlier
    and more smoothly.

    Raises:
        ConfigError: The model's cut is given, and no allowed placement has this number of stages.
    """
    num_ranks = request.num_ranks
    placements = {
        "linear": [linear(num_ranks)],
        "bidirectional": [bidirectional(num_ranks)],
        "v": [v(num_ranks)],
        "wave": [wave(num_ranks, chunks) for chunks in WAVE_CHUNKS],
    }
    named = [
        (name, placement)
        for name in request.placements or tuple(placements)
        for placement in placements[name]
    ]
    fitting = [
        (name, placement) for name, placement in named if request.allows(placement.num_stages)
    ]
    if not fitting and request.num_stages is not None:
        raise ConfigError(
            "parallel.boundaries",
            f"of {request.num_stages} stages",
            f"must make one of {sorted({placement.num_stages for _, placement in named})} stages,"
            " those of the placements that schedule=capped may use",
            "leave it out, and the search cuts the model too",
        )
    return fitting or [min(named, key=lambda pair: pair[1].num_stages)]


def _affordable(request: Request, problems: list[Problem], budget: Budget) -> list[Problem]:
    """Return the placements whose schedules can be built and checked within the budget.

    There is at least one, the smallest.
    """
    fitting = [
        case for case in problems if case.num_steps * CHECK_STEPS <= budget.steps * CHECK_SHARE
    ]
    chosen = fitting or [min(problems, key=lambda case: case.num_steps)]
    budget.spend(min(budget.steps // 2, CHECK_STEPS * max(case.num_steps for case in chosen)))
    costs = request.costs
    cap = request.cap
    network = request.network
    bounds = {
        case.name: rough_span(costs.of(case.placement), case.placement, case.counts, cap, network)
        for case in chosen
    }
    near = [case for case in chosen if bounds[case.name] <= NEAR * min(bounds.values())]
    near.sort(key=lambda case: bounds[case.name])
    return near[: NUM_WITH_ACTS if request.allow else NUM_PLACEMENTS]


def _time_bound(
    request: Request, placement: Placement, counts: Sequence[int], any_strips: float
) -> float:
    """Return a lower bound of the time of a step with the request's number of strips.

    It is at least `any_strips`.
    """
    costs = request.costs.of(placement)
    cap = request.cap
    network = request.network
    if costs.strip_loads:
        # the first strips are shorter than the mean strip, on which the other bounds are based
        return any_strips
    bound = max(any_strips, span_bound(costs, placement, counts, cap, network, request.allow))
    if request.num_strips == 1:
        return bound
    return max(bound, strips_span_bound(costs, placement, counts, request.num_strips, cap, network))


def _any_strips_bound(request: Request, placement: Placement, counts: Sequence[int]) -> float:
    """Return a lower bound of a step's time without memory actions, for any number of strips."""
    if request.allow:
        return 0.0
    costs = request.costs.of(placement)
    network = request.network
    shared = request.shared_latency
    latency, node_latency = (
        max(0.0, seconds - shared) for seconds in (network.latency, network.node_latency)
    )
    least = replace(network, latency=latency, node_latency=node_latency)
    return any_strips_span_bound(costs, placement, counts, request.num_strips, request.cap, least)

"""Synthesis: the fastest schedule that could be found for a request, under a cap on the activations of a rank."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from gems.errors import ConfigError, ScheduleError
from gems.schedule.costs import StageCosts
from gems.schedule.families.published_schedules import published_schedules
from gems.schedule.ledger import TOLERANCE, peaks
from gems.schedule.placement import Placement
from gems.schedule.registry import CAPPED, schedule_family, with_sizes
from gems.schedule.request import Request
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import Simulation, simulate
from gems.schedule.synthesis.bound import span_bound
from gems.schedule.synthesis.budget import Budget
from gems.schedule.synthesis.build import build, placements_of
from gems.schedule.synthesis.memory_actions import Act, least_room
from gems.schedule.synthesis.problem import SIZES_PER_UNIT, Problem, problem
from gems.schedule.synthesis.search import Search
from gems.schedule.validate import validate

__all__ = ["Found", "capped", "least_cap"]

CHECK_STEPS = 9
CHECK_SHARE = 0.7
NUM_REPLAYED = 3
NEAR = 1.25
NUM_PLACEMENTS, NUM_WITH_ACTS = 5, 4
PLANNED_CAPS = (1.0, 2.0, 4.0)
MAX_PLANNED = 64  # ranks x micro-batches for which `gems plan` may search


@dataclass(frozen=True, slots=True)
class Found:
    """A schedule and how good it is.

    `span` is in the units of the costs, `peak` in those of a cap. `bound` is an efficiency that no schedule on the
    allowed placements exceeds, `gap` what is missing to it, as a part of it. `method` says what made the schedule
    (greedy, pattern, annealing, solver, or the name of a published family), `candidates` how many were played.
    """

    schedule: Schedule
    span: float
    efficiency: float
    bound: float
    gap: float
    placement: str
    peak: tuple[float, ...]
    method: str
    candidates: int


def capped(request: Request, rivals: Iterable[Schedule] = ()) -> Found:
    """Return the fastest schedule found for a request; `rivals` are schedules that it must not be slower than.

    Templates are patterns (modulo scheduling), bettered by annealing and, where OR-tools is installed, by its solver;
    a list scheduler makes finite steps of them, and the best of these are varied. All of it takes a number of steps
    that follows from `budget_s`, so the result is the same for the same request on any machine. Those of `rivals` that
    keep the cap, with the same ranks and micro-batches, take part. The winner is validated.

    Raises:
        ConfigError: a cap below the least one that any allowed placement can keep.
    """
    request = _with_own_ranks(request)
    costs = {name: request.costs.stages(p.num_stages) for name, p in _labelled(request)}
    problems = {name: _problem(request, name, p, costs[name]) for name, p in _labelled(request)}
    _refuse_low_cap(request)
    possible = [one for one in problems.values() if least_room(one, _sparing(one, request.allow)) <= one.cap]
    best = _best_rival(request, rivals)
    budget = Budget.of_seconds(request.budget_s)
    least = min(_time_bound(one, request.allow) for one in possible)
    chosen = _affordable(possible, budget, request.allow)
    search = Search(chosen, request.allow, budget, request.seed, least)
    for plan in search.run()[:NUM_REPLAYED]:
        schedule = build(plan.problem, search.rows_of(plan))
        try:
            played = simulate(schedule, costs[plan.problem.name], request.network, request.cap)
        except ScheduleError:
            continue
        if best is None or played.span < best.played.span:
            best = _Replayed(schedule, played, plan.method, plan.problem)
        if plan.problem.num_steps * CHECK_STEPS * NUM_REPLAYED > budget.steps:
            break
    if best is None:
        raise ConfigError("schedule.budget_s", request.budget_s, "is too short to find a schedule", "raise it")
    validate(best.schedule, request.costs.stages(best.schedule.num_stages), request.cap)
    shortest = min(least, _time_bound(best.problem, request.allow))
    return _report(request, best, shortest, search.tried)


def _planned_caps(request: Request) -> Iterable[Request]:
    is_small = request.num_ranks * request.num_micro_batches <= MAX_PLANNED
    return with_sizes("cap", PLANNED_CAPS if is_small else ())(request)


@schedule_family(CAPPED, stages_per_rank=0, planned=_planned_caps, rival=None)
def fastest(request: Request) -> Schedule:
    """Return the fastest schedule found, published ones among those tried."""
    return capped(request, published_schedules(request)).schedule


def least_cap(request: Request) -> float:
    """Return the least cap that any allowed placement can keep, in units of a cap."""
    request = replace(_with_own_ranks(request), cap=None)
    made = [_problem(request, name, p, request.costs.stages(p.num_stages)) for name, p in _labelled(request)]
    return min(least_room(one, _sparing(one, request.allow)) for one in made) / SIZES_PER_UNIT


@dataclass(frozen=True, slots=True)
class _Replayed:
    schedule: Schedule
    played: Simulation
    method: str
    problem: Problem


def _with_own_ranks(request: Request) -> Request:
    return replace(request, costs=replace(request.costs, num_ranks=request.num_ranks))


def _labelled(request: Request) -> list[tuple[str, Placement]]:
    """Return the allowed placements under names that tell those of one kind apart."""
    return [(f"{name}-{i}", p) for i, (name, p) in enumerate(placements_of(request))]


def _problem(request: Request, name: str, placement: Placement, costs: StageCosts) -> Problem:
    return problem(name, placement, request.num_micro_batches, costs, request.network, request.cap)


def _sparing(problem: Problem, allow: tuple[str, ...]) -> tuple[int, ...]:
    """Return the acts that need the least room."""
    keep = (0,) * problem.num_stages
    ways = [keep]
    for name in allow:
        act = int(Act[name.upper()])
        ways.append((*(act for _ in keep[1:]), 0))
    return min(ways, key=lambda way: least_room(problem, way))


def _refuse_low_cap(request: Request) -> None:
    least = least_cap(request)
    if request.cap is not None and request.cap < least - TOLERANCE:
        advice = "raise it" if request.allow else "raise it, or allow recompute or offload (schedule.memory_actions)"
        raise ConfigError(
            "schedule.activation_cap", f"{request.cap:g}",
            f"must be at least {least:.6g}, what one micro-batch holds on the heaviest rank", advice,
        )  # fmt: skip


def _affordable(problems: list[Problem], budget: Budget, allow: tuple[str, ...]) -> list[Problem]:
    """Return the placements whose schedules can be built and checked in the budget, at least the smallest."""
    fitting = [one for one in problems if one.num_steps * CHECK_STEPS <= budget.steps * CHECK_SHARE]
    chosen = fitting or [min(problems, key=lambda one: one.num_steps)]
    budget.spend(min(budget.steps // 2, CHECK_STEPS * max(one.num_steps for one in chosen)))
    bounds = {one.name: _time_bound(one) for one in chosen}
    near = [one for one in chosen if bounds[one.name] <= NEAR * min(bounds.values())]
    near.sort(key=lambda one: bounds[one.name])
    return near[: NUM_WITH_ACTS if allow else NUM_PLACEMENTS]


def _time_bound(problem: Problem, allow: tuple[str, ...] = ()) -> float:
    return span_bound(problem, allow) / problem.ticks_per_unit


def _best_rival(request: Request, rivals: Iterable[Schedule]) -> _Replayed | None:
    best: _Replayed | None = None
    for schedule in rivals:
        if (schedule.num_ranks, schedule.num_micro_batches) != (request.num_ranks, request.num_micro_batches):
            continue
        costs = request.costs.stages(schedule.num_stages)
        if request.cap is not None and max(peaks(schedule, costs)) > request.cap + TOLERANCE:
            continue
        try:
            played = simulate(schedule, costs, request.network, request.cap)
        except ScheduleError:
            continue
        if best is None or played.span < best.played.span:
            own = _problem(request, schedule.name, schedule.placement, costs)
            best = _Replayed(schedule, played, schedule.name, own)
    return best


def _report(request: Request, best: _Replayed, shortest: float, tried: int) -> Found:
    """Put figures beside the winner."""
    efficiency = best.played.efficiency
    bound = efficiency * best.played.span / shortest if shortest else 1.0
    return Found(
        schedule=replace(best.schedule, name=CAPPED),
        span=best.played.span,
        efficiency=efficiency,
        bound=bound,
        gap=1.0 - efficiency / bound if bound else 0.0,
        placement=_placement_name(request, best),
        peak=best.played.peak,
        method=best.method,
        candidates=tried,
    )


def _placement_name(request: Request, best: _Replayed) -> str:
    for name, placement in placements_of(replace(request, placements=())):
        if placement.ranks == best.schedule.placement.ranks:
            return name
    return f"that of {best.method}"

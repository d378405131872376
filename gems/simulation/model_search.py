"""The search for a schedule of a profiled model, together with its cut and memory policy."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace

from gems.errors import ConfigError, DoesNotFitError, ScheduleError
from gems.memory.case import MemoryCase
from gems.memory.plan import MemoryPlan, plan_of_schedule
from gems.partition.methods import Partitioner
from gems.partition.step_time import Boundaries
from gems.schedule import PLACEMENTS
from gems.schedule.families.published_schedules import published_schedules
from gems.schedule.lower import add_transfers
from gems.schedule.placement import Placement
from gems.schedule.registry import Request
from gems.schedule.schedule import Schedule
from gems.schedule.simulate import simulate
from gems.schedule.strips import strip_costs
from gems.schedule.synthesis import FoundSchedule, find_schedule, least_cap
from gems.schedule.synthesis.whole_backward import with_whole_backward
from gems.simulation.memory_case import Policy
from gems.simulation.model_costs import ModelCosts

MAX_CUTS = 2  # times that the model is cut again where no ladder is climbed
# ranks x micro-batches up to which it is: a search of more takes far longer than its budget
MAX_CLIMBED = 512
LADDER = (1.0, 1.5, 2.0, 3.0, 4.0, 8.0)  # caps at which the model is cut on the way to a higher one
SHARE = 0.4  # of the budget, for a search at one cap of the ladder, of which there are two
FIRST_SHARE = 0.5  # of that, for the searches before these, on one placement each
# shares of the cuts that may be simulated: for each placement, and for the schedule found
FIRST_CUT, CUT = (1 / 8, 0.4)
PLAN_SHARE = 0.1  # of memory.budget_s, for the plan of each schedule from which one is chosen
# how often the cap of strips is lowered, and the margin below what their bytes require
MAX_LOWERED, MARGIN = (4, 1e-3)
NEAR = 1.1  # times the fastest, up to which a placement is cut again once all have been


def search_with_cut(request: Request, model: ModelCosts) -> tuple[FoundSchedule, Boundaries]:
    """Return the fastest schedule found and the cut of the model that it runs with."""
    *_, (answer, model) = _climbed(request, model)
    return answer, model.cut(answer.schedule.placement)


def search_within_bytes(
    request: Request, model: ModelCosts, policy: Policy, cap_bytes: int
) -> tuple[FoundSchedule, Boundaries]:
    """Return a schedule, and its cut, whose activations stay within bytes.

    The activations include the rows that strips share, and the slots of CUDA graphs. A search
    assumes that strips are equal shares of an image, and that freed memory serves any micro-batch,
    so its cap is lowered until the schedule that it finds keeps the bytes.

    Raises:
        ConfigError: no schedule that keeps the cap was found.
    """
    cap = request.cap or 0.0
    bounds = None
    held_bytes = 0
    for _ in range(MAX_LOWERED):
        try:
            answer, boundaries = search_with_cut(replace(request, cap=cap), model)
        except ConfigError:
            if not held_bytes:
                raise
            break
        bounds = bounds or answer
        case = policy.case(answer.schedule, boundaries, model.profile)
        plan = _own_plan(case)
        held_bytes = max(
            rank.peak_activation_bytes for rank in case.timelines(plan, case.lowered(plan))
        )
        if held_bytes <= cap_bytes:
            return (
                replace(answer, bound=bounds.bound, bound_any_strips=bounds.bound_any_strips),
                boundaries,
            )
        lower = max(cap * cap_bytes / held_bytes * (1 - MARGIN), least_cap(request))
        if lower >= cap:
            break
        cap = lower
    what, advice = (
        (
            f"in {request.num_strips} strips, which with the rows that they share hold",
            "use another number of strips",
        )
        if request.num_strips > 1
        else ("whose CUDA graphs fit, the last one found holds", "set train.cuda_graphs=false")
    )
    raise ConfigError(
        "schedule.activation_cap_bytes",
        cap_bytes,
        f"leaves no schedule {what} {held_bytes}",
        f"raise it, or {advice}",
    )


def _own_plan(case: MemoryCase) -> MemoryPlan:
    """Return the plan of a searched schedule: that of its own memory actions, or to keep all."""
    plan = MemoryPlan.keeping(case.boundaries)
    if case.schedule.has_memory_actions:
        plan = plan_of_schedule(case.schedule, case.boundaries)
    return replace(plan, least_bytes=case.least_bytes)


def search_under_policy(
    request: Request, model: ModelCosts, policy: Policy, partitioner: Partitioner
) -> tuple[FoundSchedule, Boundaries]:
    """Return the schedule with the shortest step under the memory policy of a run, and its cut.

    Candidates are the schedules found at each cap of the ladder and without a cap, the same
    schedules with whole backwards, and the published ones. The policy plans for one after the
    other, each with a part of its budget, starting from the shortest step with everything kept. No
    policy makes a step shorter, so the rest is left out once that step alone takes longer than the
    best step found. A published schedule is cut as it would be if chosen by name. If the policy
    makes none fit, the schedule that needs the least memory is returned.
    """
    tried: list[tuple[FoundSchedule, ModelCosts]] = []
    for answer, costs in _climbed(request, model):
        tried += [
            (replace(answer, schedule=schedule), costs)
            for schedule in (answer.schedule, with_whole_backward(answer.schedule))
        ]
    last, _ = tried[-1]
    for rival in published_schedules(request):
        by_name = model.with_cut(rival.placement, partitioner.partition(rival).boundaries)
        tried.append(
            (
                replace(last, schedule=replace(rival, name=last.schedule.name), method=rival.name),
                by_name,
            )
        )
    kept_s = [_span(answer.schedule, request, costs) * costs.unit_s for answer, costs in tried]
    config = policy.config
    short = replace(policy, config=replace(config, budget_s=PLAN_SHARE * config.budget_s))
    fastest_s = math.inf
    best = tried[0]
    least = math.inf
    seen = set()
    for number in sorted(range(len(tried)), key=kept_s.__getitem__):
        answer, costs = tried[number]
        key = answer.schedule.rank_schedules, costs.cut(answer.schedule.placement)
        if key in seen:
            continue
        seen.add(key)
        if kept_s[number] >= fastest_s:
            break
        try:
            case = short.case(answer.schedule, key[1], costs.profile)
            step_s = short.outcome(case, short.plan(case)).step_s
        except DoesNotFitError as error:
            if fastest_s == math.inf and error.needed_bytes < least:
                least = error.needed_bytes
                best = tried[number]
            continue
        if step_s < fastest_s:
            fastest_s = step_s
            best = tried[number]
    answer, costs = best
    return answer, costs.cut(answer.schedule.placement)


def _climbed(request: Request, model: ModelCosts) -> Iterator[tuple[FoundSchedule, ModelCosts]]:
    """Yield the schedule found at each cap of a ladder up to that of the request, and its cut.

    If the cut may change, the model is cut for each placement, by the step time of the fastest
    schedule that a short search finds there. All placements are searched with these cuts, the model
    is cut again for the schedule found, and all are searched once more. Each search takes the
    schedule found before, with its cut, as a rival. Therefore the result at a cap of the ladder is
    never slower than at a lower cap. Large steps and fixed cuts are searched only under the cap of
    the request, or, without a cap, under each cap of the ladder as well.
    """
    size = request.num_ranks * request.num_micro_batches * request.num_strips
    lower = [cap for cap in LADDER if request.cap is None or cap < request.cap]
    if model.is_cut or size > MAX_CLIMBED:
        for step in lower if request.cap is None else ():
            if least_cap(replace(request, cap=step)) <= step:
                yield _searched(replace(request, cap=step), model, [], MAX_CUTS)
        yield _searched(request, model, [], MAX_CUTS)
        return
    rivals: list[Schedule] = []
    for cap in (*lower, request.cap):
        capped = replace(request, cap=cap, costs=model, budget_s=request.budget_s * SHARE)
        if cap in lower and least_cap(capped) > cap:
            continue
        rivals = _fastest_on_each_placement(capped, model, rivals)
        for schedule in rivals:
            model = _cut_for(schedule, capped, model, FIRST_CUT)
        answer, model = _searched(replace(capped, costs=model), model, rivals, 1, CUT)
        rivals = [answer.schedule]
        yield answer, model


def _searched(
    request: Request, model: ModelCosts, rivals: Sequence[Schedule], cuts: int, share: float = 1.0
) -> tuple[FoundSchedule, ModelCosts]:
    """Search, then cut the model for the schedule found and search again, at most `cuts` times.

    Stop when the cut no longer changes.
    """
    answer = find_schedule(request, [*rivals, *published_schedules(request)])
    for _ in range(cuts):
        before = model
        model = _cut_for(answer.schedule, request, model, share)
        if model is before:
            break
        request = replace(request, costs=model)
        answer = find_schedule(request, [answer.schedule, *published_schedules(request)])
    return answer, model


def _fastest_on_each_placement(
    request: Request, model: ModelCosts, known: Sequence[Schedule]
) -> list[Schedule]:
    """Return the fastest of known, published and shortly searched schedules on each placement.

    If a schedule is known, all placements have been cut, and those that are far slower are left
    out.
    """
    names = request.placements or PLACEMENTS
    short = replace(request, budget_s=request.budget_s * FIRST_SHARE / len(names))
    schedules = [*known, *published_schedules(request)]
    for name in names:
        with suppress(ConfigError):  # a cap that this placement cannot keep
            schedules.append(find_schedule(replace(short, placements=(name,))).schedule)
    fastest: dict[Placement, tuple[float, Schedule]] = {}
    for schedule in schedules:
        span = _span(schedule, request, model)
        if schedule.placement not in fastest or span < fastest[schedule.placement][0]:
            fastest[schedule.placement] = span, schedule
    longest = NEAR * min(span for span, _ in fastest.values()) if known else math.inf
    return [schedule for span, schedule in fastest.values() if span <= longest]


def _cut_for(
    schedule: Schedule, request: Request, model: ModelCosts, share: float = 1.0
) -> ModelCosts:
    """Return the model with the cut for a schedule, or the same model if that is no faster."""
    cut = model.faster_cut(schedule, request.network, request.cap, share)
    if cut == model.cut(schedule.placement):
        return model
    recut = model.with_cut(schedule.placement, cut)
    return recut if _span(schedule, request, recut) <= _span(schedule, request, model) else model


def _span(schedule: Schedule, request: Request, model: ModelCosts) -> float:
    """Return the time of a step as ranks run it, infinite if it would not run under the cap."""
    costs = strip_costs(model.of(schedule.placement), schedule.num_strips)
    network = request.network
    try:
        lowered = add_transfers(schedule, costs, network, request.cap)
        return simulate(lowered, costs, network, request.cap).span
    except ScheduleError:
        return math.inf

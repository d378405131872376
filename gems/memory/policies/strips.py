"""memory=plan in strips: keep, offload or recompute the strips of each stage, within the limit.

Stages of different ranks only interact through time. So each rank's choices are tried separately,
and those within the limit are compared by the step with all other stages kept. Then the stages of
all ranks are improved in turn until the budget is spent.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

from gems.errors import DoesNotFitError
from gems.memory.case import MemoryCase
from gems.memory.plan import Choice, MemoryPlan, Segment

_DISTANCES = (1, 4)  # compute actions between a copy and the wait for it
MAX_COMBINATIONS = 256  # for the stages of a rank


def plan_in_strips(case: MemoryCase, limit: int, budget_s: float) -> MemoryPlan:
    """Return the fastest plan found within a limit in bytes on every rank.

    Raises:
        DoesNotFitError: no choice for the stages of a rank keeps the limit.
    """
    until = time.monotonic() + budget_s
    keeping = MemoryPlan.keeping(case.boundaries)
    plan = keeping
    fitting = list[tuple[list[int], list[MemoryPlan]]]()
    for rank in range(case.schedule.num_ranks):
        stages = sorted({stage for _, stage in case.schedule.placement.stages_on(rank)})
        peaks = [
            (tried, next(case.peak_bytes(tried, [rank]))) for tried in _choices(keeping, stages)
        ]
        plans = [tried for tried, peak in peaks if peak <= limit]
        if not plans:
            advice = "use more strips or partitions, or a smaller micro-batch"
            raise DoesNotFitError(
                f"rank {rank} under memory=plan", min(peak for _, peak in peaks), limit, advice
            )
        fitting.append((stages, plans))
        plan = _with_stages(plan, min(plans, key=lambda tried: case.outcome(tried).step_s), stages)
    best = case.outcome(plan).step_s
    is_better = True
    while is_better and time.monotonic() < until:
        is_better = False
        for stages, others in fitting:
            for other in others:
                if time.monotonic() > until:
                    break
                tried = _with_stages(plan, other, stages)
                step_s = case.outcome(tried).step_s
                if step_s < best:
                    plan = tried
                    best = step_s
                    is_better = True
    return replace(plan, policy="plan", counters={"limit_bytes": limit})


def _choices(keeping: MemoryPlan, stages: Sequence[int]) -> Iterator[MemoryPlan]:
    """Yield plans with all combinations of choices for some stages, and all others kept."""
    options = [Segment(0, 1)]
    options += [
        Segment(0, 1, choice, far, far)
        for choice in Choice
        if choice.is_copied
        for far in _DISTANCES
    ]
    options.append(Segment(0, 1, Choice.RECOMPUTE))
    if len(options) ** len(stages) > MAX_COMBINATIONS:  # all stages of the rank alike
        combinations = [(option,) * len(stages) for option in options]
    else:
        combinations = list(product(options, repeat=len(stages)))
    for combination in combinations:
        of_stage = dict(zip(stages, combination, strict=True))
        yield keeping.changed(
            lambda place, segment, of_stage=of_stage: replace(  # type: ignore[misc]
                of_stage.get(place[0], segment), first=segment.first, end=segment.end
            )
        )


def _with_stages(plan: MemoryPlan, other: MemoryPlan, stages: Sequence[int]) -> MemoryPlan:
    """Return a plan with some stages of another."""
    return replace(
        plan,
        stages=tuple(
            other.stages[n] if n in stages else of_stage for n, of_stage in enumerate(plan.stages)
        ),
    )

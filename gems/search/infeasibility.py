"""What would make a plan fit: more memory, more GPUs, asked of the same search."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace

from gems.errors import ConfigError, DoesNotFitError
from gems.search.best_first import SearchResult, search
from gems.search.candidate import Candidate, candidates
from gems.search.choice import Choice
from gems.search.evaluate import Planner
from gems.utils.units import GIB

MIN_S = 6.0  # for all questions together, however little time is left
NEAR = 1.05  # how near to the smallest memory that works the answer is
MORE_GPUS = (2, 4, 8)


def leanest_or_refuse(
    planner: Planner,
    asked: Sequence[Candidate],
    found: SearchResult[Choice],
    num_gpus: int,
    end: float,
) -> Choice:
    """Return what fits after all, though the search has not come to it, or say what would fit, found until `end`.

    Half of the time is for the memory, the rest for the GPUs.

    Raises:
        DoesNotFitError: nothing fits; the line has the bytes needed and what would make it fit.
        ConfigError: nothing was found, and not because of its bytes.
    """
    limit = planner.limit_bytes
    if limit is None or not (found.num_too_large or found.num_pruned_bytes):
        raise ConfigError(
            "parallel.gpus",
            num_gpus,
            f"none of {len(asked)} configurations could be judged",
            "give more time: --budget S",
        )
    begin = time.perf_counter()
    end = max(end, begin + MIN_S)
    quick = [one for one in asked if one.slowness < 2]
    memory = _least_memory(planner, quick, limit, begin + (end - begin) / 2)
    if memory is not None and memory[0] <= limit:
        return memory[1]
    needed = found.least_needed_bytes if memory is None else memory[0]
    needed = max(needed or min(planner.least_bytes(one) for one in asked), limit + 1)
    advice = (
        []
        if memory is None
        else [f"devices of {memory[0] / GIB:.2f} GiB work ({_describe(memory[1])})"]
    )
    gpus = _more_gpus(planner, asked, num_gpus, end)
    if gpus is not None:
        advice.append(f"{gpus[0]} GPUs of this memory work ({_describe(gpus[1])})")
    advice.append("or a smaller image" if advice else "a smaller image works sooner")
    cut_off = f", and {found.num_left} were not looked at (--budget)" if found.num_left else ""
    leanest_is = "the leanest found" if memory is not None else "by its bound the leanest"
    raise DoesNotFitError(
        f"{leanest_is} of {len(asked)} configurations on {num_gpus} GPUs",
        needed,
        limit,
        ", ".join(advice) + cut_off,
    )


def _least_memory(
    planner: Planner, asked: Sequence[Candidate], limit: int, end: float
) -> tuple[int, Choice] | None:
    """Return the smallest device memory that works, to within 5 %, with what fits there.

    None if none was found.
    """
    low = limit
    high = 2 * limit
    while (best := leanest(planner, asked, high, end)) is None and time.perf_counter() < end:
        low = high
        high = 2 * high
    if best is None:
        return None
    high = max(best.peak_bytes)
    while high > NEAR * low and time.perf_counter() < end:
        middle = (low + high) // 2
        fitting = leanest(planner, asked, middle, end)
        if fitting is None:
            low = middle
        else:
            best = fitting
            high = max(fitting.peak_bytes)
    return high, best


def _more_gpus(
    planner: Planner, asked: Sequence[Candidate], num_gpus: int, end: float
) -> tuple[int, Choice] | None:
    """Return the least of two, four and eight times the GPUs that fits, with what fits there."""
    assert planner.limit_bytes is not None
    batch = asked[0].global_batch
    num_layers = planner.model(planner.sizes[0]).profile.num_layers
    has_policies = planner.spec.machine.is_real
    for times in MORE_GPUS:
        more = candidates(times * num_gpus, batch, num_layers, has_policies)
        quick = [one for one in more if one.slowness < 2]
        fitting = leanest(planner, quick, planner.limit_bytes, end)
        if fitting is not None:
            return times * num_gpus, fitting
    return None


def leanest(planner: Planner, asked: Sequence[Candidate], limit: int, end: float) -> Choice | None:
    """Return the first configuration that is found to fit a limit in the time, the leanest being tried first.

    Schedules that are searched, and memory=plan, take too long.
    """
    judge = replace(planner, limit_bytes=limit)
    fitting: list[Choice] = []

    def evaluate(one: Candidate, worst_s: float) -> Choice | None:
        result = judge.evaluate(one)
        if isinstance(result, Choice):
            fitting.append(result)
        return None

    tried = [one for one in asked if not one.family.is_searched and one.memory != "plan"]
    lean = judge.estimated_bytes
    rules = replace(
        judge.rules(), least_s=lean, refined_s=lean, evaluate=evaluate, priority=judge.is_unlikely
    )
    search(tried, rules, 1, lambda: bool(fitting) or time.perf_counter() > end)
    return fitting[0] if fitting else None


def _describe(choice: Choice) -> str:
    one = choice.candidate
    return (
        f"{one.partitions} partitions x {one.replicas}, {one.label}, memory={one.policy}, "
        f"micro-batches of {one.micro_batch_size}"
    )

"""Changes that would make a plan fit: more memory or more GPUs, found by the same search."""

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

MIN_S = 6.0  # seconds for all searches together, even if less time is left
NEAR = 1.05  # relative precision of the smallest memory that works
MORE_GPUS = (2, 4, 8)


def leanest_or_refuse(
    planner: Planner,
    configurations: Sequence[Candidate],
    result: SearchResult[Choice],
    num_gpus: int,
    end: float,
) -> Choice:
    """Return a configuration that fits but was not reached by the search, or raise an error.

    Until `end`, half of the time goes into more memory, the rest into more GPUs.

    Raises:
        DoesNotFitError: nothing fits; the message has the bytes needed and changes that would help.
        ConfigError: nothing was found, but not because of its bytes.
    """
    limit = planner.limit_bytes
    if limit is None or not (result.num_too_large or result.num_pruned_bytes):
        raise ConfigError(
            "parallel.gpus",
            num_gpus,
            f"none of {len(configurations)} configurations could be judged",
            "give more time: --budget S",
        )
    begin = time.perf_counter()
    end = max(end, begin + MIN_S)
    quick = [candidate for candidate in configurations if candidate.slowness < 2]
    memory = _least_memory(planner, quick, limit, begin + (end - begin) / 2)
    if memory is not None and memory[0] <= limit:
        return memory[1]
    needed = result.least_needed_bytes if memory is None else memory[0]
    needed = max(
        needed or min(planner.least_bytes(candidate) for candidate in configurations), limit + 1
    )
    advice = (
        []
        if memory is None
        else [f"devices of {memory[0] / GIB:.2f} GiB work ({_describe(memory[1])})"]
    )
    gpus = _more_gpus(planner, configurations, num_gpus, end)
    if gpus is not None:
        advice.append(f"{gpus[0]} GPUs of this memory work ({_describe(gpus[1])})")
    advice.append("or a smaller image" if advice else "a smaller image works sooner")
    cut_off = f", and {result.num_left} were not looked at (--budget)" if result.num_left else ""
    leanest_is = "the leanest found" if memory is not None else "by its bound the leanest"
    raise DoesNotFitError(
        f"{leanest_is} of {len(configurations)} configurations on {num_gpus} GPUs",
        needed,
        limit,
        ", ".join(advice) + cut_off,
    )


def _least_memory(
    planner: Planner, configurations: Sequence[Candidate], limit: int, end: float
) -> tuple[int, Choice] | None:
    """Return the smallest device memory that works, to within 5 %, and a choice that fits it."""
    low = limit
    high = 2 * limit
    while (
        best := leanest(planner, configurations, high, end)
    ) is None and time.perf_counter() < end:
        low = high
        high = 2 * high
    if best is None:
        return None
    high = max(best.peak_bytes)
    while high > NEAR * low and time.perf_counter() < end:
        middle = (low + high) // 2
        fitting = leanest(planner, configurations, middle, end)
        if fitting is None:
            low = middle
        else:
            best = fitting
            high = max(fitting.peak_bytes)
    return high, best


def _more_gpus(
    planner: Planner, configurations: Sequence[Candidate], num_gpus: int, end: float
) -> tuple[int, Choice] | None:
    """Return the smallest multiple of the GPUs that works, and a choice that fits it."""
    assert planner.limit_bytes is not None
    batch = configurations[0].global_batch
    num_layers = planner.model(planner.sizes[0]).profile.num_layers
    has_policies = planner.spec.machine.is_real
    for times in MORE_GPUS:
        more = candidates(times * num_gpus, batch, num_layers, has_policies)
        quick = [candidate for candidate in more if candidate.slowness < 2]
        fitting = leanest(planner, quick, planner.limit_bytes, end)
        if fitting is not None:
            return times * num_gpus, fitting
    return None


def leanest(
    planner: Planner, configurations: Sequence[Candidate], limit: int, end: float
) -> Choice | None:
    """Return the first configuration found to fit a limit, trying the leanest first.

    Searched schedules and memory=plan are skipped, because they take too long.
    """
    judge = replace(planner, limit_bytes=limit)
    fitting: list[Choice] = []

    def evaluate(candidate: Candidate, worst_s: float) -> Choice | None:
        result = judge.evaluate(candidate)
        if isinstance(result, Choice):
            fitting.append(result)
        return None

    tried = [
        candidate
        for candidate in configurations
        if not candidate.family.is_searched and candidate.memory != "plan"
    ]
    lean = judge.estimated_bytes
    rules = replace(
        judge.rules(), least_s=lean, refined_s=lean, evaluate=evaluate, priority=judge.is_unlikely
    )
    search(tried, rules, 1, lambda: bool(fitting) or time.perf_counter() > end)
    return fitting[0] if fitting else None


def _describe(choice: Choice) -> str:
    candidate = choice.candidate
    return (
        f"{candidate.partitions} partitions x {candidate.replicas}, {candidate.label},"
        f" memory={candidate.policy}, micro-batches of {candidate.micro_batch_size}"
    )

"""The fastest configurations of a run on a number of GPUs, searched within a time budget."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gems.config.resolve import check_batch
from gems.errors import ConfigError
from gems.search.best_first import SearchResult, TooLarge, TooSlow, search
from gems.search.candidate import Candidate, candidates
from gems.search.choice import Choice
from gems.search.evaluate import Planner
from gems.search.infeasibility import leanest, leanest_or_refuse

NUM_BEST = 10
BUDGET_S = 10.0
# while nothing fits, the shares of the budget after which the search gives way to one for anything
# that fits, and that one to a search for changes that would make it fit
SEARCH_SHARE = 0.5
LEAN_SHARE = 0.75


def fastest(
    planner: Planner,
    batches: Sequence[int],
    num_best: int = NUM_BEST,
    budget_s: float = BUDGET_S,
    also: Callable[[Planner, Sequence[Choice], Sequence[Candidate]], list[Choice]] | None = None,
    accepts: Callable[[Candidate], bool] | None = None,
) -> tuple[dict[str, Any], SearchResult[Choice]]:
    """Search configurations on parallel.gpus GPUs (by default, the GPUs of the run).

    Return the answer as plain data, and the search result. `also` returns additional choices, given
    the best and all candidates; only candidates that `accepts` approves are searched.

    Raises:
        ConfigError: a batch cannot be divided, or a profile is not available.
        DoesNotFitError: no configuration fits; the message has changes that would help.
    """
    begin = time.perf_counter()
    spec = planner.spec
    num_layers = planner.model(planner.sizes[0]).profile.num_layers
    num_gpus = spec.parallel.gpus or spec.world_size
    configurations = [
        candidate
        for batch in batches
        for candidate in _candidates(planner, num_gpus, batch, num_layers)
    ]
    configurations = [
        candidate for candidate in configurations if accepts is None or accepts(candidate)
    ]
    for size in planner.sizes[1:]:
        if any(candidate.micro_batch_size >= size for candidate in configurations):
            planner.model(size)
    search_begin = time.perf_counter()
    end = search_begin + budget_s
    result = _search(planner, configurations, num_best, end)
    best = [planner.with_noise(choice) for choice in result.best]
    more = [] if also is None else also(planner, best, configurations)
    best = sorted((*best, *more), key=lambda choice: (choice.score_s, choice.most_bytes))[:num_best]
    search_s = time.perf_counter() - search_begin
    result = replace(
        result,
        best=planner.confirmed(best),
        num_simulated=result.num_simulated + len(more),
        num_candidates=result.num_candidates + len(more),
    )
    if not result.best:
        lean = leanest_or_refuse(planner, configurations, result, num_gpus, end)
        result = replace(
            result, best=(planner.with_noise(lean),), num_simulated=result.num_simulated + 1
        )
    facts = {
        "source": "simulated",
        "model": spec.model.name,
        **spec.data.sides,
        "machine": spec.machine.name,
        "device_bytes": spec.machine.device_bytes,
        "gpus": num_gpus,
    }
    return facts | _answer(result, search_begin - begin, search_s), result


def _answer(result: SearchResult[Choice], profile_s: float, search_s: float) -> dict[str, Any]:
    return {
        "choices": [choice.to_json(result.best[0]) for choice in result.best],
        "is_exact": result.is_exact,
        "candidates": result.num_candidates,
        "simulated": result.num_simulated,
        "too_large": result.num_too_large,
        "pruned_by_bytes": result.num_pruned_bytes,
        "pruned_by_time": result.num_pruned_time,
        "impossible": result.num_impossible,
        "left": result.num_left,
        "profile_s": profile_s,
        "search_s": search_s,
    }


def _search(
    planner: Planner, configurations: list[Candidate], num_best: int, end: float
) -> SearchResult[Choice]:
    """Search until `end`; if nothing fits by then, spend the rest of the time on the leanest."""
    rules = planner.rules()
    begin = time.perf_counter()
    last = begin + (end - begin) * SEARCH_SHARE
    fitting: list[bool] = []
    tried: set[Candidate] = set()

    def evaluate(candidate: Candidate, worst_s: float) -> Choice | TooLarge | TooSlow | None:
        tried.add(candidate)
        result = planner.evaluate(candidate, worst_s)
        if isinstance(result, Choice):
            fitting.append(True)
        return result

    def is_over() -> bool:
        return time.perf_counter() > (end if fitting else last)

    result = search(configurations, replace(rules, evaluate=evaluate), num_best, is_over)
    if result.best or planner.limit_bytes is None or not result.num_left:
        return result
    rest = [candidate for candidate in configurations if candidate not in tried]
    lean = leanest(planner, rest, planner.limit_bytes, begin + (end - begin) * LEAN_SHARE)
    if lean is None:
        return result
    return replace(
        result, best=(lean,), num_simulated=result.num_simulated + 1, num_left=result.num_left - 1
    )


def _candidates(planner: Planner, num_gpus: int, batch: int, num_layers: int) -> list[Candidate]:
    spec = planner.spec
    configurations = candidates(num_gpus, batch, num_layers, has_policies=spec.machine.is_real)
    if spec.profile.path is not None:
        configurations = [
            candidate
            for candidate in configurations
            if candidate.micro_batch_size == spec.parallel.micro_batch_size
        ]
    if not configurations:
        raise ConfigError(
            "--global-batch",
            batch,
            f"has no split over {num_gpus} GPUs "
            f"into whole micro-batches and at most {num_layers} stages",
            "use a multiple of the GPUs",
        )
    run = planner.run_of(configurations[0])
    if run.machine.is_real:
        check_batch(run.data, run.parallel.global_batch)
    return configurations

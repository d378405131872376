"""The search: candidates in the order of their bounds, scored until the next cannot be among the best."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Scored(Protocol):
    """What becomes of a candidate that fits.

    Seconds, the fewer the better, and bytes, which tell equals apart.
    """

    @property
    def score_s(self) -> float:
        """Seconds by which answers are ranked."""

    @property
    def most_bytes(self) -> float:
        """Bytes of the fullest rank."""


def is_as_fast(first: Scored, other: Scored) -> bool:
    """Whether two answers take the same seconds, up to the rounding of sums in another order."""
    return _rounded(first.score_s) == _rounded(other.score_s)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.9g}")


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A candidate that does not fit: the bytes that its fullest rank would hold."""

    needed_bytes: int


@dataclass(frozen=True, slots=True)
class TooSlow:
    """A candidate whose evaluation ended when it was known to be slower than asked."""


C = TypeVar("C")
S = TypeVar("S", bound=Scored)


@dataclass(frozen=True, slots=True)
class SearchResult(Generic[S]):
    """The best, first first, and what became of all candidates.

    `num_simulated` were scored, `num_too_large` did not fit when they were simulated,
    `num_pruned_bytes` and `num_pruned_time` were left out by their bounds, `num_impossible` have
    counts that their schedule cannot serve or a policy that keeping makes pointless, and `num_left`
    were not reached in the time. `least_needed_bytes` is the least that was found too large, None
    where nothing was.
    """

    best: tuple[S, ...]
    num_candidates: int
    least_needed_bytes: int | None
    num_simulated: int = 0
    num_too_large: int = 0
    num_pruned_bytes: int = 0
    num_pruned_time: int = 0
    num_impossible: int = 0
    num_left: int = 0

    @property
    def is_exact(self) -> bool:
        """Whether no candidate that was not scored could be among the best."""
        return self.num_left == 0


@dataclass(frozen=True, slots=True)
class Rules(Generic[C, S]):
    """How candidates are judged.

    `least_s` and `refined_s` are below or at a candidate's seconds, the first without any work and
    the second with some; one that `is_pruned` is below its bytes. `evaluate` is given the seconds
    above which nothing is asked for, and gives None for a candidate that cannot be. Those of a
    higher `priority`, which are slower to evaluate, come after all others.
    """

    least_s: Callable[[C], float]
    refined_s: Callable[[C], float]
    is_pruned: Callable[[C], bool]
    evaluate: Callable[[C, float], S | TooLarge | TooSlow | None]
    priority: Callable[[C], int]


def search(
    candidates: Iterable[C],
    rules: Rules[C, S],
    num_best: int,
    is_over: Callable[[], bool] = lambda: False,
) -> SearchResult[S]:
    """Return the `num_best` candidates of the least seconds, those that are as fast by their bytes.

    They are the same as if all had been scored, unless `is_over` ends it.
    """
    waiting: list[tuple[int, float, int, bool, C]] = []
    counts = Counter[str]()
    number = 0
    for number, one in enumerate(candidates, 1):
        if rules.is_pruned(one):
            counts["num_pruned_bytes"] += 1
        else:
            waiting.append((rules.priority(one), rules.least_s(one), number, False, one))
    heapq.heapify(waiting)
    best: list[tuple[tuple[float, float, int], S]] = []
    needed: list[int] = []
    while waiting:
        priority, least_s, place, is_refined, one = heapq.heappop(waiting)
        worst_s = best[-1][0][0] if len(best) == num_best else float("inf")
        if _rounded(least_s) > worst_s:
            counts["num_pruned_time"] += 1
            continue
        if is_over():
            counts["num_left"] += 1
            continue
        if not is_refined:
            heapq.heappush(
                waiting, (priority, max(least_s, rules.refined_s(one)), place, True, one)
            )
            continue
        result = rules.evaluate(one, worst_s)
        if result is None:
            counts["num_impossible"] += 1
        elif isinstance(result, TooSlow):
            counts["num_pruned_time"] += 1
        elif isinstance(result, TooLarge):
            counts["num_too_large"] += 1
            needed.append(result.needed_bytes)
        else:
            counts["num_simulated"] += 1
            key = (_rounded(result.score_s), result.most_bytes, place)
            best = sorted([*best, (key, result)], key=lambda each: each[0])[:num_best]
    answers = tuple(result for _, result in best)
    return SearchResult(answers, number, min(needed, default=None), **counts)

"""Best-first search: score candidates by rising bounds until no other can be among the best."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar


class Scored(Protocol):
    """The score of a candidate that fits: seconds, and bytes as the tie-breaker."""

    @property
    def score_s(self) -> float:
        """Seconds by which answers are ranked."""

    @property
    def most_bytes(self) -> float:
        """Bytes of the fullest rank."""


def is_as_fast(first: Scored, other: Scored) -> bool:
    """Return whether two answers have equal scores, up to rounding."""
    return _rounded(first.score_s) == _rounded(other.score_s)


def _rounded(seconds: float) -> float:
    return float(f"{seconds:.9g}")


@dataclass(frozen=True, slots=True)
class TooLarge:
    """A candidate that does not fit: the bytes that its fullest rank would hold."""

    needed_bytes: int


@dataclass(frozen=True, slots=True)
class TooSlow:
    """A candidate whose evaluation stopped because it is slower than the limit."""


C = TypeVar("C")
S = TypeVar("S", bound=Scored)


@dataclass(frozen=True, slots=True)
class SearchResult(Generic[S]):
    """The best candidates, first first, and the fate of all.

    `num_simulated` were scored, `num_too_large` were simulated and did not fit,
    `num_pruned_bytes` and `num_pruned_time` were skipped by their bounds, `num_impossible` have
    invalid counts or a needless memory policy, and `num_left` were not reached in time.
    `least_needed_bytes` is the smallest size that was too large, None if everything fitted.
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
        """Whether the answers are certainly the best of all candidates."""
        return self.num_left == 0


@dataclass(frozen=True, slots=True)
class Rules(Generic[C, S]):
    """The functions that judge candidates.

    `least_s` and `refined_s` are lower bounds of a candidate's seconds; the first takes no work.
    `is_pruned` tells whether its lower bound of bytes is above the limit. `evaluate` takes the
    seconds above which the score does not matter, and returns None for an invalid candidate.
    Candidates are tried by rising `priority`, which is higher for slower evaluations.
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
    """Return the `num_best` candidates with the lowest seconds; ties go to the fewest bytes.

    The result is that of an exhaustive search, unless `is_over` ends it early.
    """
    waiting: list[tuple[int, float, int, bool, C]] = []
    counts = Counter[str]()
    num_candidates = 0
    for num_candidates, candidate in enumerate(candidates, 1):
        if rules.is_pruned(candidate):
            counts["num_pruned_bytes"] += 1
        else:
            waiting.append(
                (
                    rules.priority(candidate),
                    rules.least_s(candidate),
                    num_candidates,
                    False,
                    candidate,
                )
            )
    heapq.heapify(waiting)
    best: list[tuple[tuple[float, float, int], S]] = []
    needed: list[int] = []
    while waiting:
        priority, least_s, number, is_refined, candidate = heapq.heappop(waiting)
        worst_s = best[-1][0][0] if len(best) == num_best else float("inf")
        if _rounded(least_s) > worst_s:
            counts["num_pruned_time"] += 1
            continue
        if is_over():
            counts["num_left"] += 1
            continue
        if not is_refined:
            heapq.heappush(
                waiting,
                (priority, max(least_s, rules.refined_s(candidate)), number, True, candidate),
            )
            continue
        result = rules.evaluate(candidate, worst_s)
        if result is None:
            counts["num_impossible"] += 1
        elif isinstance(result, TooSlow):
            counts["num_pruned_time"] += 1
        elif isinstance(result, TooLarge):
            counts["num_too_large"] += 1
            needed.append(result.needed_bytes)
        else:
            counts["num_simulated"] += 1
            key = (_rounded(result.score_s), result.most_bytes, number)
            best = sorted([*best, (key, result)], key=lambda entry: entry[0])[:num_best]
    answers = tuple(result for _, result in best)
    return SearchResult(answers, num_candidates, min(needed, default=None), **counts)

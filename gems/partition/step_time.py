"""Find the cut with the shortest step near one that balances the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations, cycle, islice, pairwise

from gems.schedule.ledger import TOLERANCE

MAX_SIMULATED = 100_000  # actions in total, of one schedule with several cuts
Boundaries = tuple[int, ...]
# time of a step (infinite if the cut is not allowed), and the most bytes that a rank holds
Cost = tuple[float, float]


def shortest_step(
    start: Boundaries, cost: Callable[[Boundaries], Cost], num_actions: int
) -> tuple[Boundaries, Cost]:
    """Return the best cut that small moves reach from `start`, with its cost.

    Among the shortest steps it has the least peak. A move shifts one boundary or a run of them by a
    layer, or two boundaries in opposite directions. It is kept if the step gets shorter, or if the
    step is no longer and the peak is lower; the search ends if no move helps. `num_actions` is the
    number of actions of the schedule, which limits how many cuts are simulated.
    """
    best = start
    least = cost(start)
    moves = _moves(len(start) - 1)
    num_refused = 0
    for move in islice(cycle(moves), MAX_SIMULATED // num_actions):
        moved = tuple(boundary + shift for boundary, shift in zip(best, move, strict=True))
        moved_cost = (
            cost(moved)
            if all(first < end for first, end in pairwise(moved))
            else (math.inf, math.inf)
        )
        is_shorter = moved_cost[0] < least[0] * (1 - TOLERANCE)
        is_lower = moved_cost[0] <= least[0] * (1 + TOLERANCE) and moved_cost[1] < least[1]
        num_refused += 1
        if is_shorter or is_lower:
            best = moved
            least = moved_cost
            num_refused = 0
        if num_refused == len(moves):
            break
    return best, least


def _moves(num_stages: int) -> list[tuple[int, ...]]:
    """Return the shifts of each boundary for all moves, single ones first."""
    places = range(1, num_stages)
    runs = [(first, first) for first in places] + list(combinations(places, 2))
    shifts = [[first <= place <= end for place in range(num_stages + 1)] for first, end in runs]
    moves = [tuple(sign * shifted for shifted in shift) for shift in shifts for sign in (-1, 1)]
    for pair in combinations(places, 2):
        against = [(place == pair[0]) - (place == pair[1]) for place in range(num_stages + 1)]
        moves += [tuple(sign * shift for shift in against) for sign in (-1, 1)]
    return moves

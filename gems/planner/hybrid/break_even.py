"""Where hybrid parallelism begins to win: the number of devices from which workers of M ways beat data parallelism."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from gems.errors import ConfigError
from gems.planner.hybrid.end_to_end_time import HybridCase
from gems.planner.hybrid.quantity import SHARES


@dataclass(frozen=True, slots=True)
class Crossing:
    """Where M-way workers become faster than data parallelism, and stay so up to the most devices looked at.

    Attributes:
        devices: the fewest from which on they are, a multiple of M; None where they are not at the most.
        below: the most devices listed at which data parallelism still is at least as fast; None where it never is.
        listed: the fewest devices listed from which on they are.
        low, high: 95 % of the draws lie between; None where they do not cross.
    """

    ways: int
    devices: int | None
    below: int | None = None
    listed: int | None = None
    low: float | None = None
    high: float | None = None


def crossing(case: HybridCase, ways: int, devices: Sequence[int], draws: Sequence[HybridCase] = ()) -> Crossing:
    """Find where workers of so many ways become faster, between the listed numbers of devices by halving.

    Between two listed numbers the gain is taken to cross 1 once.
    """
    known = _gains(case, ways, devices)
    if not known:
        return Crossing(ways, None)
    first = len(known)
    while first and known[first - 1][1] > 1.0:
        first -= 1
    low, high = _crossing_band(ways, devices, draws)
    if first == len(known):
        return Crossing(ways, None, known[-1][0], None, low, high)
    listed = known[first][0]
    if not first:
        return Crossing(ways, listed, None, listed, low, high)
    below = known[first - 1][0]
    lose, win = below // ways, listed // ways
    while win - lose > 1:
        middle = (lose + win) // 2
        lose, win = (lose, middle) if case.gain(middle, ways) > 1.0 else (middle, win)
    return Crossing(ways, win * ways, below, listed, low, high)


def _gains(case: HybridCase, ways: int, devices: Sequence[int]) -> list[tuple[int, float]]:
    """Return the gain at each number of devices that so many ways divide, where it is known."""
    found = []
    for count in sorted(devices):
        if count % ways:
            continue
        try:
            found.append((count, case.gain(count // ways, ways)))
        except ConfigError:
            continue
    return found


def _crossing_band(ways: int, devices: Sequence[int], draws: Sequence[HybridCase]) -> tuple[float | None, float | None]:
    """Return the middle 95 % of where the draws cross, on a line between listed numbers.

    None for an end that does not.
    """
    if not draws:
        return None, None
    places = sorted(_interpolated(_gains(case, ways, devices)) for case in draws)
    ends = (places[math.floor(SHARES[0] * (len(places) - 1))], places[math.ceil(SHARES[1] * (len(places) - 1))])
    low, high = (end if math.isfinite(end) else None for end in ends)
    return low, high


def _interpolated(known: Sequence[tuple[int, float]]) -> float:
    """Return where gains cross 1 for the last time, both axes logarithmic; infinity where the last is not above 1."""
    place = math.inf
    for (count, gain), above in zip(reversed(known), (None, *reversed(known)), strict=False):
        if gain > 1.0:
            place = float(count)
            continue
        if above is None:
            return math.inf
        share = -math.log(gain) / (math.log(above[1]) - math.log(gain))
        return math.exp(math.log(count) + share * (math.log(above[0]) - math.log(count)))
    return place

"""The least distances between peaks, against hand-made packings and random ones that fit."""

from __future__ import annotations

from random import Random

import pytest

from gems.schedule.synthesis.packing import Peak, distance_by_memory_time, distance_by_sequence

BLOCK = Peak(
    count=5, size=1.0, before=((0.0, 1.0),), after=((3.0, 1.0),), peak=0.0, tail=3.0, time=1.0
)
TRIANGLE = Peak(
    count=9,
    size=4.0,
    before=((12.0, 1.0), (8.0, 1.0), (4.0, 1.0), (0.0, 1.0)),
    after=((4.0, 1.0), (8.0, 1.0), (12.0, 1.0), (16.0, 1.0)),
    peak=12.0,
    tail=16.0,
    time=1.0,
)


@pytest.mark.parametrize(("cap", "distance"), [(1, 12.0), (2, 6.0), (2.9, 6.0)])
def test_blocks_follow_each_other_as_the_cap_has_room_for(cap: float, distance: float) -> None:
    assert distance_by_sequence(BLOCK, cap) == pytest.approx(distance)
    assert distance_by_memory_time([BLOCK], cap) <= distance + 1e-9


def test_a_cap_of_one_and_a_half_peaks_is_not_used_to_the_full() -> None:
    """One holds 64 units of memory-time, so one could follow every 64 / 6 units.

    Whole stages fit every 12.
    """
    assert distance_by_sequence(TRIANGLE, 6.0) == pytest.approx(8 * 12.0)
    assert distance_by_memory_time([TRIANGLE], 6.0) <= 8 * 64 / 6


def test_many_distances_grow_as_few_do() -> None:
    def of(count: int) -> float:
        return distance_by_sequence(
            Peak(count, *(getattr(TRIANGLE, name) for name in Peak.__slots__[1:])), 6.0
        )

    found = [of(count) for count in range(1, 40)]
    assert found[0] == 0.0 and found == sorted(found)
    assert found[38] - found[26] == pytest.approx(found[26] - found[14])


def test_two_directions_share_the_cap() -> None:
    both = [Peak(3, *(getattr(BLOCK, name) for name in Peak.__slots__[1:]))] * 2
    assert distance_by_memory_time(both, 1.0) == pytest.approx(15.0)
    assert distance_by_memory_time(both, 0.0) == 0.0


def fits(peak: Peak, peaks: list[float], cap: float) -> bool:
    """Return whether all that must be held around the peaks fits whenever anything is allocated."""
    ends = sorted(peak.after)  # the size that comes first is freed last
    spans = [
        (at - back, at + on, size)
        for at in peaks
        for (back, size), (on, _) in zip(sorted(peak.before), ends, strict=True)
    ]
    return all(sum(s for b, e, s in spans if b <= begin < e) <= cap for begin, _, _ in spans)


def test_no_packing_that_fits_is_shorter() -> None:
    random = Random(2)
    nearest = 9.0
    for _ in range(25):
        num = random.randint(1, 4)
        count = random.randint(2, 7)
        back = sorted((random.uniform(0.5, 9.0) for _ in range(num - 1)), reverse=True)
        on = sorted(random.uniform(1.0, 9.0) for _ in range(num))
        peak = Peak(
            count,
            float(num),
            tuple((time, 1.0) for time in (*back, 0.0)),
            tuple((time, 1.0) for time in on),
            0.0,
            0.0,
            random.uniform(0.0, 0.4),
        )
        cap = num * random.choice((1.0, 1.5, 2.0, 2.5))
        found = max(distance_by_sequence(peak, cap), distance_by_memory_time([peak], cap))
        steps = sorted({peak.time, *(a + b for a in (*back, 0.0) for b in on), *back, *on})
        for _ in range(30):  # each follows the last as soon as it may, or a step or two later
            packed = [0.0]
            while len(packed) < count:
                possible = [
                    step
                    for step in steps
                    if step >= peak.time and fits(peak, [*packed, packed[-1] + step], cap)
                ]
                packed.append(
                    packed[-1] + possible[min(random.choice((0, 0, 0, 1, 2)), len(possible) - 1)]
                )
            assert found <= packed[-1] + 1e-6
            nearest = min(nearest, packed[-1] - found)
    assert nearest < 1e-6

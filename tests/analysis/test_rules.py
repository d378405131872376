"""The rules on what a plot may claim.

Each holds on sound points, and fails on points made to break it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest

from analysis.scaling.points import Point, Setting
from analysis.scaling.rules import Rule, check_rules, rule_lines
from tests.helpers.planted import KNOWN, noisy, point

SPREAD = (0.95, 1.0, 1.0, 1.0, 1.0, 1.05, 1.0, 1.0)


def sound(line: str = "1f1b", step_s: float = 1.0) -> list[Point]:
    """Two lines of these keep every rule."""
    return [point(ranks, noisy(step_s * (1 + 0.01 * ranks)), line=line) for ranks in (4, 8, 16)]


def rule(number: int, points: Sequence[Point]) -> Rule:
    found = check_rules(points)[number - 1]
    assert found.number == number
    return found


def broken(number: int, *points: Point) -> str:
    """Return the text of a rule that these points break; it is printed."""
    found = rule(number, points)
    assert found.holds is False, found
    assert any(line.startswith(f"rule {number}, ") for line in rule_lines([found]))
    return found.text


def test_sound_points_keep_all_rules() -> None:
    rules = check_rules([*sound(), *sound("gpipe", 1.3)])
    assert [found.number for found in rules] == list(range(1, 14))
    assert [found.holds for found in rules] == [True] * 13, [
        found for found in rules if not found.holds
    ]
    assert rule_lines(rules) == [] and all(found.title and found.text for found in rules)


def test_the_base_is_stated_and_as_real_as_the_points_on_it() -> None:
    assert "1f1b: 15.4 images/s on 4 ranks, measured" in rule(1, sound()).text
    text = broken(1, point(4, source="simulated"), point(8))
    assert "base of 1f1b is less real" in text and "run it" in text


def test_a_line_that_lacks_points_of_another_is_named() -> None:
    assert "gpipe lacks 16 ranks" in broken(2, *sound(), *sound("gpipe")[:2])


def test_steps_with_other_images_have_no_common_rate() -> None:
    assert rule(3, [point(4, num_images=16 * 8)]).holds
    assert "differ in their images" in broken(3, point(4, num_images=16 * 8 - 4))


def test_what_is_not_deterministic_needs_six_steps() -> None:
    text = broken(5, point(4, (1.0, 1.1, 1.2)), point(8, noisy(1.0)))
    assert "1f1b on 4 ranks (measured) have fewer than 6 steps" in text and "8 ranks" not in text
    assert rule(5, [point(4, (1.0,), source="simulated")]).holds
    assert "further" not in broken(
        5, point(4, (1.0, 1.1), source="simulated")
    )  # a simulation with noise


def test_runs_that_differ_more_than_their_steps_are_named() -> None:
    fast = noisy(1.0)
    slow = noisy(1.1)
    text = broken(5, point(4, (*fast, *slow), run_steps=(20, 20)))
    assert "runs of 1f1b on 4 ranks (measured) differ by more than their steps" in text
    assert rule(5, [point(4, (*fast, *noisy(1.0, seed=1)), run_steps=(20, 20))]).holds
    assert rule(5, [point(4, (*fast, *slow), run_steps=(40,))]).holds
    assert rule(5, [point(4, (*fast, 1.1, 1.1), run_steps=(20, 2))]).holds


def test_lines_whose_intervals_overlap_are_not_told_apart() -> None:
    assert rule(7, sound()).holds is None
    text = broken(7, point(4, noisy(1.0)), point(4, noisy(1.001), line="gpipe"))
    assert "1f1b and gpipe on 4 ranks overlap" in text and "neither faster" in text
    assert (
        rule(
            7, [point(4, noisy(1.0)), point(4, noisy(1.001), line="gpipe", source="emulated")]
        ).holds
        is None
    )
    exact = [
        point(4, (1.0,), source="simulated"),
        point(4, (1.0,), line="gpipe", source="simulated"),
    ]
    assert rule(7, exact).holds
    twice = point(
        4, noisy(2.0), line="gpipe", images_per_step=32
    )  # as many images/s in steps twice as long
    assert "overlap" in broken(7, point(4, noisy(2.0)), replace(twice, step_s=noisy(4.0)))


def test_a_long_tail_is_told_beside_the_median() -> None:
    text = broken(8, point(4, (1.0,) * 17 + (2.0,) * 3))
    assert "1f1b on 4 ranks (measured) (100 %)" in text


@pytest.mark.parametrize(
    ("setting", "expected"),
    [
        (replace(KNOWN, missing=("git_commit",)), "lack git_commit"),
        (replace(KNOWN, commits=("abc", "def")), "different code (abc and def)"),
        (replace(KNOWN, commits=("abc-dirty",)), "abc"),
        (
            replace(KNOWN, versions=("gems 0.1", "numpy 1", "numpy 2")),
            "different versions of numpy",
        ),
    ],
)
def test_what_is_not_documented_is_named(setting: Setting, expected: str) -> None:
    assert expected in broken(9, point(4, setting=setting))


def test_points_of_one_source_share_their_versions() -> None:
    other = replace(KNOWN, versions=("gems 0.1", "numpy 3"))
    assert "numpy" in broken(9, point(4), point(8, setting=other))
    assert rule(9, [point(4), point(8, setting=other, source="simulated")]).holds


def test_warm_up_is_left_out_and_clocks_are_better_than_a_hundredth_of_a_step() -> None:
    assert "no warm-up" in broken(10, point(4, setting=replace(KNOWN, num_warmup_steps=0)))
    assert "clocks of" in broken(10, point(4, setting=replace(KNOWN, clock_error_s=0.02)))
    assert (
        "slowest rank counts"
        in rule(10, [point(4, setting=replace(KNOWN, clock_error_s=0.005))]).text
    )


def test_a_point_above_the_ideal_shows_that_the_base_is_no_bound() -> None:
    assert "above the ideal" in broken(11, point(4, noisy(1.0)), point(8, noisy(0.9)))
    assert rule(11, [point(4, noisy(1.0)), point(8, noisy(1.0, seed=1))]).holds


def test_points_far_apart_are_not_joined() -> None:
    assert "4 and 32 ranks of 1f1b" in broken(12, point(4), point(32))
    assert rule(12, [point(4), point(16)]).holds
    assert rule(12, [point(4), point(4, line="gpipe")]).holds is None
    assert "not joined" in broken(12, point(4), point(8, images_per_step=31))


def test_steps_that_are_still_needed_are_counted() -> None:
    assert rule(13, [point(4, SPREAD)]).holds
    assert "(2 more)" in broken(13, point(4, (1.0, 1.0, 1.0, 1.1)))
    wide = point(4, noisy(1.0, count=10, noise=0.3))
    text = broken(13, wide)
    needed = 10 * (wide.step_interval_s.relative_half_width / 0.05) ** 2 - 10
    assert f"({-int(-needed // 1)} more)" in text
    assert rule(13, [point(4, (1.0,), source="simulated")]).holds is None


def test_long_lists_are_cut() -> None:
    assert "and 2 more" in broken(5, *(point(ranks, (1.0, 1.1)) for ranks in (1, 2, 4, 8, 16, 32)))

"""Which claims a plot of a study supports.

The twelve rules of Hoefler and Belli (SC 2015, doi 10.1145/2807591.2807644) as checks.

Their advice to measure until the median is known well enough is the thirteenth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations

from analysis.metrics.statistics import Interval, further_values, min_values
from analysis.scaling.efficiency import base_points, may_join, neighbours, scaling_kind
from analysis.scaling.points import Point
from gems.trace import SOURCES
from gems.utils.units import counted, number

PRECISION = 0.05  # half of the interval of the median, over the median
TAIL = 0.10  # the 95th percentile above the median
CLOCK_SHARE = 0.01  # error of a clock, of a step
MAX_NAMED = 4
Finding = tuple[bool | None, str]
OVER_RANKS = (
    "a step lasts from the last rank's end of the one before to its own last rank's end: the slowest rank counts"
)


@dataclass(frozen=True, slots=True)
class Rule:
    """A rule on what may be claimed.

    Attributes:
        number: of the twelve; 13 for the precision of the median.
        title: what it asks for.
        holds: whether the points keep it; None if it does not apply.
        text: how it is kept, or why not and what to do.
    """

    number: int
    title: str
    holds: bool | None
    text: str


def check_rules(points: Sequence[Point]) -> list[Rule]:
    """Return all rules in their order, checked on the points of a study (see `analysis.scaling.points.read_points`)."""
    return [
        Rule(number, title, *((True, check) if isinstance(check, str) else check(points)))
        for number, (title, check) in enumerate(_CHECKS, start=1)
    ]


def rule_lines(rules: Sequence[Rule]) -> list[str]:
    """Return a line for each rule that does not hold."""
    return [f"rule {rule.number}, {rule.title}: {rule.text}" for rule in rules if rule.holds is False]


def _base(points: Sequence[Point]) -> Finding:
    bases = base_points(points)
    unreal = sorted(
        line
        for line, base in bases.items()
        if any(SOURCES.index(point.source) < SOURCES.index(base.source) for point in points if point.line == line)
    )
    if unreal:
        return False, f"the base of {_named(unreal)} is less real than other points; run it as these were run"
    bare = "; ".join(
        f"{line}: {number(base.images_per_s)} images/s on {counted(base.ranks, 'rank')}, {base.source}"
        for line, base in sorted(bases.items())
    )
    return True, f"the base of each line is stated with its figure: {bare}"


def _subset(points: Sequence[Point]) -> Finding:
    lines = {line: {point.ranks for point in points if point.line == line} for line in base_points(points)}
    everywhere = set().union(*lines.values())
    gaps = {line: sorted(everywhere - ranks) for line, ranks in sorted(lines.items()) if everywhere - ranks}
    if gaps:
        shown = "; ".join(f"{line} lacks {_named(map(str, ranks))} ranks" for line, ranks in gaps.items())
        return (
            False,
            f"not every line has every number of ranks ({shown}); run these points, or say why they are left out",
        )
    return True, "every line has a point on every number of ranks; all points that were given are shown"


def _means(points: Sequence[Point]) -> Finding:
    odd = [
        _name(point)
        for point in points
        if point.num_images is not None and point.num_images != point.images_per_step * len(point.step_s)
    ]
    if odd:
        return (
            False,
            f"steps of {_named(odd)} differ in their images, so one rate does not represent them; make them equal",
        )
    return (True, "images/s are the images of a step over its median time; their mean in the CSV is the harmonic one")


def _intervals(points: Sequence[Point]) -> Finding:
    random = [point for point in points if not point.is_deterministic]
    if not random:
        return True, "all points are simulated and deterministic"
    without = [point for point in random if point.step_interval_s.is_range]
    if without:
        return False, (
            f"{_named(map(_name, without))} have fewer than {min_values()} steps, so bars are ranges; "
            "raise train.steps, or repeat the runs"
        )
    unlike = [_name(point) for point in random if _are_unlike(point.run_intervals_s)]
    if unlike:
        return False, (
            f"runs of {_named(unlike)} differ by more than their steps do, which the intervals leave out; "
            "repeat the runs, and say from how many each figure is"
        )
    return True, "every point that is not deterministic has the 95 % interval of its median"


def _are_unlike(runs: Sequence[Interval]) -> bool:
    """Return whether the intervals of two runs do not overlap; ranges of few steps are ignored."""
    return any(
        not run.overlaps(other) for run, other in combinations(runs, 2) if not run.is_range and not other.is_range
    )


def _comparisons(points: Sequence[Point]) -> Finding:
    pairs = [
        (point, other)
        for point, other in combinations(points, 2)
        if (point.ranks, point.source) == (other.ranks, other.source) and point.line != other.line
    ]
    if not pairs:
        return None, "no two lines have a point of one source on as many ranks"
    alike = [
        f"{point.line} and {other.line} on {counted(point.ranks, 'rank')}"
        for point, other in pairs
        if not (point.is_deterministic and other.is_deterministic)
        and point.images_per_s_interval.overlaps(other.images_per_s_interval)
    ]
    if alike:
        return False, f"intervals of {_named(alike)} overlap; call neither faster, or measure more steps"
    return True, "where two lines differ on as many ranks, their intervals do not overlap"


def _tails(points: Sequence[Point]) -> Finding:
    slow = [
        f"{_name(point)} ({100 * (point.step_p95_s / point.step_median_s - 1):.0f} %)"
        for point in points
        if point.step_p95_s > (1.0 + TAIL) * point.step_median_s
    ]
    if slow:
        return False, (
            f"the 95th percentile exceeds the median by more than {100 * TAIL:.0f} % at {_named(slow)}; "
            "quote it beside the median, and look at the slow steps in the timeline"
        )
    return True, "the 95th percentile is shown with the median and is close to it"


def _documentation(points: Sequence[Point]) -> Finding:
    missing = sorted({name for point in points for name in point.setting.missing})
    if missing:
        where = [_name(point) for point in points if point.setting.missing]
        return (
            False,
            f"traces of {_named(where)} lack {_named(missing)}; collect them anew, from a checkout of the code",
        )
    commits = sorted({commit for point in points for commit in point.setting.commits})
    if len(commits) > 1:
        shown = _named(commit[:10] for commit in commits)
        return (False, f"the points were run by different code ({shown}); run all by one commit, or say what changed")
    torn = [commit[:10] for commit in commits if commit.endswith("-dirty")]
    if torn:
        return (
            False,
            f"the code differed from its commit {torn[0]}; commit it, or keep each run's provenance/ with the figure",
        )
    for source in SOURCES:
        versions = {each for point in points if point.source == source for each in point.setting.versions}
        names = [each.split(" ")[0] for each in versions]
        mixed = sorted({name for name in names if names.count(name) > 1})
        if mixed:
            return (False, f"{source} points were run by different versions of {_named(mixed)}; run all by the same")
    return True, "traces hold configuration, commit, versions and hosts; each run's folder holds the rest"


def _summary(points: Sequence[Point]) -> Finding:
    cold = [_name(point) for point in points if not point.is_deterministic and not point.setting.num_warmup_steps]
    if cold:
        return False, f"{_named(cold)} leave no warm-up step out; set train.warmup_steps"
    off = [_name(point) for point in points if point.setting.clock_error_s > CLOCK_SHARE * point.step_median_s]
    if off:
        return (
            False,
            f"clocks of {_named(off)} are known to worse than {100 * CLOCK_SHARE:.0f} % of a step; take longer steps",
        )
    return True, f"{OVER_RANKS}, on clocks synchronised with rank 0; warm-up steps are left out"


def _bounds(points: Sequence[Point]) -> Finding:
    bases = base_points(points)
    above = [
        _name(point)
        for point in points
        if (share := point.efficiency_interval(bases[point.line])) is not None and share.low > 1.0 + 1e-9
    ]
    if above:
        return False, (
            f"{_named(above)} are above the ideal line, so the base is no bound; "
            "take a base that is not short of memory, with as many micro-batches a rank"
        )
    return (True, "the ideal from the base on is drawn, and the compute efficiency is in the table if it is known")


def _lines(points: Sequence[Point]) -> Finding:
    kind = scaling_kind(points)
    if kind == "comparison":
        return None, "one number of ranks has no lines"
    if kind == "mixed":
        return (
            False,
            "images and ranks change independently, so points are not joined; "
            "keep the images of a step, or those of a rank",
        )
    apart = [
        f"{point.ranks} and {after.ranks} ranks of {point.line}"
        for point, after in neighbours(points)
        if not may_join(kind, point, after)
    ]
    if apart:
        return False, f"{_named(apart)} are too far apart to be joined; run a point between them"
    return True, "lines join neighbours that are at most four times apart"


def _precision(points: Sequence[Point]) -> Finding:
    short = {
        point: further_values(point.step_interval_s, len(point.step_s), PRECISION)
        for point in points
        if not point.is_deterministic
    }
    if not short:
        return None, "all points are simulated and deterministic"
    wide = [f"{_name(point)} ({count} more)" for point, count in short.items() if count]
    if wide:
        return (False, f"further steps are needed, about: {_named(wide)}; raise train.steps, or repeat the runs")
    return True, f"every median is known to within {100 * PRECISION:.0f} %, at 95 %"


def _name(point: Point) -> str:
    return f"{point.line} on {counted(point.ranks, 'rank')} ({point.source})"


def _named(names: Iterable[str]) -> str:
    """Join names, of many the first few."""
    named = list(names)
    shown = named if len(named) <= MAX_NAMED else [*named[:MAX_NAMED], f"{len(named) - MAX_NAMED} more"]
    return ", ".join(shown[:-1]) + (" and " if len(shown) > 1 else "") + shown[-1]


# A rule that every study keeps has its text in place of a check.
_CHECKS: tuple[tuple[str, Callable[[Sequence[Point]], Finding] | str], ...] = (
    ("state the base case and its absolute figure", _base),
    ("leave out no part of the system without saying why", _subset),
    ("means: arithmetic of costs, harmonic of rates", _means),
    ("average no ratios", "an efficiency is the ratio of two medians of time; no ratios are averaged"),
    ("intervals for what is not deterministic", _intervals),
    ("assume no normal distribution", "intervals are bootstrapped and assume no distribution"),
    ("compare by intervals", _comparisons),
    ("check whether the median is sufficient", _tails),
    ("document factors and set-up", _documentation),
    ("say how times are taken and summarised over ranks", _summary),
    ("show bounds", _bounds),
    ("join points only where interpolation is valid", _lines),
    (f"know the median to within {100 * PRECISION:.0f} %", _precision),
)

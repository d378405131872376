"""The twelve rules of Hoefler and Belli as checks of the claims that a plot of a study supports.

Source: SC 2015, doi 10.1145/2807591.2807644. Their advice to measure until the median is known well
enough is the thirteenth rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from analysis.metrics.statistics import MIN_VALUES, further_values
from analysis.scaling.points import (
    Point,
    base_points,
    describe_base,
    may_join,
    most_real,
    scaling_kind,
)
from gems.trace import SOURCES
from gems.utils.units import counted

PRECISION = 0.05  # half the interval of the median, divided by the median
TAIL = 0.10  # relative excess of the 95th percentile over the median
CLOCK_SHARE = 0.01  # error of a clock relative to a step
MAX_NAMED = 4


@dataclass(frozen=True, slots=True)
class Rule:
    """A claim: whether the points keep a rule (None if it does not apply), and how or why not.

    `number` is the number of the rule, 13 for the precision of the median; `title` is its demand.
    """

    number: int
    title: str
    holds: bool | None
    text: str


# The result of a check: None if the rule is kept, a complaint, or its own verdict with a text.
Finding = tuple[bool | None, str] | str | None
ALL_EXACT = "all points are simulated and deterministic"


def check_rules(points: Sequence[Point]) -> list[Rule]:
    """Check the points of a study against all rules, and return these in order.

    The points come from `analysis.scaling.points.read_points`.
    """
    rules = []
    for number, (title, rule, check) in enumerate(_RULES, start=1):
        verdict = None if check is None else check(points)
        holds, text = (
            verdict
            if isinstance(verdict, tuple)
            else (verdict is None, rule if verdict is None else verdict)
        )
        rules.append(Rule(number, title, holds, text))
    return rules


def rule_lines(rules: Sequence[Rule]) -> list[str]:
    """Return a line for each rule that does not hold."""
    return [
        f"rule {rule.number}, {rule.title}: {rule.text}" for rule in rules if rule.holds is False
    ]


def _base(points: Sequence[Point]) -> Finding:
    bases = base_points(points)
    source_of = SOURCES.index
    unreal = {
        point.line
        for point in points
        if source_of(point.source) < source_of(bases[point.line].source)
    }
    if unreal:
        return (
            f"the base of {_named(sorted(unreal))} is less real than other points; run it as these"
            " were run"
        )
    stated = "; ".join(f"{line}: {describe_base(base)}" for line, base in sorted(bases.items()))
    return True, f"the base of each line is stated with its figure: {stated}"


def _subset(points: Sequence[Point]) -> Finding:
    everywhere = {point.ranks for point in points}
    gaps = []
    for line in sorted(base_points(points)):
        lacking = sorted(everywhere - {point.ranks for point in points if point.line == line})
        if lacking:
            gaps.append(f"{line} lacks {_named(map(str, lacking))} ranks")
    if not gaps:
        return None
    return (
        f"not every line has every number of ranks ({'; '.join(gaps)}); run these points, or say"
        " why they are left out"
    )


def _means(points: Sequence[Point]) -> Finding:
    return _failing(
        points,
        lambda point: point.num_images not in (None, point.images_per_step * len(point.step_s)),
        "steps of {} differ in their images, so one rate does not represent them; make them equal",
    )


def _intervals(points: Sequence[Point]) -> Finding:
    if all(point.is_deterministic for point in points):
        return True, ALL_EXACT
    return _failing(
        points,
        lambda point: point.has_range,
        f"{{}} have fewer than {MIN_VALUES} steps, so bars are ranges; raise train.steps, or"
        " repeat the runs",
    ) or _failing(
        points,
        _has_unlike_runs,
        "runs of {} differ by more than their steps do, which the intervals leave out; "
        "repeat the runs, and say from how many each figure is",
    )


def _has_unlike_runs(point: Point) -> bool:
    """Return whether the intervals of two runs do not overlap; ranges of few steps are ignored."""
    runs = (
        [] if point.is_deterministic else [run for run in point.run_intervals_s if not run.is_range]
    )
    return any(not run.overlaps(other) for run, other in combinations(runs, 2))


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
    return (
        f"intervals of {_named(alike)} overlap; call neither faster, or measure more steps"
        if alike
        else None
    )


def _tails(points: Sequence[Point]) -> Finding:
    return _failing(
        points,
        lambda point: point.step_p95_s > (1.0 + TAIL) * point.step_median_s,
        f"the 95th percentile exceeds the median by more than {100 * TAIL:.0f} % at {{}}; "
        "quote it beside the median, and look at the slow steps in the timeline",
        lambda point: f" ({100 * (point.step_p95_s / point.step_median_s - 1):.0f} %)",
    )


def _documentation(points: Sequence[Point]) -> Finding:
    missing = sorted({name for point in points for name in point.setting.missing})
    if missing:
        advice = f"lack {_named(missing)}; collect them anew, from a checkout of the code"
        return _failing(
            points, lambda point: bool(point.setting.missing), f"traces of {{}} {advice}"
        )
    commits = sorted({commit for point in points for commit in point.setting.commits})
    if len(commits) > 1:
        shown = _named(commit[:10] for commit in commits)
        return (
            f"the points were run by different code ({shown}); run all by one commit, or say what"
            " changed"
        )
    torn = [commit[:10] for commit in commits if commit.endswith("-dirty")]
    if torn:
        return (
            f"the code differed from its commit {torn[0]}; commit it, or keep each run's"
            " provenance/ with the figure"
        )
    for source in SOURCES:
        versions = {
            version
            for point in points
            if point.source == source
            for version in point.setting.versions
        }
        names = [version.split(" ")[0] for version in versions]
        mixed = sorted({name for name in names if names.count(name) > 1})
        if mixed:
            return (
                f"{source} points were run by different versions of {_named(mixed)}; run all by the"
                " same"
            )
    return None


def _summary(points: Sequence[Point]) -> Finding:
    return _failing(
        points,
        lambda point: not point.is_deterministic and not point.setting.num_warmup_steps,
        "{} leave no warm-up step out; set benchmark.skip_steps",
    ) or _failing(
        points,
        lambda point: point.setting.clock_error_s > CLOCK_SHARE * point.step_median_s,
        f"clocks of {{}} are known to worse than {100 * CLOCK_SHARE:.0f} % of a step; take longer"
        " steps",
    )


def _bounds(points: Sequence[Point]) -> Finding:
    bases = base_points(points)

    def is_above(point: Point) -> bool:
        share = point.efficiency_interval(bases[point.line])
        return share is not None and share.low > 1.0 + 1e-9

    return _failing(
        points,
        is_above,
        "{} are above the ideal line, so the base is no bound; "
        "take a base that is not short of memory, with as many micro-batches a rank",
    )


def _lines(points: Sequence[Point]) -> Finding:
    kind = scaling_kind(points)
    if kind == "comparison":
        return None, "one number of ranks has no lines"
    if kind == "mixed":
        return (
            "images and ranks change independently, so points are not joined; "
            "keep the images of a step, or those of a rank"
        )
    apart = [
        f"{point.ranks} and {after.ranks} ranks of {point.line}"
        for line in dict.fromkeys(point.line for point in points)
        for point, after in pairwise(most_real([point for point in points if point.line == line]))
        if not may_join(kind, point, after)
    ]
    return (
        f"{_named(apart)} are too far apart to be joined; run a point between them"
        if apart
        else None
    )


def _precision(points: Sequence[Point]) -> Finding:
    if all(point.is_deterministic for point in points):
        return None, ALL_EXACT
    return _failing(
        points,
        lambda point: not point.is_deterministic and _steps_needed(point) > 0,
        "further steps are needed, about: {}; raise train.steps, or repeat the runs",
        lambda point: f" ({_steps_needed(point)} more)",
    )


def _steps_needed(point: Point) -> int:
    return further_values(point.step_interval_s, len(point.step_s), PRECISION)


def _failing(
    points: Sequence[Point],
    fails: Callable[[Point], bool],
    text: str,
    detail: Callable[[Point], str] = lambda _: "",
) -> str | None:
    """Return `text` with the names of the failing points in place of `{}`, or None if all pass."""
    names = [
        f"{point.line} on {counted(point.ranks, 'rank')} ({point.source}){detail(point)}"
        for point in points
        if fails(point)
    ]
    return text.format(_named(names)) if names else None


def _named(names: Iterable[str]) -> str:
    """Join names; if there are many, only the first few."""
    named = list(names)
    shown = (
        named if len(named) <= MAX_NAMED else [*named[:MAX_NAMED], f"{len(named) - MAX_NAMED} more"]
    )
    return ", ".join(shown[:-1]) + (" and " if len(shown) > 1 else "") + shown[-1]


# Title, text if the rule is kept, and check; a rule that every study keeps has none.
_RULES: tuple[tuple[str, str, Callable[[Sequence[Point]], Finding] | None], ...] = (
    ("state the base case and its absolute figure", "", _base),
    (
        "leave out no part of the system without saying why",
        "every line has a point on every number of ranks; all points that were given are shown",
        _subset,
    ),
    (
        "means: arithmetic of costs, harmonic of rates",
        (
            "images/s are the images of a step over its median time; their mean in the CSV is the"
            " harmonic one"
        ),
        _means,
    ),
    (
        "average no ratios",
        "an efficiency is the ratio of two medians of time; no ratios are averaged",
        None,
    ),
    (
        "intervals for what is not deterministic",
        "every point that is not deterministic has the 95 % interval of its median",
        _intervals,
    ),
    (
        "assume no normal distribution",
        "intervals are bootstrapped and assume no distribution",
        None,
    ),
    (
        "compare by intervals",
        "where two lines differ on as many ranks, their intervals do not overlap",
        _comparisons,
    ),
    (
        "check whether the median is sufficient",
        "the 95th percentile is shown with the median and is close to it",
        _tails,
    ),
    (
        "document factors and set-up",
        "traces hold configuration, commit, versions and hosts; each run's folder holds the rest",
        _documentation,
    ),
    (
        "say how times are taken and summarised over ranks",
        (
            "a step lasts from the last rank's end of the one before to its own last rank's end:"
            " the slowest rank counts, on clocks synchronised with rank 0; warm-up steps are"
            " left out"
        ),
        _summary,
    ),
    (
        "show bounds",
        (
            "the ideal from the base on is drawn, and the compute efficiency is in the table if it"
            " is known"
        ),
        _bounds,
    ),
    (
        "join points only where interpolation is valid",
        "lines join neighbours that are at most four times apart",
        _lines,
    ),
    (
        f"know the median to within {100 * PRECISION:.0f} %",
        f"every median is known to within {100 * PRECISION:.0f} %, at 95 %",
        _precision,
    ),
)

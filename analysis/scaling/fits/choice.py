"""Which laws are fitted to which lines of a study, and which of the fits is the best."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from analysis.scaling.efficiency import scaling_kind
from analysis.scaling.fits.fit import Fit, fit_law, too_few
from analysis.scaling.fits.laws import LAWS, Law
from analysis.scaling.fits.series import FEWEST_POINTS, make_series
from analysis.scaling.points import Point
from gems.errors import ConfigError, one_of

CHOICES = (*LAWS, "all", "none")
_FLOOR, _HANDICAP = 1e-4, 1.1


def fit_laws(points: Sequence[Point], choice: str = "all", seed: int = 0) -> list[Fit]:
    """Return the fits of a study's lines, by line, the best first.

    `choice` is a law, all of those that have points enough, or none.

    Raises:
        ConfigError: another choice, or one law for which no line has points enough.
    """
    if choice not in CHOICES:
        raise ConfigError("fit", choice, one_of(CHOICES))
    laws = _laws(choice)
    series = make_series(points)
    if choice in LAWS and not any(each.num_ranks >= LAWS[choice].fewest_points for each in series):
        raise ConfigError("fit", choice, "; ".join(why_not_fitted(points, choice)), "add points to the study")
    fits = [fit_law(law, each, seed) for each in series for law in laws if each.num_ranks >= law.fewest_points]
    return sorted(fits, key=lambda fit: (fit.line, _merit(fit)))


def best_fits(fits: Iterable[Fit]) -> dict[str, Fit]:
    """Return the best fit of each line: that with the least error of leaving points out.

    A law with one more parameter must be better by a tenth, and below 0.01 % the one with the fewest is best.
    """
    best: dict[str, Fit] = {}
    for fit in sorted(fits, key=_merit):
        best.setdefault(fit.line, fit)
    return best


def why_not_fitted(points: Sequence[Point], choice: str = "all") -> list[str]:
    """Return a reason for each of the chosen laws that no line has points enough for; none where all were fitted.

    That a comparison on one number of ranks has no fit says itself, unless a law was asked for.
    """
    if choice == "none" or (choice == "all" and scaling_kind(points) == "comparison"):
        return []
    most = max((each.num_ranks for each in make_series(points)), default=None)
    if most is None:
        return [
            f"a fit needs points on {FEWEST_POINTS} numbers of ranks of one source in strong, weak or capability scaling"
        ]
    return [f"{law.name} {too_few(law, most)}" for law in _laws(choice) if most < law.fewest_points]


def _laws(choice: str) -> list[Law]:
    return [] if choice == "none" else [LAWS[choice]] if choice in LAWS else list(LAWS.values())


def _merit(fit: Fit) -> tuple[float, int]:
    return max(fit.error, _FLOOR) * _HANDICAP**fit.num_fitted, fit.num_fitted

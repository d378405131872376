"""Laws of scaling fitted to points.

Amdahl, Gustafson, the universal scalability law and the performance-model normal form.

Amdahl 1967; Gustafson 1988; Gunther 1993 and 2007 (universal scalability law); Calotoiu et al. 2013 (normal form).
"""

from analysis.scaling.fits.fit import (
    CHOICES,
    MAX_EXTRAPOLATION,
    Fit,
    Residual,
    Series,
    best_fits,
    fit_law,
    fit_laws,
    make_series,
    why_not_fitted,
)
from analysis.scaling.fits.laws import LAWS, Law

__all__ = [
    "CHOICES", "LAWS", "MAX_EXTRAPOLATION", "Fit", "Law", "Residual", "Series", "best_fits", "fit_law", "fit_laws",
    "make_series",
    "why_not_fitted",
]  # fmt: skip

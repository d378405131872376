"""Loss attribution: where the time of a step goes, from a trace alone."""

from __future__ import annotations

from analysis.attribution.causes import CAUSES, Attribution, attribution_of

__all__ = ["CAUSES", "Attribution", "attribution_of"]

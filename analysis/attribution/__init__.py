"""Loss attribution: where the time of a step goes, from a trace alone."""

from __future__ import annotations

from analysis.attribution.causes import CAUSES, Attribution, attribute

__all__ = ["CAUSES", "Attribution", "attribute"]

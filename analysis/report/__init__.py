"""The report: one HTML page that holds everything about one run or several, and needs neither server nor network."""

from __future__ import annotations

from analysis.report.build import Report, build_report

__all__ = ["Report", "build_report"]

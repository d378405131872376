"""Exports: a run's events for Perfetto or as a table, step times for Extra-P."""

from __future__ import annotations

from analysis.export.formats import Export, export_runs

__all__ = ["Export", "export_runs"]

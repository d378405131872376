"""Exports: a run's events for Perfetto or as a table, and step times for Extra-P."""

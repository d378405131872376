"""Exports: a run's events for Perfetto or as a table, step times for Extra-P."""

"""Pipelines that others measured, simulated from a data sheet and one of their rows."""

"""Verification of a run against the same training in one process."""

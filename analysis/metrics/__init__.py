"""Figures of a run, from its trace."""

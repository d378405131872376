"""Supervision of ranks: failures, hangs, progress, memory samples and trace events."""

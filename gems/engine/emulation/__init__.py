"""Ranks whose compute is a timed wait and whose messages are real."""

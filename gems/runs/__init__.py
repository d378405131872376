"""What a run is before and beside its ranks.

Its plan, its folder, where it came from, and its heartbeats.
"""

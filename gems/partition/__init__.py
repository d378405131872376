"""Partition methods: an exact method, and the published ones by their names (no torch here)."""

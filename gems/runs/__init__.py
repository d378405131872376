"""What a run is before and beside its ranks: its folder, where it came from, and its heartbeats."""

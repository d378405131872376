"""What a run is before and beside its ranks: its plan, its folder, where it came from, and its heartbeats."""

"""What stays on the device: the memory of every rank under a schedule, a partition and a plan (no torch here)."""

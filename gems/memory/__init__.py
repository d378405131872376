"""What stays on the device: the memory of every rank under a schedule, a cut and a plan (no torch here)."""

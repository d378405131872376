"""What stays on the device: the memory of every rank under a schedule and a cut (no torch here)."""

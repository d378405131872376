"""The memory of every rank under a schedule, a partition and a memory plan (no torch here)."""

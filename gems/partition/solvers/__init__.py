"""Searches for the partition of least cost, depending on how stages are placed on ranks."""

"""Searches for the partition of least cost, by how stages lie on ranks."""

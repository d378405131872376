"""Activations that leave for host memory and come back: the store, its copies, the host's pool."""

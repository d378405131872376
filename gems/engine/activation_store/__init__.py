"""Tensors that segments save for backward, on the device or in host memory, and their copies."""

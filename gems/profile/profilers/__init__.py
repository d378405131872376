"""Profilers: measure on this device, or use fake tensors. This package needs torch."""

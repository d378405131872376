"""Stages: whole, compiled, in strips, and with their saved tensors in the activation store."""

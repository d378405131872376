"""Benchmarks' runners and helpers for clusters; run from a checkout as `python -m scripts.NAME`."""

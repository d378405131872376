"""Benchmarks, one file each; `make bench-NAME` runs `python -m scripts.bench.NAME`."""

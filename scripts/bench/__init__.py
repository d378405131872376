"""Benchmarks: a file a question, on one rig; `make bench-NAME` runs `python -m scripts.bench.NAME`."""

"""Proofs and measurements on a machine with a GPU, in three parts: `scripts/on_gpu.sh`."""

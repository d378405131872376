"""The losses of runs, as sums over micro-batches and over positions of maps."""

"""Forward and backward of layers: split backward, recompute, mixed precision, random numbers.

Needs torch, but no MPI.
"""

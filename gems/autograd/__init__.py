"""How layers run forward and backward: split backward passes, recompute and strips.

Needs torch, no MPI.
"""

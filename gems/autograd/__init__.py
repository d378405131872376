"""How layers run forward and backward: split backward passes and recompute. Needs torch, no MPI."""

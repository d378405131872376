"""Jobs: runs started from a login node or a laptop. Nothing here loads torch, MPI or plotting."""

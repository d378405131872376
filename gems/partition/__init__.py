"""Partition: where to cut the list of layers into stages. Pure: no torch, no MPI, no Hydra."""

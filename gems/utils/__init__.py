"""Utilities for all parts: a cache, atomic files, processes, quiet libraries.

This package uses neither torch nor MPI.
"""

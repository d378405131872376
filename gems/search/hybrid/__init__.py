"""Data parallelism against hybrid data x model parallelism (Pal et al. 2019)."""

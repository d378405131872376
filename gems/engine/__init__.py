"""The engine: what a rank does. The only part that loads torch and MPI."""

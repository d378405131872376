"""SLURM's commands, jobs, site and limits, and submission to it."""

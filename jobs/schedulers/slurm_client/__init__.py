"""The SLURM client: commands, jobs, messages, site, limits, submission."""

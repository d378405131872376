"""The batch systems for jobs, one file each, behind one interface."""

ORDER = ("slurm", "flux", "pbs")

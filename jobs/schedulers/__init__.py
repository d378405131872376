"""The batch systems that jobs are submitted to, one file each, behind one interface."""

ORDER = ("slurm", "flux", "pbs")

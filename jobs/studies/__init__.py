"""Studies: their points, run here or as jobs."""

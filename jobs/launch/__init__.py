"""Launch a prepared run, here or in a job: start the ranks, watch them, collect the traces."""

"""The launch of a prepared run, here or in a job: start the ranks, watch, collect."""

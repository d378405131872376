"""Read runs, traces and answers."""

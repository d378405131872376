"""Reading runs, traces and answers."""

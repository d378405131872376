"""The verbs of `python -m jobs`, one file each."""

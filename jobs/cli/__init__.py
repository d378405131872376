"""The verbs of `gems-jobs`, one file each."""

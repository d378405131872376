"""The verbs of `gems`, one file each."""

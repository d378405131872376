"""The command line of `gems-analysis`."""

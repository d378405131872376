"""The command line of `python -m analysis`."""

"""The state of runs and studies."""

"""Checkpoints of a run, from which it can continue, and the weights of a finished one."""

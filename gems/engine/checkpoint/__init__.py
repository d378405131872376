"""Checkpoints: the whole state of a run before a step, to go on from; and the weights that a finished run leaves."""

"""Evaluation: validation while a run trains, and the weights of a run measured by ranks of their own."""

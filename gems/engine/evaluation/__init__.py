"""Evaluation: validation during training, and measuring a run's weights on ranks of their own."""

"""What becomes of gradients: their sum over copies, and the step of the optimizer."""

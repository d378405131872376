"""Published memory policies: recompute, vDNN and LMS."""

"""Backward split into input gradients (I) and weight gradients (W), bit-equal to a full backward (Qi et al. 2023)."""

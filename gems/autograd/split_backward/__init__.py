"""Backward split into input gradients (I) and weight gradients (W).

The gradients are bit-equal to a full backward (Qi et al. 2023).
"""

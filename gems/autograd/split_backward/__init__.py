"""The backward split into input gradients (I) and weight gradients (W).

The gradients are bit-equal to those of a full backward (Qi et al. 2023).
"""

"""LMS: tensors swapped by distance in the graph (TFLMSv2), or by need (the PyTorch variant).

Swapping by need happens under a limit.
"""

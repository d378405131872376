"""LMS: tensors swapped by their distance in the graph (TFLMSv2), or by need under a limit (the PyTorch variant)."""

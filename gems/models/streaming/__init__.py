"""Rows of layers that take an image strip by strip (no torch here): which rows each gives, reads and keeps."""

"""Rows of layers that take an image strip by strip (no torch here).

Which rows each gives, reads and keeps.
"""

"""Layers that take an image strip by strip.

Traced into operations, each of which runs on the rows that are there.
"""

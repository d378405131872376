"""Strips on a rank: stages that take an image strip by strip, and how they are built."""

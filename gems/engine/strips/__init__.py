"""Strips on a rank: stages that take an image strip by strip, and how a run's stages become such."""

"""Layers whose backward computes the input gradient first and the weight gradient later."""

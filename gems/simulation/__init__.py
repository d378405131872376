"""Prediction of a step from its schedule, the costs of a profile, a network, jitter, calibration."""

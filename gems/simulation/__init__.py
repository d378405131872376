"""Prediction of a step from its schedule and a profile's costs, network, jitter and calibration."""

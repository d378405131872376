"""What a step will take: the schedule with the costs of a profile, a network, jitter and calibration."""

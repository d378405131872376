"""The plan of a run: its profile, costs, partition, schedule, memory plan and prediction."""

"""Schedules as JSON, as the CSV of torch.distributed.pipelining, and as text."""

"""What is checked before a job is queued."""

"""Volumes in medical and scientific formats, read whole or in blocks."""

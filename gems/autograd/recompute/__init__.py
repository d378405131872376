"""Recompute layers before their backward, bit-equal to their first forward."""

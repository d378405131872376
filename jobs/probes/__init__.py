"""Probes of a cluster before the ranks start, and their kept results."""

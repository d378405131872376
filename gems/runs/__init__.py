"""Runs apart from their ranks: the folder, its owner, provenance, heartbeats and simulation."""

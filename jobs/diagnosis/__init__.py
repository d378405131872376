"""Diagnose why a run ended, and advise what to change."""

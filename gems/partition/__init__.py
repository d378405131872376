"""Where to cut a model into stages: an exact method, and the published ones by their names (no torch here)."""

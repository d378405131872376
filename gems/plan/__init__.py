"""The plan of a run: the one builder from a configuration to what its ranks run and what a step takes."""

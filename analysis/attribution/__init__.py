"""Loss attribution: where the time of a step goes, from a trace alone."""

"""Loss attribution: find where the time of a step goes, from a trace alone."""

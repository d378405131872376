"""Published schedules, one file a family: each a pure function that can be read beside its paper."""
